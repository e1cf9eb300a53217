"""Gradients of parameters that may be whole, replicated or sharded: their sum over ranks, their norm, clipping."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from twinkle.model.stepping import local

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

__all__ = ['broadcast_from_first', 'clip_by_global_norm', 'full_tensor', 'group_by_layout', 'sum_gradients']

_BUCKET = 25 * 2**20
"""Bytes that are reduced together, as in PyTorch's DistributedDataParallel."""


def sum_gradients(parameters: Iterable[Parameter], group: Any) -> None:
    """Sum the gradients of whole parameters over a group, in place, many in one call.

    A rank where a parameter has none (no row of it used that layer) takes part with zeros.
    """
    if group is None:
        return
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    # Whether anybody has one: the same parameters go without on every rank, as in one process.
    used = torch.tensor([float(p.grad is not None) for p in whole], device=whole[0].device if whole else 'cpu')
    dist.all_reduce(used, group=group)
    grads = []
    for parameter, count in zip(whole, used.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
    for bucket in _buckets(grads):
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, group=group)
        for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))


def broadcast_from_first(tensors: Iterable[Tensor], group: Any) -> None:
    """Give every rank of a group the values that its first one has."""
    if group is None:
        return
    source = dist.get_global_rank(group, 0)
    for bucket in _buckets([tensor.detach() for tensor in tensors if tensor.numel()]):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.broadcast(flat, src=source, group=group)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def clip_by_global_norm(parameters: Sequence[Parameter], max_norm: float, norm_type: float) -> float:
    """Clip in place by the norm of all gradients as if none were sharded; returns that norm.

    `torch.nn.utils.clip_grad_norm_` refuses gradients of several meshes, and whole ones among sharded ones.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else (None, ())
            by_layout.setdefault((*layout, grad.dtype, grad.device), []).append(local(grad))
    norms = [_norm(grads, norm_type, key[0], key[1]) for key, grads in by_layout.items()]
    if not norms:
        return 0.0
    total = float(torch.linalg.vector_norm(torch.stack(norms), norm_type))
    scale = max_norm / (total + 1e-6)  # as PyTorch's
    if scale < 1.0:
        for grads in by_layout.values():
            torch._foreach_mul_(grads, scale)
    return total


def _norm(grads: list[Tensor], norm_type: float, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """The norm of gradients of one layout, of which this rank has its parts."""
    norm = torch.nn.utils.get_total_norm(grads, norm_type).double()
    is_max = math.isinf(norm_type)
    total = norm if is_max else norm**norm_type
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():  # also torch's strided shards, which are shards
            dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=mesh.get_group(dim))
    return (total if is_max else total ** (1.0 / norm_type)).cpu()


def group_by_layout(optimizer: Any) -> None:
    """Split an optimizer's groups so that each holds parameters of one layout, which it can step together."""
    groups = []
    for group in optimizer.param_groups:
        by_layout: dict[Any, list[Parameter]] = {}
        for parameter in group['params']:
            layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            by_layout.setdefault(layout, []).append(parameter)
        groups += [{**group, 'params': parameters} for parameters in by_layout.values()]
    optimizer.param_groups[:] = groups


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. A collective where it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # PyTorch warns, on every rank, that two meshes are gathered one after the other; for these there is no other way.
    logging.getLogger('torch.distributed.tensor._redistribute').setLevel(logging.ERROR)
    return tensor.full_tensor()


def _buckets(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one dtype and device, about 25 MB of them at a time."""
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in by_kind.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in group:
            bucket.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
