"""Whole weights out of sharded ones, and into them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from twinkle.launcher import rank
from twinkle_hf.parallel.gradients import full_tensor

if TYPE_CHECKING:
    from torch import nn

__all__ = ['as_placed', 'copy_into', 'gather_weights', 'plain_config', 'twin_of']


def gather_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU, on rank 0; nothing on others. Every rank calls it with the same keys. Tied tensors stay tied."""
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for key, value in state.items():
        if id(value) in seen:
            found[key] = seen[id(value)]
            continue
        whole = full_tensor(value)
        if rank() == 0:
            found[key] = seen[id(value)] = whole.detach().to('cpu', copy=True)
    return found


def as_placed(whole: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has, laid out as `like` is."""
    if not isinstance(like, DTensor):
        return whole.to(like.device, like.dtype)
    return distribute_tensor(
        whole.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None
    )  # no collective: each rank takes its part of what it has


def copy_into(module: nn.Module, read: Callable[[str], Tensor], keys: set[str]) -> None:
    """Copy weights into a module, one tensor at a time."""
    with torch.no_grad():
        for key, value in module.state_dict().items():
            if key in keys:
                value.copy_(as_placed(read(key), value))


def plain_config(config: Any) -> Any:
    """The config without what says how a module was spread over ranks, which would have another one spread likewise."""
    if getattr(config, 'distributed_config', None) is not None:
        del config.distributed_config
    return config


def twin_of(module_class: type, config: Any, state: Mapping[str, Tensor] | None) -> Any:
    """A plain module of the class, without memory of its own: it takes `state` as its weights, or has none at all."""
    config = plain_config(copy.deepcopy(config))
    with torch.device('meta'):
        twin = module_class(config)
    if state is not None:
        twin.load_state_dict(state, strict=False, assign=True)
        twin.tie_weights()
    return twin
