"""The same samples padded, or packed into rows: losses must not see a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LAYOUTS = ('tight', 'padded', 'padded left', 'one row', 'rows of several')


@dataclass
class Samples:
    """Per-sample tensors of unequal length: the labels' mask, log-probabilities (leaves of the graph), and whatever else by token."""

    kept: list[Tensor]
    logps: list[Tensor]
    by_token: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many samples."""
        return len(self.kept)


def make_samples(count: int, *, seed: int = 0, extra: Sequence[str] = (), low: int = 2, high: int = 7) -> Samples:
    """Random samples whose first positions and whose last are not trained on; some have one token to learn, some many."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    kept, logps = [], []
    by_token: dict[str, list[Tensor]] = {name: [] for name in extra}
    for length in lengths:
        first = int(torch.randint(0, length - 1, (), generator=generator))
        mask = torch.zeros(length, dtype=torch.bool)
        mask[first : length - 1] = True
        kept.append(mask)
        logps.append(-torch.rand(length, generator=generator, dtype=torch.float64).add(0.05).mul(2).requires_grad_())
        for name in extra:
            noise = torch.randn(length, generator=generator, dtype=torch.float64)
            by_token[name].append(logps[-1].detach() + 0.3 * noise if name.endswith('logps') else noise)
    logps = [torch.where(mask, value.detach(), 0.0).requires_grad_() for mask, value in zip(kept, logps, strict=True)]
    return Samples(kept, logps, by_token)


def rows_of(count: int, layout: str) -> list[list[int]]:
    """Which samples each row holds."""
    if layout == 'one row':
        return [list(range(count))]
    if layout == 'rows of several':
        return [list(range(i, min(i + 3, count))) for i in range(0, count, 3)]
    return [[i] for i in range(count)]


def lay_out(samples: Samples, layout: str, garbage: float = 99.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The batch and the outputs. What is by token holds `garbage` in padded places, which must not matter."""
    rows = rows_of(samples.count, layout)
    lengths = [sum(len(samples.kept[i]) for i in row) for row in rows]
    width = max(lengths) + (0 if layout == 'tight' else 2)

    def full(parts: Sequence[Tensor], fill: float) -> Tensor:
        filled = []
        for row in rows:
            value = torch.cat([parts[i] for i in row])
            pad = value.new_full((width - len(value),), fill)
            filled.append(torch.cat([pad, value] if layout == 'padded left' else [value, pad]))
        return torch.stack(filled)

    labels = full([torch.where(mask, 1, -100) for mask in samples.kept], -100)
    batch = {
        'labels': labels,
        'attention_mask': full([torch.ones(len(mask), dtype=torch.long) for mask in samples.kept], 0),
        'position_ids': full([torch.arange(len(mask)) for mask in samples.kept], 0),
    }
    batch |= {name: full(parts, garbage) for name, parts in samples.by_token.items()}
    return batch, {'logps': full(samples.logps, 0.0)}


def gradients(value: Tensor, samples: Samples) -> list[Tensor]:
    """By each sample's log-probabilities."""
    return list(torch.autograd.grad(value, samples.logps, retain_graph=True, materialize_grads=True))
