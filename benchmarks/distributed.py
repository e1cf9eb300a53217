"""A step of two processes through Twinkle over the same step written by hand in PyTorch, and the memory that loading takes on each.

Full parameters and LoRA, AdamW, clipping, the mean over all ranks' tokens, fp32 on gloo; both sides take the same rows, in turn (ABAB),
and every rank waits for the others before the clock starts. One thread per process.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Report

VOCAB, ROWS, TOKENS = 4096, 4, 128
CASES = ('ddp native', 'ddp accelerate', 'fsdp2 native', 'fsdp2 accelerate', 'fsdp2 native lora')


def main(pairs: int = 20) -> int:
    """Launch two processes for the steps, and two for each way of loading."""
    report = Report(
        'distributed', 'two processes: forward_backward + clip_grad_and_step against PyTorch of the same mode'
    )
    with tempfile.TemporaryDirectory() as folder:
        _save(folder, hidden=256, layers=4)
        figures = _launch(folder, 'steps', str(pairs))
        for case in CASES:
            by_hand, ratio = figures[0][case]
            report.figure(case, 'by hand', 1e3 * by_hand, 'ms')
            report.figure(case, 'time over by hand', ratio, 'ratio', 1.08)
        for rank, figure in enumerate(figures):
            report.figure('all of these', f'peak memory of rank {rank}', figure['peak'], 'MB')
    with tempfile.TemporaryDirectory() as folder:
        size = _save(folder, hidden=1024, layers=8)
        for case in ('whole', 'efficient'):
            for rank, figure in enumerate(_launch(folder, 'memory', case)):
                bound = 1.0 * size if case == 'efficient' and rank > 0 else None
                report.figure(
                    f'load {size:.0f} MB, {case}', f'memory of rank {rank} above imports', figure['peak'], 'MB', bound
                )
    return report.end()


def _save(folder: str, *, hidden: int, layers: int) -> float:
    """A random model; its size in MB."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    module = transformers.LlamaForCausalLM(config)
    module.save_pretrained(folder)
    return sum(parameter.numel() for parameter in module.parameters()) * 4 / 2**20


def _launch(folder: str, *arguments: str) -> list[dict[str, Any]]:
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(Path(__file__).parents[1])}
    command = [*launcher, '-m', 'benchmarks.distributed', folder, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f'{" ".join(command)} failed:\n{done.stderr[-3000:]}')
    return [json.loads(Path(folder, f'rank{rank}.json').read_text()) for rank in (0, 1)]


# -- on each rank ----------------------------------------------------------------------------------------------------------------


def _peak() -> float:
    """The most memory that this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _worker(folder: str, what: str, argument: str) -> None:
    import torch

    from twinkle.launcher import rank
    from twinkle.runtime import initialize

    torch.set_num_threads(1)
    with initialize(seed=0):
        found = _steps(folder, int(argument)) if what == 'steps' else _memory(folder, argument)
    Path(folder, f'rank{rank()}.json').write_text(json.dumps(found))


def _memory(folder: str, case: str) -> dict[str, Any]:
    import transformers.models.llama.modeling_llama  # noqa: F401

    import twinkle_hf.parallel.sharded  # noqa: F401 - what is imported is not what is measured
    from twinkle import DeviceMesh
    from twinkle.model import TransformersModel

    before = _peak()
    mesh = DeviceMesh.from_sizes(fsdp_size=2, device_type='cpu')
    options = {'memory_efficient_init': True} if case == 'efficient' else {}
    TransformersModel(folder, mixed_precision='no', device_mesh=mesh, strategy='native_fsdp', **options)
    return {'peak': _peak() - before}


def _steps(folder: str, pairs: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        by_hand, ours = _by_hand(folder, case), _ours(folder, case)
        times: tuple[list[float], list[float]] = ([], [])
        for index in range(pairs + 3):
            rows = _rows(index)
            for side, step in enumerate((by_hand, ours)):
                elapsed = _timed(lambda step=step, rows=rows: step(rows))
                if index >= 3:
                    times[side].append(elapsed)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        found[case] = [statistics.median(times[0]), ratio]
    return {**found, 'peak': _peak()}


def _timed(step: Callable[[], Any]) -> float:
    """Seconds until every rank is through."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def _rows(seed: int) -> list[dict[str, list[int]]]:
    """This rank's rows."""
    from twinkle.launcher import rank

    rng = random.Random(10 * seed + rank())
    ids = [[rng.randrange(1, VOCAB) for _ in range(TOKENS)] for _ in range(ROWS)]
    return [{'input_ids': row, 'labels': [*row[1:], -100]} for row in ids]


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules='all-linear')


def _ours(folder: str, case: str) -> Callable[[Any], Any]:
    from twinkle import DeviceMesh
    from twinkle.model import TransformersModel

    size = 'dp_size' if case.startswith('ddp') else 'fsdp_size'
    mesh = DeviceMesh.from_sizes(**{size: 2}, device_type='cpu')
    strategy: Any = 'accelerate' if 'accelerate' in case else 'native_fsdp'
    model = TransformersModel(folder, mixed_precision='no', device_mesh=mesh, strategy=strategy)
    if 'lora' in case:
        model.add_adapter_to_model('mine', _lora())
    model.set_optimizer('AdamW', lr=1e-4)

    def step(rows: Any) -> None:
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step()

    return step


def _by_hand(folder: str, case: str) -> Callable[[Any], Any]:
    """The module's own loss over full logits, as PyTorch's and Transformers' documentation have it."""
    import torch
    import torch.distributed as dist
    import transformers
    from peft import get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    module: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if 'lora' in case:
        module = get_peft_model(module, _lora())
    if case.startswith('ddp'):
        module = called = DistributedDataParallel(module)
    else:
        base = module.get_base_model() if 'lora' in case else module
        mesh = init_device_mesh('cpu', (2,))
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        if 'accelerate' in case:  # which also shards embeddings and the head apart
            fully_shard(base.model.embed_tokens, mesh=mesh)
            fully_shard([base.model.norm, base.lm_head], mesh=mesh, reshard_after_forward=False)
        fully_shard(base, mesh=mesh)
        called = base
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    module.train()

    def step(rows: Any) -> None:
        ids = torch.tensor([row['input_ids'] for row in rows])
        labels = torch.tensor([row['labels'] for row in rows])
        count = (labels != -100).sum()
        dist.all_reduce(count)
        logits = called(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction='sum'
        )
        (loss / count * 2).backward()  # gradients are averaged over the two ranks
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        float(norm.full_tensor() if hasattr(norm, 'full_tensor') else norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == '__main__':
    _worker(*sys.argv[1:])
