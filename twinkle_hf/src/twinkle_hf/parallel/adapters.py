"""PEFT adapters on a base model whose weights are sharded: they are made whole, as on one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from twinkle.errors import NotSupportedError

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ['check_can_shard', 'whole_shapes']

_PLAIN_INITS = (True, False, 'gaussian', 'orthogonal')


def check_can_shard(config: PeftConfig) -> None:
    """Refuse adapters that look into the base model's weights, or train some of them: a rank holds only a part of these.

    Raises:
        NotSupportedError: with the option.
    """
    options = {
        'use_dora': bool(getattr(config, 'use_dora', False)),
        'modules_to_save': bool(getattr(config, 'modules_to_save', None)),
        'trainable_token_indices': bool(getattr(config, 'trainable_token_indices', None)),
        'target_parameters': bool(getattr(config, 'target_parameters', None)),
        'bias': getattr(config, 'bias', 'none') != 'none',
        'init_lora_weights': getattr(config, 'init_lora_weights', True) not in _PLAIN_INITS,
    }
    given = [name for name, is_given in options.items() if is_given]
    if given:
        values = ', '.join(f'{name}={getattr(config, name)!r}' for name in given)
        raise NotSupportedError(
            f'{values}: such an adapter reads or trains weights of the base model, and here each rank holds a part of them only. '
            'Use a mesh of dp_size, where they are whole, or leave the option out.'
        )


@contextmanager
def whole_shapes(module: nn.Module) -> Iterator[None]:
    """While PEFT makes adapters, sharded weights look like whole ones, of which it takes the shapes; no memory is used for them.

    PEFT takes the shape of a rank's own part, which is right for its tensor-parallel layers and wrong for shards that are gathered
    before they are used.
    """
    kept: list[tuple[nn.Module, str, nn.Parameter]] = []
    for part in list(module.modules()):
        for name, parameter in list(part._parameters.items()):
            if isinstance(parameter, DTensor):
                kept.append((part, name, parameter))
                single: Any = torch.zeros((), dtype=parameter.dtype, device=parameter.to_local().device)
                part._parameters[name] = nn.Parameter(
                    single.expand(parameter.shape), requires_grad=parameter.requires_grad
                )
    try:
        yield
    finally:
        for part, name, parameter in kept:
            stand_in = part._parameters[name]
            part._parameters[name] = parameter
            if stand_in is not None:
                parameter.requires_grad_(stand_in.requires_grad)
