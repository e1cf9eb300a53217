"""Cross entropy of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.errors import ConfigError
from twinkle.loss.base import Loss, counted

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle.data_format import ModelOutput

__all__ = ['ChunkedCrossEntropyLoss', 'CrossEntropyLoss']


class CrossEntropyLoss(Loss):
    """`-sum w_t log p(labels_t)` over labels that are not -100, counted by tokens (by `w` where `loss_weights` are given).

    The backend computes the sum at the output head, where it can without ever holding logits of the batch.
    """

    requires = frozenset({'nll'})

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        return LossOutput(loss_sum=outputs['nll'], count=counted(inputs))


class ChunkedCrossEntropyLoss(Loss):
    """The same from logits, `chunk_size` positions at a time, for backends and models whose logits exist anyway.

    No fp32 copy of all logits is made, forward or backward.

    Raises:
        ConfigError: `chunk_size` below 1.
    """

    requires = frozenset({'logits'})

    def __init__(self, chunk_size: int = 1024) -> None:
        if chunk_size < 1:
            raise ConfigError(f'chunk_size={chunk_size!r} must be at least 1.')
        self.chunk_size = chunk_size

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        logits = outputs['logits'].flatten(0, 1)
        labels = inputs['labels'].flatten()
        weights = inputs.get('loss_weights')
        weights = (
            [None] * -(-len(labels) // self.chunk_size) if weights is None else weights.flatten().split(self.chunk_size)
        )
        total: Any = logits.sum() * 0.0 if not len(labels) else 0.0
        for part, target, weight in zip(
            logits.split(self.chunk_size), labels.split(self.chunk_size), weights, strict=True
        ):
            total = total + checkpoint(_nll, part, target, weight, use_reentrant=False)
        return LossOutput(loss_sum=total, count=counted(inputs))


def _nll(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    from torch.nn.functional import cross_entropy

    each = cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction='none')
    return (each if weights is None else each * weights).sum()
