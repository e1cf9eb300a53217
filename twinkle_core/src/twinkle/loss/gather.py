"""Rows of all data ranks, with gradients: for losses that compare the rows of a batch with each other.

The gradient is of the sum of all ranks' losses: what another rank's loss says about a row comes back to the rank that made it. Where
gradients of weights are then summed over ranks, as for every loss, they are those of one process with all rows.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from twinkle.device_mesh import DeviceMesh, default_device_mesh

__all__ = ['data_group', 'gather_rows']

_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def data_group(mesh: DeviceMesh | None = None) -> Any | None:
    """The process group of the ranks that read other rows than this one; None where there are none. Without a mesh, the run's.

    Made when first asked for, by its members only: ranks that compute no loss need not take part.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    mesh = default_device_mesh() if mesh is None else mesh
    if mesh.data_world_size == 1:
        return None
    world = dist.group.WORLD
    ranks = tuple(mesh.peers('data', dist.get_rank()))
    if len(ranks) == dist.get_world_size():
        return world
    made = _groups.setdefault(world, {})  # a later run in this process has another world
    if ranks not in made:
        made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[ranks]


def gather_rows(rows: Tensor, group: Any | None) -> tuple[Tensor, int]:
    """All ranks' `rows` [n, ...], one after the other, and at which of them this rank's begin. n may differ by rank, and be 0.

    A collective: every rank of the group calls it as often as every other. Without a group it gives what it was given.
    """
    if group is None:
        return rows, 0
    counts = torch.tensor([len(rows)], device=rows.device)
    all_counts = [torch.empty_like(counts) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_counts, counts, group=group)
    lengths = [int(count) for count in all_counts]
    start = sum(lengths[: dist.get_rank(group)])
    gathered: Tensor = _GatherRows.apply(rows, lengths, start, group)
    return gathered, start


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: list[int], start: int, group: Any) -> Tensor:
        ctx.group, ctx.part = group, slice(start, start + len(rows))
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor) -> tuple[Any, ...]:
        total = d_gathered.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.part], None, None, None
