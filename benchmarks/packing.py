"""Tokens per second of training on packed rows against the same samples in padded batches.

A Llama of 4 layers of 256 (vocabulary 2,048), full parameters, fp32, AdamW, clipping; 64 samples in random order, whose lengths are the
quantiles of a log-normal distribution (median 64, sigma 0.8, at most 512), so that no lucky draw decides how much is padded. An epoch is
4 steps: of 16 samples, padded or laid end to end (`padding_free`), or of a quarter of `PackingDataset`'s rows of up to 512 tokens (which
are made beforehand). Both sides run their epochs in turn (ABAB), CPU time, one thread. The loss, summed over all tokens, must be the
same; that this can tell is seen by rows whose samples do see each other.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.report import Report, median_ratio, paired

SAMPLES, STEPS, LONGEST, VOCAB = 64, 4, 512, 2048
SIDES = {'PackingDataset': 2.0, 'padding_free': 1.4}  # measured: 2.5 to 2.9, and 1.7 to 2.0

Rows = list[dict[str, Any]]


def main(pairs: int = 3) -> int:
    """Measure both ways of packing against padding."""
    report = Report('packing', 'real tokens per second of packed rows against padded batches of the same samples')
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other count as CPU time
    samples = _samples()
    tokens = sum(len(sample['input_ids']) for sample in samples)
    batches = _split(samples)
    packed = _split(_pack(samples))
    case = f'{SAMPLES} samples, {tokens:,} tokens'
    report.figure(case, 'padding in batches of 16', _padding(batches, tokens), 'share')
    report.figure(case, f'padding in batches of packs of {LONGEST}', _padding(packed, tokens), 'share')
    with tempfile.TemporaryDirectory() as folder:
        _save(folder)
        expected, learned = _loss(_model(folder), batches)
        report.figure(case, 'loss by token, padded', expected / learned, 'nats')
        seeing = [[{**row, 'position_ids': list(range(len(row['input_ids'])))} for row in batch] for batch in packed]
        control = abs(_loss(_model(folder), seeing)[0] / expected - 1)
        report.figure(
            'samples that see each other', 'summed loss, difference', 1e6 * control, 'ppm', 100, at_least=True
        )
        for name, bound in SIDES.items():
            free = name == 'padding_free'
            rows = batches if free else packed
            loss, count = _loss(_model(folder, padding_free=free), rows)
            report.figure(name, 'summed loss, difference', 1e6 * abs(loss / expected - 1), 'ppm', 10)
            report.figure(name, 'learned tokens, difference', abs(count - learned), 'tokens', 0)
            times = paired(
                _epoch(_model(folder), batches), _epoch(_model(folder, padding_free=free), rows), pairs, warm_up=1
            )
            speeds = [tokens / statistics.median(side) for side in times]
            report.figure(name, 'padded', speeds[0], 'tokens per CPU s')
            report.figure(name, 'packed', speeds[1], 'tokens per CPU s')
            report.figure(name, 'speed over padded', 1 / median_ratio(*times), 'ratio', bound, at_least=True)
    torch.set_num_threads(threads)
    return report.end()


def _samples() -> Rows:
    rng, normal = random.Random(0), statistics.NormalDist()
    quantiles = [normal.inv_cdf((index + 0.5) / SAMPLES) for index in range(SAMPLES)]
    lengths = [min(round(64 * math.exp(0.8 * quantile)), LONGEST) for quantile in quantiles]
    rng.shuffle(lengths)
    rows = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in lengths]
    return [{'input_ids': ids, 'labels': [*ids[1:], -100]} for ids in rows]


def _pack(samples: Rows) -> Rows:
    from twinkle.dataset import DatasetMeta, PackingDataset

    dataset = PackingDataset(DatasetMeta(samples), packing_length=LONGEST)
    dataset.pack_dataset()
    return list(dataset)


def _split(rows: Rows) -> list[Rows]:
    """A batch for each step, of as equal sizes as can be."""
    ends = [len(rows) * step // STEPS for step in range(STEPS + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends)]


def _padding(batches: list[Rows], tokens: int) -> float:
    """The share of computed places that hold padding."""
    places = sum(len(batch) * max(len(row['input_ids']) for row in batch) for batch in batches)
    return 1 - tokens / places


def _save(folder: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
        initializer_range=0.1,  # large enough for the loss to depend on what a token sees
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def _model(folder: str, *, padding_free: bool = False) -> Any:
    from twinkle.model import TransformersModel

    model = TransformersModel(folder, mixed_precision='no')
    model.set_processor('default', padding_free=padding_free)
    model.set_optimizer('AdamW', lr=1e-4)
    return model


def _loss(model: Any, batches: list[Rows]) -> tuple[float, float]:
    """Summed over all tokens that are learned, and how many these are."""
    outputs = [model.forward_only(inputs=batch, return_logits=False) for batch in batches]
    counts = [float(output['num_tokens']) for output in outputs]
    return sum(float(output['loss']) * count for output, count in zip(outputs, counts, strict=True)), sum(counts)


def _epoch(model: Any, batches: list[Rows]) -> Callable[[], None]:
    def run() -> None:
        for batch in batches:
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step()

    return run


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--pairs', type=int, default=3, help='epochs of each side (default: %(default)s)')
    raise SystemExit(main(parser.parse_args().pairs))
