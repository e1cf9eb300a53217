"""Losses of preference pairs: DPO and its relatives. Rows hold chosen and rejected answers in turn, chosen first.

All work from log-probabilities of labels, count pairs, and give the same padded and packed. A pair of which a side has no label (cut
away, say) counts nothing.

Weights: `loss_weights` [B, T] multiply the log-probabilities of tokens, of the reference too, and a mean over tokens is a weighted one;
`sample_weights` [S] multiply the terms of pairs (by the mean of the two), which then count by weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from twinkle.data_format import LossOutput
from twinkle.errors import ConfigError, DataError
from twinkle.loss.base import Loss
from twinkle.loss.sequences import Sequences

if TYPE_CHECKING:
    from twinkle.data_format import ModelOutput

__all__ = ['CPOLoss', 'DPOLoss', 'ORPOLoss', 'SimPOLoss']

DPOKind = Literal['sigmoid', 'hinge', 'ipo', 'kto_pair']


class DPOLoss(Loss):
    """Direct preference optimisation. With h = (log p(chosen) - log p(rejected)) - (the same under the reference), sums over tokens:

    * `sigmoid`: `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`, e the label smoothing (Rafailov et al., 2023);
    * `hinge`: `max(0, 1 - beta h)` (Zhao et al., SLiC-HF, 2023);
    * `ipo`: `(h - 1 / (2 beta))^2`, of sums, not of means over tokens (Azar et al., 2023);
    * `kto_pair`: `1 - sigmoid(beta (r_c - KL_r)) + 1 - sigmoid(beta (KL_c - r_r))`, where r is a sample's log-ratio to the reference
      and KL the mean of r over the batch's samples of that side, at least 0 and without a gradient (Ethayarajh et al., 2024).

    `sft_weight` adds that many times the chosen answer's mean negative log-likelihood per token. Counts pairs.

    The reference's log-probabilities are `ref_logps` [B, T] (or their sums, [S]) in the batch or as a keyword; a model with adapters
    computes them with the adapter disabled where they are missing.

    Raises:
        ConfigError: an option outside of its range.
        DataError: an odd number of samples, or no reference.
    """

    def __init__(
        self,
        beta: float = 0.1,
        loss_type: DPOKind = 'sigmoid',
        *,
        label_smoothing: float = 0.0,
        reference_free: bool = False,
        sft_weight: float = 0.0,
    ) -> None:
        if loss_type not in ('sigmoid', 'hinge', 'ipo', 'kto_pair'):
            raise ConfigError(f"DPOLoss: loss_type={loss_type!r} must be one of 'sigmoid', 'hinge', 'ipo', 'kto_pair'.")
        if not beta > 0:
            raise ConfigError(f'DPOLoss: beta={beta!r} must be above 0.')
        if not 0 <= label_smoothing < 0.5:
            raise ConfigError(f'DPOLoss: label_smoothing={label_smoothing!r} must be from 0 to below 0.5.')
        if label_smoothing and loss_type != 'sigmoid':
            raise ConfigError(f"DPOLoss: label_smoothing is defined for loss_type='sigmoid', not {loss_type!r}.")
        if sft_weight < 0:
            raise ConfigError(f'DPOLoss: sft_weight={sft_weight!r} must be at least 0.')
        self.beta, self.loss_type, self.label_smoothing = beta, loss_type, label_smoothing
        self.reference_free, self.sft_weight = reference_free, sft_weight

    @property
    def needs_reference(self) -> bool:
        """Whether the batch must hold `ref_logps`."""
        return not self.reference_free

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        sequences = Sequences.of({**inputs, **kwargs})
        ratios = sequences.sum(outputs['logps']) - self._reference(sequences, inputs, kwargs)
        chosen, rejected = sequences.pairs(ratios)
        weights = sequences.pair_weights()
        losses = self._losses(chosen, rejected, weights > 0)
        if self.sft_weight:
            likelihood, _ = sequences.pairs(sequences.mean(outputs['logps']))
            losses = losses - self.sft_weight * likelihood
        return _of_pairs(losses, self.beta * chosen, self.beta * rejected, weights)

    def _reference(self, sequences: Sequences, inputs: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Tensor | float:
        if self.reference_free:
            return 0.0
        given = kwargs.get('ref_logps', inputs.get('ref_logps'))
        if given is None:
            raise DataError(
                'DPOLoss needs the reference: ref_logps in the batch or as a keyword (forward_only(inputs, disable_lora=True) of a model '
                'gives them), or reference_free=True.'
            )
        given = torch.as_tensor(given, device=sequences.index_BT.device).detach().float()
        if given.shape == sequences.index_BT.shape:
            return sequences.sum(given)
        if given.shape == (sequences.count,):
            return given
        raise DataError(
            f'ref_logps has shape {tuple(given.shape)}: give one per token {tuple(sequences.index_BT.shape)}, or the sum of each of the '
            f'{sequences.count} samples.'
        )

    def _losses(self, chosen: Tensor, rejected: Tensor, valid: Tensor) -> Tensor:
        h = chosen - rejected
        if self.loss_type == 'sigmoid':
            return -(1 - self.label_smoothing) * F.logsigmoid(self.beta * h) - self.label_smoothing * F.logsigmoid(
                -self.beta * h
            )
        if self.loss_type == 'hinge':
            return torch.relu(1 - self.beta * h)
        if self.loss_type == 'ipo':
            return (h - 1 / (2 * self.beta)) ** 2
        counted = valid.sum().clamp(min=1)
        kl_chosen, kl_rejected = (
            (side.detach() * valid).sum().div(counted).clamp(min=0) for side in (chosen, rejected)
        )
        return 2 - torch.sigmoid(self.beta * (chosen - kl_rejected)) - torch.sigmoid(self.beta * (kl_chosen - rejected))


class SimPOLoss(Loss):
    """`-log sigmoid(beta (m_c - m_r) - gamma)`, m the mean log-probability per token. No reference. Counts pairs.

    Source: Meng et al., SimPO: Simple Preference Optimization with a Reference-Free Reward, 2024.

    Raises:
        ConfigError: beta not above 0.
    """

    def __init__(self, beta: float = 2.0, gamma: float = 1.0) -> None:
        if not beta > 0:
            raise ConfigError(f'SimPOLoss: beta={beta!r} must be above 0.')
        self.beta, self.gamma = beta, gamma

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        sequences = Sequences.of({**inputs, **kwargs})
        chosen, rejected = sequences.pairs(sequences.mean(outputs['logps']))
        losses = -F.logsigmoid(self.beta * (chosen - rejected) - self.gamma)
        return _of_pairs(losses, self.beta * chosen, self.beta * rejected, sequences.pair_weights())


class CPOLoss(Loss):
    """`-log sigmoid(beta (s_c - s_r)) - alpha m_c`, s the summed and m the mean log-probability. No reference. Counts pairs.

    Source: Xu et al., Contrastive Preference Optimization, 2024.

    Raises:
        ConfigError: beta not above 0, or alpha below 0.
    """

    def __init__(self, beta: float = 0.1, alpha: float = 1.0) -> None:
        if not beta > 0 or alpha < 0:
            raise ConfigError(f'CPOLoss: beta={beta!r} must be above 0 and alpha={alpha!r} at least 0.')
        self.beta, self.alpha = beta, alpha

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        sequences = Sequences.of({**inputs, **kwargs})
        chosen, rejected = sequences.pairs(sequences.sum(outputs['logps']))
        likelihood, _ = sequences.pairs(sequences.mean(outputs['logps']))
        losses = -F.logsigmoid(self.beta * (chosen - rejected)) - self.alpha * likelihood
        return _of_pairs(losses, self.beta * chosen, self.beta * rejected, sequences.pair_weights())


class ORPOLoss(Loss):
    """`-m_c - lambda log sigmoid(log odds(m_c) - log odds(m_r))`, m the mean log-probability, odds p / (1 - p). Counts pairs.

    Source: Hong et al., ORPO: Monolithic Preference Optimization without Reference Model, 2024.

    Raises:
        ConfigError: a weight below 0.
    """

    def __init__(self, weight: float = 0.1) -> None:
        if weight < 0:
            raise ConfigError(f'ORPOLoss: weight={weight!r} must be at least 0.')
        self.weight = weight

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        sequences = Sequences.of({**inputs, **kwargs})
        chosen, rejected = sequences.pairs(sequences.mean(outputs['logps']))
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        losses = -chosen - self.weight * F.logsigmoid(log_odds)
        return _of_pairs(losses, self.weight * chosen, self.weight * rejected, sequences.pair_weights())


def _log1mexp(log_p: Tensor) -> Tensor:
    """`log(1 - exp(log_p))`, exact for small probabilities and for large ones, and kept finite for an answer that is certain."""
    log_p = log_p.clamp(max=-1e-7)
    unlikely = log_p < -0.7
    return torch.where(unlikely, torch.log1p(-log_p.exp()), torch.log(-torch.expm1(log_p)))


def _of_pairs(losses: Tensor, chosen_rewards: Tensor, rejected_rewards: Tensor, weights: Tensor) -> LossOutput:
    losses = torch.where(weights > 0, losses, 0.0) * weights
    with torch.no_grad():
        valid = weights > 0
        sums: dict[str, Tensor | float] = {
            'chosen_rewards': (chosen_rewards * valid).sum(),
            'rejected_rewards': (rejected_rewards * valid).sum(),
            'right': ((chosen_rewards > rejected_rewards) & valid).sum(),
            'pairs': valid.sum(),
        }
    return LossOutput(loss_sum=losses.sum(), count=weights.sum(), metrics=sums)
