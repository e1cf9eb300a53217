"""One window of gradient accumulation: how many micro-batches it has seen, what they counted, how far its step has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinkle.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ['AccumulationWindow', 'check_accumulation']


def check_accumulation(steps: int) -> int:
    """`steps` if it can be a window's length.

    Raises:
        ConfigError: if it is not an integer of at least 1.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f'gradient_accumulation_steps={steps!r} must be an integer of at least 1.')
    return steps


@dataclass
class AccumulationWindow:
    """Counters of one window. Gradients hold `sum of losses / constant` until they are normalised at the boundary.

    Attributes:
        length: micro-batches per window (g). It outlives the window.
        micro_batches: backward calls so far.
        constant: what each loss sum is divided by before backward, so that half-precision gradients stay in range. It is undone
            at the boundary.
        count: tokens (or pairs, or rows) counted so far on this rank.
        aux_grads: gradients of auxiliary losses, which are means over micro-batches and so are never divided by tokens.
        flushed: the window is closed early.
        normalised, stepped, grad_norm: how far the step of this window has come.
        schedule_requested: `lr_step` was called before `step`, and is due right after it.
    """

    length: int = 1
    micro_batches: int = 0
    constant: Tensor | float | None = None
    count: Tensor | float = 0.0
    aux_grads: dict[int, Tensor] = field(default_factory=dict)
    flushed: bool = False
    normalised: bool = False
    stepped: bool = False
    schedule_requested: bool = False
    grad_norm: float | None = None

    @property
    def at_boundary(self) -> bool:
        """Whether the window is full (or flushed) and its step may be taken."""
        return self.micro_batches > 0 and (self.flushed or self.micro_batches >= self.length)

    @property
    def is_partial(self) -> bool:
        """Whether gradients have been accumulated that no step has used."""
        return self.micro_batches > 0 and not self.stepped

    def govern(self, length: int | None) -> None:
        """Take a window length that was given in a call."""
        if length is not None:
            self.length = check_accumulation(length)

    def next(self) -> AccumulationWindow:
        """A fresh window of the same length."""
        return AccumulationWindow(length=self.length)
