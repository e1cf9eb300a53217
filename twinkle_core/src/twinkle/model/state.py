"""`TrainState`: all that one adapter owns while it trains. Two adapters never share any of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.metric.base import TrainInfo
from twinkle.model.window import AccumulationWindow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinkle.data_format import LossOutput, ModelOutput
    from twinkle.loss import Loss
    from twinkle.metric import Metric
    from twinkle.processor import InputProcessor
    from twinkle.template import Template

__all__ = ['PendingForward', 'TrainState']


@dataclass
class PendingForward:
    """A forward pass that waits for its loss, and then for its backward."""

    inputs: Mapping[str, Any]
    outputs: ModelOutput
    loss: LossOutput | None = None
    is_training: bool = True


@dataclass
class TrainState:
    """One adapter's training state.

    Attributes:
        adapter_name: the adapter; `''` is the base model without adapters.
        window: the current accumulation window.
        own_processor: whether the processor was chosen, rather than the default.
        step: optimizer steps taken (steps that an overflow skipped are not counted).
        skipped_steps: steps that an fp16 overflow skipped.
        train_metrics, eval_metrics: accumulate apart from each other, by name.
        schedule_due: an optimizer step was taken that the schedule has not followed yet.
        pending: the last `forward` that no `backward` has used.
    """

    adapter_name: str
    loss: Loss
    optimizer: Any = None
    lr_scheduler: Any = None
    scaler: Any = None
    template: Template | None = None
    processor: InputProcessor | None = None
    own_processor: bool = False
    train_metrics: dict[str, Metric] = field(default_factory=dict)
    eval_metrics: dict[str, Metric] = field(default_factory=dict)
    window: AccumulationWindow = field(default_factory=AccumulationWindow)
    step: int = 0
    skipped_steps: int = 0
    last_grad_norm: float | None = None
    schedule_due: bool = False
    pending: PendingForward | None = None
    warned_empty: bool = False

    def metrics(self, is_training: bool) -> dict[str, Metric]:
        """The metrics of training, or of `forward_only`."""
        return self.train_metrics if is_training else self.eval_metrics

    def info(self) -> TrainInfo:
        """The numbers that a metric may report beside its own sums."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return TrainInfo(step=self.step, lr=tuple(float(g['lr']) for g in groups), grad_norm=self.last_grad_norm)
