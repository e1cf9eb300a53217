"""What a step through Twinkle costs over the same step written by hand in PyTorch and PEFT.

LoRA (r 8, all linear layers), fp32, AdamW, clipping; the same rows, collated on both sides; runs in turn (ABAB), CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.report import Report, median_ratio, paired

Row = dict[str, list[int]]


def main(pairs: int = 12, tiny_pairs: int = 400) -> int:
    """Measure on the 135M model and on a tiny one."""
    report = Report('overhead', 'forward_backward + clip_grad_and_step against a hand-written PyTorch + PEFT loop')
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on matrices this small a second thread only spins, which counts as CPU time
    with tempfile.TemporaryDirectory() as folder:
        by_hand, ours = _sides(_tiny_model(folder), vocab=64, length=(16, 32))
        times = paired(by_hand, ours, tiny_pairs, warm_up=10)
        added = statistics.median(b - a for a, b in zip(*times, strict=True))
        report.figure('tiny Llama, 4 rows', 'by hand', 1e3 * statistics.median(times[0]), 'ms CPU')
        report.figure('tiny Llama, 4 rows', 'added per step', 1e3 * added, 'ms CPU', 0.5)

    torch.set_num_threads(threads)
    from twinkle.hub import resolve_model

    by_hand, ours = _sides(resolve_model('smollm2://135m-instruct'), vocab=49_152, length=(48, 64))
    times = paired(by_hand, ours, pairs)
    report.figure('SmolLM2-135M, 4 rows of 48-64', 'by hand', statistics.median(times[0]), 's CPU')
    report.figure('SmolLM2-135M, 4 rows of 48-64', 'time over by hand', median_ratio(*times), 'ratio', 1.05)
    return report.end()


def _tiny_model(folder: str) -> str:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _sides(model_id: str, *, vocab: int, length: tuple[int, int]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One step by hand, and one step through Twinkle; each call takes the next batch, the same for both."""
    rng = random.Random(0)
    batches = [[_row(rng, vocab, length) for _ in range(4)] for _ in range(64)]
    return _by_hand(model_id, _forever(batches)), _ours(model_id, _forever(batches))


def _forever(batches: list[list[Row]]) -> Callable[[], list[Row]]:
    from itertools import cycle

    stream = cycle(batches)
    return lambda: next(stream)


def _row(rng: random.Random, vocab: int, length: tuple[int, int]) -> Row:
    ids = [rng.randrange(1, vocab) for _ in range(rng.randint(*length))]
    return {'input_ids': ids, 'labels': [*ids[1:], -100]}


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules='all-linear')


def _by_hand(model_id: str, next_batch: Callable[[], list[Row]]) -> Callable[[], float]:
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32), _lora()).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
        longest = max(len(row['input_ids']) for row in rows)
        padded = {
            key: [row[key] + [fill] * (longest - len(row[key])) for row in rows]
            for key, fill in (('input_ids', 0), ('labels', -100))
        }
        mask = [[1] * len(row['input_ids']) + [0] * (longest - len(row['input_ids'])) for row in rows]
        return {'attention_mask': torch.tensor(mask), **{key: torch.tensor(value) for key, value in padded.items()}}

    def step() -> float:
        batch = collate(next_batch())
        labels = batch.pop('labels')
        logits = model(**batch, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.item()

    return step


def _ours(model_id: str, next_batch: Callable[[], list[Row]]) -> Callable[[], float]:
    from twinkle.model import TransformersModel

    model = TransformersModel(model_id, mixed_precision='no')
    model.add_adapter_to_model('default', _lora())
    model.set_optimizer('AdamW', lr=1e-4)
    model.set_lr_scheduler('constant')

    def step() -> float:
        loss: float = model.forward_backward(inputs=next_batch())['loss']
        model.clip_grad_and_step()
        return loss

    return step


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--pairs', type=int, default=12, help='on the 135M model (default: %(default)s)')
    parser.add_argument('--tiny-pairs', type=int, default=400, help='on the tiny model (default: %(default)s)')
    options = parser.parse_args()
    raise SystemExit(main(options.pairs, options.tiny_pairs))
