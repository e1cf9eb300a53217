"""Patches that come with the Transformers backend."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from twinkle.errors import NotSupportedError
from twinkle.patch import Patch

if TYPE_CHECKING:
    from torch import nn

__all__ = ['GradientCheckpointingPatch', 'enable_gradient_checkpointing']


class GradientCheckpointingPatch(Patch):
    """Recompute activations in backward instead of keeping them: less memory, about a third more time.

    The same as `TransformersModel(gradient_checkpointing=True)`, for a model that exists already. The non-reentrant variant is used;
    it also works when all inputs are frozen, as under LoRA.

    Raises:
        NotSupportedError: the model's class has no gradient checkpointing.
    """

    def __call__(self, model: nn.Module, **kwargs: Any) -> None:
        enable_gradient_checkpointing(model, **kwargs)


def enable_gradient_checkpointing(model: nn.Module, **kwargs: Any) -> None:
    """Turn it on, non-reentrant, under whichever of its two names this version of Transformers has."""
    enable = getattr(model, 'activation_checkpointing_enable', None) or getattr(
        model, 'gradient_checkpointing_enable', None
    )
    if enable is None or not getattr(model, 'supports_gradient_checkpointing', True):
        raise NotSupportedError(f'{type(model).__name__} has no gradient checkpointing.')
    options = {'use_reentrant': False, **kwargs}
    name = next(name for name in inspect.signature(enable).parameters if name.endswith('checkpointing_kwargs'))
    enable(**{name: options})
