"""What each of two processes does for tests/core/test_contrastive_ranks.py; writes what it saw to <folder>/rank<r>.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from twinkle import DeviceMesh
from twinkle.loss import InfonceLoss
from twinkle.loss.gather import gather_rows
from twinkle.runtime import initialize

GROUPS = (2, 3)
"""How many queries each rank has: unequal on purpose."""

OPTIONS: dict[str, dict[str, Any]] = {
    'plain': {},
    'blocks': {'query_query': True, 'document_document': True},
    'false negatives': {'false_negative_margin': 0.1},
    'own rank only': {'across_ranks': False},
    'tensor parallel': {'device_mesh': DeviceMesh.from_sizes(tp_size=2, device_type='cpu')},
}


def encoder() -> torch.nn.Linear:
    """The same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Linear(6, 4, dtype=torch.float64)


def rows(count: int) -> torch.Tensor:
    """Of a query, its document and a hard negative each."""
    return torch.randn(count * 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run(module: torch.nn.Linear, inputs: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Sum, count and the weight's gradient of the sum."""
    result = InfonceLoss(0.3, hard_negatives=1, **options)({}, {'embeddings': module(inputs)})
    (gradient,) = torch.autograd.grad(result.loss_sum, module.weight)
    return {'sum': float(result.loss_sum.detach()), 'count': float(result.count), 'gradient': gradient.tolist()}


def main() -> None:
    """All of it, in one launch."""
    rank = int(os.environ['RANK'])
    start = sum(GROUPS[:rank]) * 3
    mine = slice(start, start + GROUPS[rank] * 3)
    seen: dict[str, Any] = {}
    with initialize(global_device_mesh=DeviceMesh.from_sizes(dp_size=2, device_type='cpu')):
        for name, options in OPTIONS.items():
            seen[name] = run(encoder(), rows(sum(GROUPS))[mine], options)
        # One rank has nothing, and nobody waits for ever.
        nothing = torch.zeros(2 * rank, 3, requires_grad=True)
        gathered, first = gather_rows(nothing + 1.0, dist.group.WORLD)
        gathered.sum().backward()
        assert nothing.grad is not None
        seen['one rank empty'] = [list(gathered.shape), first, nothing.grad.tolist()]
    (Path(sys.argv[1]) / f'rank{rank}.json').write_text(json.dumps(seen))


if __name__ == '__main__':
    main()
