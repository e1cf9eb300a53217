"""Distillation: learning a teacher's distribution rather than its words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.errors import ConfigError, DataError
from twinkle.loss.base import Loss, counted

if TYPE_CHECKING:
    from twinkle.data_format import ModelOutput

__all__ = ['GKDLoss']

RULED_OUT = -1e30
"""Stands for log 0, so that 0 times it is 0."""


class GKDLoss(Loss):
    """Generalised Jensen-Shannon divergence between teacher p and student q, summed over labelled tokens, counted by tokens.

    `beta KL(p | m) + (1 - beta) KL(q | m)` with m = beta p + (1 - beta) q; `beta=0` is KL(p | q), `beta=1` is KL(q | p). Logits of
    both are divided by `temperature` first.

    The teacher is `teacher_logits` [B, T, V], or `teacher_topk_logps` and `teacher_topk_ids` [B, T, K] in the batch or as keywords. Of
    a top-k teacher only KL(p | q) over its K tokens is taken (`beta=0`): its remaining mass is unknown. `loss_weights` [B, T] multiply
    each token's divergence and are what is counted.

    Source: Agarwal et al., On-Policy Distillation of Language Models, 2024.

    Raises:
        ConfigError: beta outside of 0 to 1, or a temperature not above 0.
        DataError: no teacher, or one of another shape.
    """

    requires = frozenset({'logits'})

    def __init__(self, beta: float = 0.5, temperature: float = 1.0) -> None:
        if not 0 <= beta <= 1 or not temperature > 0:
            raise ConfigError(f'GKDLoss: beta={beta!r} must be from 0 to 1, temperature={temperature!r} above 0.')
        self.beta, self.temperature = beta, temperature

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        given = {**inputs, **kwargs}
        kept = inputs['labels'] != IGNORE_INDEX
        log_q = _log_softmax(outputs['logits'][kept].float() / self.temperature)
        if given.get('teacher_logits') is not None:
            teacher = self._teacher(given['teacher_logits'], outputs['logits'])
            log_p = _log_softmax(teacher[kept].float() / self.temperature)
            losses = self._divergence(log_p, log_q)
        elif given.get('teacher_topk_logps') is not None and given.get('teacher_topk_ids') is not None:
            losses = self._top_k(given['teacher_topk_logps'], given['teacher_topk_ids'], kept, log_q)
        else:
            raise DataError(
                'GKDLoss needs the teacher: teacher_logits [B, T, V], or teacher_topk_logps and teacher_topk_ids [B, T, K], in the batch '
                'or as keywords.'
            )
        if given.get('loss_weights') is not None:
            losses = losses * given['loss_weights'][kept]
        return LossOutput(loss_sum=losses.sum(), count=counted(given))

    @staticmethod
    def _teacher(teacher: Any, student: Tensor) -> Tensor:
        teacher = torch.as_tensor(teacher, device=student.device).detach()
        if teacher.shape != student.shape:
            raise DataError(
                f"teacher_logits have shape {tuple(teacher.shape)}, the student's {tuple(student.shape)}: both need one tokenizer and "
                'vocabulary.'
            )
        return teacher

    def _divergence(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        if self.beta == 0:
            return _kl(log_p, log_q)
        if self.beta == 1:
            return _kl(log_q, log_p)
        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log(1 - self.beta))
        return self.beta * _kl(log_p, log_m) + (1 - self.beta) * _kl(log_q, log_m)

    def _top_k(self, logps: Any, ids: Any, kept: Tensor, log_q: Tensor) -> Tensor:
        if self.beta != 0:
            raise ConfigError(
                f'GKDLoss: a top-k teacher allows beta=0 only, not beta={self.beta}: the rest of its mass is unknown.'
            )
        if self.temperature != 1.0:
            raise ConfigError(
                'GKDLoss: a top-k teacher gives log-probabilities at its own temperature; use temperature=1.'
            )
        log_p = torch.as_tensor(logps, device=log_q.device, dtype=log_q.dtype)
        index = torch.as_tensor(ids, device=log_q.device)
        if log_p.shape != index.shape or log_p.shape[:2] != kept.shape:
            raise DataError(
                f'teacher_topk_logps {tuple(log_p.shape)} and teacher_topk_ids {tuple(index.shape)} must be [B, T, K] for labels '
                f'{tuple(kept.shape)}.'
            )
        log_p, index = log_p[kept], index[kept]
        return _kl(log_p.clamp(min=RULED_OUT), log_q.gather(-1, index))


def _log_softmax(logits: Tensor) -> Tensor:
    """An entry at minus infinity stays a number, so that 0 times it is 0, forward and backward."""
    return logits.log_softmax(-1).clamp(min=RULED_OUT)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`sum p (log p - log q)` over the last dimension."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
