"""Mean squared error of a regression head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from twinkle.data_format import LossOutput
from twinkle.errors import DataError
from twinkle.loss.base import Loss

if TYPE_CHECKING:
    from twinkle.data_format import ModelOutput

__all__ = ['MSELoss']


class MSELoss(Loss):
    """`sum (logits - labels)^2`, counted by elements, for models whose logits are predictions (`num_labels=1`, say).

    `labels` hold numbers and have the shape of the logits, up to a last dimension of 1. Positions labelled -100 are not special
    for numbers that may be negative; leave rows out, or give `sample_weights` (one per row, or of the shape of the labels), which
    multiply the terms and are what is counted.

    Raises:
        DataError: the shapes differ.
    """

    requires = frozenset({'logits'})

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        logits, labels = outputs['logits'], inputs['labels']
        if logits.ndim == labels.ndim + 1 and logits.shape[-1] == 1:
            logits = logits.squeeze(-1)
        if logits.shape != labels.shape:
            raise DataError(f'MSELoss: predictions have shape {tuple(logits.shape)}, labels {tuple(labels.shape)}.')
        squares = (logits.float() - labels.to(logits.device).float()).square()
        weights = {**inputs, **kwargs}.get('sample_weights')
        if weights is None:
            return LossOutput(loss_sum=squares.sum(), count=float(squares.numel()))
        weights = torch.as_tensor(weights, device=squares.device, dtype=squares.dtype)
        if weights.shape != squares.shape[: weights.ndim]:
            raise DataError(f'MSELoss: sample_weights have shape {tuple(weights.shape)}, labels {tuple(labels.shape)}.')
        weights = weights.view(*weights.shape, *[1] * (squares.ndim - weights.ndim)).expand_as(squares)
        return LossOutput(loss_sum=(squares * weights).sum(), count=weights.sum())
