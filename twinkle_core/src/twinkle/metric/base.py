"""The base of metrics: sums that add up over micro-batches and ranks, and numbers made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from twinkle.data_format import LossOutput, ModelOutput

__all__ = ['Metric', 'TrainInfo']


@dataclass(frozen=True)
class TrainInfo:
    """What a metric may report of the training state: optimizer steps, learning rates by group, the last gradient norm."""

    step: int = 0
    lr: tuple[float, ...] = ()
    grad_norm: float | None = None


class Metric(ABC):
    """Accumulates over micro-batches.

    Attributes:
        requires: keys of `ModelOutput` that it needs beside the loss, as for `Loss.requires`.
        needs_labels: whether a batch without `labels` has nothing for this metric.
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    needs_labels: ClassVar[bool] = True

    def begin(self) -> None:  # noqa: B027 - most metrics have nothing to do here
        """A micro-batch is about to run."""

    @abstractmethod
    def update(self, inputs: Mapping[str, Any], outputs: ModelOutput, loss: LossOutput | None) -> None:
        """Take in one micro-batch. `loss` is None where none was computed."""

    @abstractmethod
    def sums(self) -> dict[str, float]:
        """What to add up over data-parallel ranks."""

    @abstractmethod
    def compute(self, sums: Mapping[str, float], info: TrainInfo) -> dict[str, float]:
        """Numbers, never strings, from the summed sums."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was taken in."""
