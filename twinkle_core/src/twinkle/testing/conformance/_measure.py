"""How the rules look at a model from outside: gradients are read off the weights that plain SGD has moved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from twinkle.model.protocol import TwinkleModel
    from twinkle.testing.subject import Subject

__all__ = ['LR', 'applied', 'close', 'flat', 'padded', 'ready', 'weights']

LR = 0.5
"""The learning rate of the rules' SGD: a step that fp32 resolves to six digits."""


def ready(subject: Subject, lr: float = LR) -> TwinkleModel:
    """A new model with plain SGD."""
    model = subject.model()
    subject.set_sgd(model, lr)
    return model


def weights(model: TwinkleModel, adapter_name: str | None = None) -> dict[str, Tensor]:
    """What trains, by name."""
    return model.get_state_dict(adapter_name=adapter_name)


def flat(model: TwinkleModel, adapter_name: str | None = None) -> Tensor:
    """What trains, as one vector in double precision."""
    state = weights(model, adapter_name)
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


def applied(
    model: TwinkleModel, *, adapter_name: str | None = None, max_grad_norm: float = math.inf, lr: float = LR
) -> tuple[Tensor, float | None]:
    """Close the window and step; the gradient that was applied, and the norm that was reported."""
    before = flat(model, adapter_name)
    norm = model.clip_grad_and_step(max_grad_norm=max_grad_norm, adapter_name=adapter_name, flush=True)
    return (before - flat(model, adapter_name)) / lr, norm


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two vectors agree to `tolerance` times their length."""
    return bool((a - b).norm() <= tolerance * torch.maximum(a.norm(), b.norm()))


def padded(rows: Sequence[Mapping[str, Any]], key: str, fill: int) -> Tensor:
    """One key of the rows, padded on the right to [B, T]."""
    longest = max(len(row['input_ids']) for row in rows)
    return torch.tensor([[*row[key], *[fill] * (longest - len(row[key]))] for row in rows])
