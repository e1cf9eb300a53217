"""The focal loss of Lin et al. (Focal Loss for Dense Object Detection, 2017), for next-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinkle.data_format import IGNORE_INDEX, LossOutput, ModelOutput
from twinkle.errors import ConfigError
from twinkle.loss import Loss

__all__ = ['FocalLoss']


class FocalLoss(Loss):
    """`-sum (1 - p_t)^gamma log p_t` over labels that are not -100, counted by tokens; `gamma=0` is cross entropy.

    Tokens that the model already predicts well weigh less.

    Raises:
        ConfigError: a negative gamma.
    """

    requires = frozenset({'logps'})

    def __init__(self, gamma: float = 2.0) -> None:
        if gamma < 0:
            raise ConfigError(f'gamma={gamma!r} must be at least 0.')
        self.gamma = gamma

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        kept = inputs['labels'] != IGNORE_INDEX
        logps = outputs['logps'][kept]
        return LossOutput(loss_sum=-((1 - logps.exp()) ** self.gamma * logps).sum(), count=kept.sum())
