"""How long a save in the background stops the loop, against one that is waited for; and the size of what is written.

A Llama of 30M parameters, fp32, AdamW with its state, full parameters; then the same with a LoRA adapter (r 8, all linear layers).
Both kinds of save run in turn (ABAB), wall time, on the disk of the temporary folder; the background save is waited for before the next
one begins, which is not counted, nor is what its thread takes from steps meanwhile. Sizes are those of the files over the bytes of their
tensors.

What blocks in the background save is copying into fresh memory: how much faster that is than writing depends on the disk, so the bound
only says that it is. In a process that freed as much before, the copy goes into memory it has and takes about a third of the time; hence
a fresh one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Report, median_ratio, run_module

VOCAB = 2048


def main(saves: int = 7) -> int:
    """Measure with full parameters, and with an adapter."""
    report = Report('checkpoint', 'model.save(save_optimizer=True) with async_save=True against async_save=False')
    for kind, case, longest, largest in (('full', 'full parameters', 0.95, 1.01), ('lora', 'LoRA of r 8', None, None)):
        figures = run_module('benchmarks.checkpoint', kind, '--saves', str(saves))
        report.figure(case, 'parameters of the model', figures.pop('parameters'), 'M')
        report.figure(case, 'blocked by a save', figures.pop('blocked'), 'ms')
        report.figure(case, 'blocked by a save in the background', figures.pop('background'), 'ms')
        report.figure(case, 'until that one is written', figures.pop('whole'), 'ms')
        report.figure(case, 'blocked over blocked', figures.pop('ratio'), 'ratio', longest)
        for metric, value in figures.items():
            is_ratio = metric.endswith('over its tensors')
            report.figure(case, metric, value, 'ratio' if is_ratio else 'MB', largest if is_ratio else None)
    return report.end()


def _measure(kind: str, saves: int) -> dict[str, float]:
    """All figures of one kind, in this process."""
    lora = kind == 'lora'
    with tempfile.TemporaryDirectory() as folder:
        count = _save_model(folder)
        model = _model(folder, lora=lora)
        output = Path(folder, 'output')
        times = _times(model, output, saves)
        medians = (1e3 * statistics.median(side) for side in times)
        figures = dict(zip(('blocked', 'background', 'whole'), medians, strict=True))
        figures |= {'parameters': count / 1e6, 'ratio': median_ratio(times[0], times[1])}
        return figures | _sizes(model, output, lora=lora)


def _save_model(folder: str) -> int:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _model(folder: str, *, lora: bool) -> Any:
    """After a step, so that AdamW has its state."""
    from peft import LoraConfig

    from twinkle.model import TransformersModel

    model = TransformersModel(folder, mixed_precision='no')
    if lora:
        model.add_adapter_to_model('default', LoraConfig(r=8, lora_alpha=16, target_modules='all-linear'))
    model.set_optimizer('AdamW', lr=1e-4)
    model.set_lr_scheduler('constant')
    ids = list(range(1, 33))
    model.forward_backward(inputs=[{'input_ids': ids, 'labels': [*ids[1:], -100]}])
    model.clip_grad_and_step()
    return model


def _times(model: Any, output: Path, saves: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds that each save stops the loop: waited for, in the background, and until the latter is written."""
    from twinkle.checkpoint import wait_for_saves

    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(saves + 1):
        start = time.perf_counter()
        model.save('waited-for', output, save_optimizer=True)
        times[0].append(time.perf_counter() - start)
        start = time.perf_counter()
        model.save('background', output, save_optimizer=True, async_save=True)
        times[1].append(time.perf_counter() - start)
        wait_for_saves(output)
        times[2].append(time.perf_counter() - start)
    return times[0][1:], times[1][1:], times[2][1:]  # the first of each warms up


def _sizes(model: Any, output: Path, *, lora: bool) -> dict[str, float]:
    """The tensors of the model and its optimizer are counted in memory, not in the files."""
    parameters = [p for p in model.model.parameters() if p.requires_grad]
    weights = sum(p.numel() * p.element_size() for p in parameters)
    training = sum(2 * p.numel() * p.element_size() + 4 for p in parameters)  # both moments, and the step in fp32
    files = ('adapter_model.safetensors' if lora else 'model.safetensors', 'training_state.safetensors')
    figures = {}
    for name in ('waited-for', 'background'):
        for file, tensors in zip(files, (weights, training), strict=True):
            size = (output / name / file).stat().st_size
            figures[f'{name}/{file}'] = size / 1e6
            figures[f'{name}/{file} over its tensors'] = size / tensors
        figures[f'{name}, all files'] = sum(path.stat().st_size for path in (output / name).iterdir()) / 1e6
    return figures


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('kind', nargs='?', choices=['full', 'lora'], help='one kind only')
    parser.add_argument('--saves', type=int, default=7, help='of each kind (default: %(default)s)')
    options = parser.parse_args()
    if options.kind is None:
        raise SystemExit(main(options.saves))
    print(json.dumps(_measure(options.kind, options.saves)))
