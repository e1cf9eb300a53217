"""Several tenants' rows in one pass, against plain PEFT that switches adapters, and against the same class one tenant after the other.

LoRA r 8 on all linear layers of each tenant, fp32; forward and backward of the same rows, gradients accumulating on both sides; runs in
turn (ABAB), CPU time, the median of the pairs' ratios. Plain PEFT computes full logits, as its users do.
"""

from __future__ import annotations

import random
import resource
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.report import Report, median_ratio, paired

Step = Callable[[], Any]
WINDOW = 10**9  # no step is taken


def main(pairs: int = 10) -> int:
    """Measure on a tiny model and on the 135M model."""
    import torch

    from twinkle.hub import resolve_model

    report = Report(
        'multi_lora', 'one pass for several tenants, against plain PEFT set_adapter and against taking turns'
    )
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        for tenants in (1, 4, 8, 16):
            _compare(report, 'tiny', _tiny(folder), 64, tenants, 4 * pairs, None, lengths=[32])
    torch.set_num_threads(threads)
    model_id = resolve_model('smollm2://135m-instruct')
    bounds = {1: None, 4: 1.5, 8: 1.7, 16: 1.7}
    for tenants, bound in bounds.items():
        _compare(report, 'SmolLM2-135M', model_id, 49_152, tenants, pairs, bound, lengths=[32])
    _compare(report, 'SmolLM2-135M, mixed ranks', model_id, 49_152, 4, pairs, None, lengths=[32], ranks=[2, 4, 8, 16])
    _compare(report, 'SmolLM2-135M, unequal lengths', model_id, 49_152, 4, pairs, None, lengths=[16, 32, 24, 56])
    _memory(report, model_id)
    return report.end()


def _tiny(folder: str) -> str:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _rows(vocab: int, tenants: int, lengths: list[int]) -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    rows = []
    for tenant in range(tenants):
        ids = [rng.randrange(1, vocab) for _ in range(lengths[tenant % len(lengths)])]
        rows.append({'input_ids': ids, 'labels': [*ids[1:], -100]})
    return rows


def _compare(
    report: Report,
    what: str,
    model_id: str,
    vocab: int,
    tenants: int,
    pairs: int,
    bound: float | None,
    *,
    lengths: list[int],
    ranks: list[int] | None = None,
) -> None:
    rows = _rows(vocab, tenants, lengths)
    chosen = [(ranks or [8])[tenant % len(ranks or [8])] for tenant in range(tenants)]
    plain, losses = _plain(model_id, rows, chosen)
    fused, turns = _ours(model_id, rows, chosen)
    for mine, theirs in zip(fused().values(), losses(), strict=True):
        assert abs(mine['loss'] - theirs) < 1e-4 * abs(theirs), (mine['loss'], theirs)
    case = f'{what}, {tenants} tenants x 1 row x {lengths[0] if len(lengths) == 1 else lengths}'
    if tenants == 1:
        ratio = median_ratio(*paired(plain, turns, pairs))
        report.figure(case, 'time over plain PEFT', ratio, 'ratio', 1.05 if '135M' in what else None)
        return
    times = paired(fused, plain, pairs)
    report.figure(case, 'plain PEFT', statistics.median(times[1]), 's CPU')
    report.figure(case, 'speed over plain PEFT', median_ratio(*times), 'ratio', bound, at_least=True)
    report.figure(case, 'speed over taking turns', median_ratio(*paired(fused, turns, pairs)), 'ratio')


def _lora(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules='all-linear', init_lora_weights='gaussian')


def _plain(model_id: str, rows: list[Any], ranks: list[int]) -> tuple[Step, Callable[[], list[float]]]:
    import torch
    import transformers
    from peft import get_peft_model

    base = transformers.AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32)
    model: Any = None
    for tenant, rank in enumerate(ranks):
        torch.manual_seed(tenant)
        if model is None:
            model = get_peft_model(base, _lora(rank), adapter_name='t0')
        else:
            model.add_adapter(f't{tenant}', _lora(rank))
    model.train()
    batches = [{key: torch.tensor([value]) for key, value in row.items()} for row in rows]

    def loss_of(tenant: int) -> Any:
        model.set_adapter(f't{tenant}')
        batch = batches[tenant]
        logits = model(input_ids=batch['input_ids'], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[0].float(), batch['labels'][0], ignore_index=-100)

    def step() -> None:
        for tenant in range(len(rows)):
            loss_of(tenant).backward()

    def losses() -> list[float]:
        with torch.no_grad():
            return [float(loss_of(tenant)) for tenant in range(len(rows))]

    return step, losses


def _ours(model_id: str, rows: list[Any], ranks: list[int]) -> tuple[Callable[[], Any], Step]:
    import torch

    from twinkle.model import MultiLoraTransformersModel

    options = {'max_loras': max(len(ranks), 2), 'max_r': max(ranks)}
    model = MultiLoraTransformersModel(model_id=model_id, mixed_precision='no', **options)
    names = [f't{tenant}' for tenant in range(len(ranks))]
    for tenant, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        torch.manual_seed(tenant)
        model.add_adapter_to_model(name, _lora(rank), gradient_accumulation_steps=WINDOW)

    def fused() -> Any:
        return model.forward_backward(inputs=rows, adapter_name=names)

    def turns() -> None:
        for row, name in zip(rows, names, strict=True):
            model.forward_backward(inputs=[row], adapter_name=name)

    return fused, turns


def _memory(report: Report, model_id: str) -> None:
    """What a tenant takes when it comes and trains: its optimizer's state, and its gradients; its weights have their slot."""
    import torch

    from twinkle.model import MultiLoraTransformersModel

    model = MultiLoraTransformersModel(model_id=model_id, mixed_precision='no', max_loras=4, max_r=8)
    slots = sum(layer.down.nbytes + layer.up.nbytes for layer in model._slots.layers.values())
    report.figure('SmolLM2-135M, 4 slots of rank 8', 'slots', slots / 2**20, 'MB')
    before = _tensors()
    torch.manual_seed(0)
    model.multi_lora.acquire_lora('tenant', _lora(8))
    acquired = _tensors() - before
    own = sum(parameter.nbytes for parameter in model.trainable_parameters('tenant'))
    report.figure('acquire, rank 8', 'memory that stays over the weights of the tenant', acquired / own, 'ratio', 0.05)
    model.set_optimizer('AdamW', lr=1e-4, adapter_name='tenant')
    model.forward_backward(inputs=_rows(49_152, 1, [32]), adapter_name='tenant')
    model.clip_grad_and_step(adapter_name='tenant')
    report.figure('after a step', 'memory over the weights of the tenant', (_tensors() - before) / own, 'ratio', 2.1)
    report.figure('the process', 'peak memory', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 'MB')


def _tensors() -> int:
    """Bytes of all storages that tensors of this process hold."""
    import gc

    import torch

    gc.collect()
    seen: dict[int, int] = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and one.device.type == 'cpu':
            storage = one.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


if __name__ == '__main__':
    raise SystemExit(main())
