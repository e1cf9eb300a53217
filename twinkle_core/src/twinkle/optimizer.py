"""The default optimizer. All of PyTorch's own are in the registry `optimizers` under their class names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from twinkle.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Parameter

__all__ = ['DefaultOptimizer']


class DefaultOptimizer(torch.optim.AdamW):
    """AdamW in which matrices decay, and vectors (biases, normalisation weights) do not, as Transformers' Trainer does it.

    Args:
        named_parameters: (name, parameter) pairs.
        lr: learning rate.
        weight_decay: of the group that decays.
        **kwargs: as for `torch.optim.AdamW`.

    Raises:
        ConfigError: there is no parameter.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """

    takes_named_parameters: ClassVar[bool] = True

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        **kwargs: Any,
    ) -> None:
        named = list(named_parameters)
        if not named:
            raise ConfigError('DefaultOptimizer: there are no parameters to optimise.')
        decaying = [p for n, p in named if p.ndim > 1 and not n.endswith('bias')]
        others = [p for n, p in named if p.ndim <= 1 or n.endswith('bias')]
        groups = [{'params': decaying, 'weight_decay': weight_decay}, {'params': others, 'weight_decay': 0.0}]
        super().__init__([group for group in groups if group['params']], lr=lr, weight_decay=weight_decay, **kwargs)
