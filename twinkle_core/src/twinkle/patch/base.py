"""Patches: named changes to a module, found by name like every other part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from twinkle.errors import InvalidPartError

if TYPE_CHECKING:
    from torch import nn

__all__ = ['Patch', 'apply_patch']


class Patch(ABC):
    """Changes a module in place, or returns one to use instead.

    A patch must be complete or leave no trace: check what it needs before it changes anything.
    """

    @abstractmethod
    def __call__(self, model: nn.Module, **kwargs: Any) -> nn.Module | None:
        """Patch `model`. Returns the module to go on with, or None for the same one."""


def apply_patch(model: nn.Module, patch: Any, *, backend: str | None = None, **kwargs: Any) -> nn.Module:
    """Apply a patch (a name, class, instance or function) to `model` and return the module to go on with.

    Keywords go to the call of the patch. Raises what the registry raises for an unknown name, and `InvalidPartError` if the patch
    returns something that is no module.
    """
    from torch import nn

    from twinkle.registry import patches

    part = patches.build(patch, backend=backend)
    result = part(model, **kwargs)
    if result is None:
        return model
    if not isinstance(result, nn.Module):
        raise InvalidPartError(
            f'The patch {patch!r} returned {type(result).__name__}; it must return an nn.Module, or None to keep the one it was given.'
        )
    return result
