"""Loss, accuracy, and the numbers of a training run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle.data_format import IGNORE_INDEX
from twinkle.metric.base import Metric, TrainInfo

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle.data_format import LossOutput, ModelOutput

__all__ = ['Accuracy', 'LossMetric', 'TrainMetric']


class LossMetric(Metric):
    """`loss`: the mean over all that was counted, 0.0 if nothing was; `num_tokens`: how much that is."""

    needs_labels = False

    def __init__(self) -> None:
        # Tensors are added up where they are, and read once: no synchronisation per micro-batch.
        self._sum: Tensor | float = 0.0
        self._count: Tensor | float = 0.0

    def update(self, inputs: Mapping[str, Any], outputs: ModelOutput, loss: LossOutput | None) -> None:
        if loss is not None:
            self._sum = self._sum + loss.loss_sum.detach().double()
            self._count = self._count + loss.count

    def sums(self) -> dict[str, float]:
        return {'sum': float(self._sum), 'count': float(self._count)}

    def compute(self, sums: Mapping[str, float], info: TrainInfo) -> dict[str, float]:
        count = sums['count']
        return {'loss': sums['sum'] / count if count else 0.0, 'num_tokens': count}

    def reset(self) -> None:
        self._sum = self._count = 0.0


class Accuracy(Metric):
    """`accuracy`: the share of labels (that are not -100) that the logits' maximum hits."""

    requires: ClassVar[frozenset[str]] = frozenset({'logits'})

    def __init__(self) -> None:
        self._right: Tensor | float = 0
        self._count: Tensor | float = 0

    def update(self, inputs: Mapping[str, Any], outputs: ModelOutput, loss: LossOutput | None) -> None:
        labels = inputs['labels']
        kept = labels != IGNORE_INDEX
        self._right = self._right + ((outputs['logits'].argmax(-1) == labels) & kept).sum()
        self._count = self._count + kept.sum()

    def sums(self) -> dict[str, float]:
        return {'right': float(self._right), 'count': float(self._count)}

    def compute(self, sums: Mapping[str, float], info: TrainInfo) -> dict[str, float]:
        return {'accuracy': sums['right'] / sums['count'] if sums['count'] else 0.0}

    def reset(self) -> None:
        self._right = self._count = 0


class TrainMetric(Metric):
    """Numbers of a run: `step`, `lr` (of the first group), `grad_norm`, `perplexity`, `tokens_per_second`, `elapsed` (seconds).

    `tokens_per_second` counts every token that is not padding, over all ranks, from the first micro-batch since the last report to this
    one, optimizer steps included; `elapsed` runs from the
    first micro-batch on.
    """

    needs_labels = False

    def __init__(self) -> None:
        self._start: float | None = None
        self._loss = LossMetric()
        self._tokens: Tensor | float = 0
        self._since: float | None = None

    def begin(self) -> None:
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        self._since = now if self._since is None else self._since

    def update(self, inputs: Mapping[str, Any], outputs: ModelOutput, loss: LossOutput | None) -> None:
        self._loss.update(inputs, outputs, loss)
        mask = inputs.get('attention_mask')
        if mask is not None:
            self._tokens = self._tokens + mask.sum()
        elif 'input_ids' in inputs:
            self._tokens = self._tokens + inputs['input_ids'].numel()

    def sums(self) -> dict[str, float]:
        return {**self._loss.sums(), 'tokens': float(self._tokens)}

    def compute(self, sums: Mapping[str, float], info: TrainInfo) -> dict[str, float]:
        now = time.monotonic()
        seconds = now - self._since if self._since is not None else 0.0
        mean = self._loss.compute(sums, info)['loss']
        numbers: dict[str, float] = {'step': info.step}
        if info.lr:
            numbers['lr'] = info.lr[0]
        if info.grad_norm is not None:
            numbers['grad_norm'] = info.grad_norm
        # exp overflows a double above 709; a loss like that has a perplexity of infinity for every purpose.
        numbers['perplexity'] = math.exp(mean) if mean < 700 else math.inf
        numbers['tokens_per_second'] = sums['tokens'] / seconds if seconds > 0 else 0.0
        numbers['elapsed'] = now - self._start if self._start is not None else 0.0
        return numbers

    def reset(self) -> None:
        self._tokens = 0
        self._since = None
        self._loss.reset()
