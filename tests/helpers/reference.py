"""A training loop written by hand in plain PyTorch: what the model is compared with."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Trace:
    """What a run leaves to compare."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)


def random_rows(n: int, *, vocab: int = 64, seed: int = 0, low: int = 3, high: int = 16) -> list[dict[str, Any]]:
    """Rows of unequal length, the first third of each not trained on; labels are shifted, as templates do."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        length = rng.randint(low, high)
        ids = [rng.randrange(1, vocab) for _ in range(length)]
        prompt = length // 3
        targets = [-100 if t < prompt else ids[t] for t in range(length)]
        rows.append({'input_ids': ids, 'labels': [*targets[1:], -100]})
    return rows


def collate(rows: list[dict[str, Any]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Right padding, by hand."""
    longest = max(len(r['input_ids']) for r in rows)
    fill = {'input_ids': pad, 'labels': -100}
    batch = {k: torch.tensor([list(r[k]) + [v] * (longest - len(r[k])) for r in rows]) for k, v in fill.items()}
    batch['attention_mask'] = torch.tensor(
        [[1] * len(r['input_ids']) + [0] * (longest - len(r['input_ids'])) for r in rows]
    )
    return batch


def loss_sum(module: torch.nn.Module, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, int]:
    """Summed cross entropy of full logits against shifted labels, and the number of labels."""
    batch = collate(rows)
    logits = module(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
    labels = batch['labels']
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction='sum'
    )
    return total, int((labels != -100).sum())


def cosine_factor(step: int, warmup: int, total: int) -> float:
    """The learning rate's factor at an optimizer step, by the formula."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))))


def decay_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors and biases do not."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    return [
        {'params': [p for n, p in named if p.ndim > 1 and not n.endswith('bias')], 'weight_decay': weight_decay},
        {'params': [p for n, p in named if p.ndim <= 1 or n.endswith('bias')], 'weight_decay': 0.0},
    ]


def train(
    module: torch.nn.Module,
    windows: list[list[list[dict[str, Any]]]],
    *,
    lr: float,
    warmup: int = 2,
    weight_decay: float = 0.01,
    max_norm: float = 1.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trace:
    """AdamW over windows of micro-batches: the gradient is of the mean over all tokens of the window."""
    optimizer = optimizer or torch.optim.AdamW([g for g in decay_groups(module, weight_decay) if g['params']], lr=lr)
    trace = Trace()
    module.train()
    parameters = [p for p in module.parameters() if p.requires_grad]
    for step, window in enumerate(windows):
        for group in optimizer.param_groups:
            group['lr'] = lr * cosine_factor(step, warmup, len(windows))
        trace.lrs.append(optimizer.param_groups[0]['lr'])
        sums = [loss_sum(module, rows) for rows in window]
        count = sum(n for _, n in sums)
        (sum(total for total, _ in sums) / count).backward()
        trace.losses += [float(total.detach()) / n for total, n in sums]
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return trace
