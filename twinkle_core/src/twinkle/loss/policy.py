"""Losses of reinforcement learning on sampled answers: PPO's clipped surrogate and what has grown from it.

Labels mark the tokens of the answers. The batch (or a keyword) gives `advantages`, one per sample [S] or per token [B, T], and
`old_logps` [B, T], the log-probabilities under the policy that sampled; left out, those of this very step are taken (one step per
sample, ratio 1). With `beta`, `ref_logps` [B, T] of the reference are needed. All give the same padded and packed. `loss_weights`
[B, T] weight tokens in every sum and mean over tokens, `sample_weights` [S] samples.

r is a token's ratio `exp(logp - old_logp)`, A its advantage. Signs: what is returned is minimised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinkle.data_format import LossOutput
from twinkle.errors import ConfigError, DataError
from twinkle.loss.base import Loss
from twinkle.loss.sequences import Sequences

if TYPE_CHECKING:
    from twinkle.data_format import ModelOutput

__all__ = ['BNPOLoss', 'CISPOLoss', 'DRGRPOLoss', 'GRPOLoss', 'GSPOLoss', 'PPOLoss', 'SAPOLoss']


class _PolicyLoss(Loss):
    """The frame of all of them: ratios, a per-token objective, the KL penalty, the entropy bonus, and how tokens are averaged."""

    def __init__(
        self, epsilon: float = 0.2, epsilon_high: float | None = None, *, beta: float = 0.0, entropy_coef: float = 0.0
    ) -> None:
        high = epsilon if epsilon_high is None else epsilon_high
        for name, value in (('epsilon', epsilon), ('epsilon_high', high), ('beta', beta)):
            if value < 0:
                raise ConfigError(f'{type(self).__name__}: {name}={value!r} must be at least 0.')
        self.epsilon, self.epsilon_high, self.beta, self.entropy_coef = epsilon, high, beta, entropy_coef
        self.requires = frozenset({'logps', 'entropies'} if entropy_coef else {'logps'})

    @property
    def needs_reference(self) -> bool:
        """Whether the batch must hold `ref_logps`."""
        return self.beta > 0

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        given = {**inputs, **kwargs}
        sequences = Sequences.of(given)
        if given.get('advantages') is None:
            raise DataError(
                f'{type(self).__name__} needs advantages: one per sample or per token, in the batch or as a keyword.'
            )
        logps = outputs['logps']
        old = given.get('old_logps')
        log_ratio = logps - (logps.detach() if old is None else _like(old, logps, 'old_logps', sequences))
        advantages = sequences.by_token(given['advantages'], 'advantages')
        losses, clipped = self.token_losses(log_ratio, logps, advantages, sequences)
        sums: dict[str, Tensor | float] = {}
        if self.beta:
            if given.get('ref_logps') is None:
                raise DataError(f'{type(self).__name__}: beta={self.beta} needs ref_logps [B, T] of the reference.')
            difference = _like(given['ref_logps'], logps, 'ref_logps', sequences) - logps
            kl = difference.exp() - difference - 1  # k3: unbiased and never negative (Schulman, 2020)
            losses = losses + self.beta * kl
            sums['kl'] = sequences.sum(kl.detach()).sum()
        if self.entropy_coef:
            losses = losses - self.entropy_coef * outputs['entropies']
            sums['entropy'] = sequences.sum(outputs['entropies'].detach()).sum()
        total, count = self.aggregate(losses, sequences)
        sums |= {
            'clipped': sequences.sum(clipped.float()).sum(),
            'ratio': sequences.sum(log_ratio.detach().exp()).sum(),
            'tokens': sequences.lengths.sum(),
        }
        return LossOutput(loss_sum=total, count=count, metrics=sums)

    def token_losses(
        self, log_ratio: Tensor, logps: Tensor, advantages: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Each token's loss, `-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`, and where clipping holds the gradient back."""
        return self._clipped_surrogate(log_ratio.exp(), advantages)

    def _clipped_surrogate(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        bounded = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        clipped = ((ratio > 1 + self.epsilon_high) & (advantages > 0)) | ((ratio < 1 - self.epsilon) & (advantages < 0))
        return -torch.minimum(ratio * advantages, bounded * advantages), clipped

    def aggregate(self, losses: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The sum and what it counts: here each sample's mean over its tokens, counted by samples that have any."""
        return sequences.over_samples(sequences.mean(losses))


class GRPOLoss(_PolicyLoss):
    """Group relative policy optimisation: the clipped surrogate, a mean over each sample's tokens, then over samples.

    Args:
        epsilon, epsilon_high: clipping below and above 1; `epsilon_high` alone raised is DAPO's clip-higher (Yu et al., 2025).
        beta: weight of the k3 estimate of the KL divergence to the reference, `exp(d) - d - 1` with d = ref_logp - logp.
        entropy_coef: weight of the entropy bonus.

    Source: Shao et al., DeepSeekMath, 2024.
    """


class BNPOLoss(_PolicyLoss):
    """As GRPO, but a mean over all tokens of the batch (token-level loss, as in DAPO): long answers weigh more."""

    def aggregate(self, losses: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        return sequences.over_tokens(losses)


class DRGRPOLoss(_PolicyLoss):
    """As GRPO, but a sum over each sample's tokens over a constant, `max_completion_length`: no bias by length.

    Source: Liu et al., Understanding R1-Zero-Like Training: A Critical Perspective, 2025. Its advantages are not divided by a standard
    deviation: `GRPOAdvantage(scale=False)`.

    Raises:
        ConfigError: `max_completion_length` below 1.
    """

    def __init__(self, max_completion_length: int, **options: Any) -> None:
        if max_completion_length < 1:
            raise ConfigError(f'DRGRPOLoss: max_completion_length={max_completion_length!r} must be at least 1.')
        super().__init__(**options)
        self.max_completion_length = max_completion_length

    def aggregate(self, losses: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        return sequences.over_samples(sequences.sum(losses) / self.max_completion_length)


class GSPOLoss(_PolicyLoss):
    """Group sequence policy optimisation: one ratio per sample, the exponential of its mean log-ratio, is clipped.

    Source: Zheng et al., Group Sequence Policy Optimization, 2025.
    """

    def __init__(self, epsilon: float = 3e-4, epsilon_high: float | None = 4e-4, **options: Any) -> None:
        super().__init__(epsilon, epsilon_high, **options)

    def token_losses(
        self, log_ratio: Tensor, logps: Tensor, advantages: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        return self._clipped_surrogate(sequences.mean(log_ratio).exp()[sequences.index_BT], advantages)


class SAPOLoss(_PolicyLoss):
    """Soft adaptive policy optimisation: instead of clipping, a gate `4 / tau sigmoid(tau (r - 1))` that fades smoothly.

    `tau_pos` holds for positive advantages and `tau_neg` for the others.

    Source: Gao et al., Soft Adaptive Policy Optimization, 2025.

    Raises:
        ConfigError: a temperature not above 0.
    """

    def __init__(self, tau_pos: float = 1.0, tau_neg: float = 1.05, **options: Any) -> None:
        if not tau_pos > 0 or not tau_neg > 0:
            raise ConfigError(f'SAPOLoss: tau_pos={tau_pos!r} and tau_neg={tau_neg!r} must be above 0.')
        super().__init__(**options)
        self.tau_pos, self.tau_neg = tau_pos, tau_neg

    def token_losses(
        self, log_ratio: Tensor, logps: Tensor, advantages: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
        gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
        return -gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)


class CISPOLoss(_PolicyLoss):
    """Clipped importance sampling: `-sg(min(r, 1 + epsilon_high)) A logp`, sg without a gradient; a mean over all tokens.

    No token loses its gradient; only its weight is bounded.

    Source: MiniMax-M1, 2025.
    """

    def __init__(self, epsilon_high: float = 4.0, **options: Any) -> None:
        super().__init__(epsilon_high=epsilon_high, **options)

    def token_losses(
        self, log_ratio: Tensor, logps: Tensor, advantages: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.detach().exp()
        return -ratio.clamp(max=1 + self.epsilon_high) * advantages * logps, ratio > 1 + self.epsilon_high

    def aggregate(self, losses: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        return sequences.over_tokens(losses)


class PPOLoss(_PolicyLoss):
    """The clipped surrogate of PPO, a mean over all tokens, and with `value_coef` the clipped loss of a value head.

    The value part is `value_coef / 2 max((v - R)^2, (clip(v, v_old +- value_clip) - R)^2)` with `returns` and `old_values` [B, T].

    Source: Schulman et al., Proximal Policy Optimization Algorithms, 2017.

    Raises:
        ConfigError: a coefficient below 0.
    """

    def __init__(
        self, epsilon: float = 0.2, *, value_coef: float = 0.0, value_clip: float = 0.2, **options: Any
    ) -> None:
        if value_coef < 0 or value_clip < 0:
            raise ConfigError(f'PPOLoss: value_coef={value_coef!r} and value_clip={value_clip!r} must be at least 0.')
        super().__init__(epsilon, **options)
        self.value_coef, self.value_clip = value_coef, value_clip
        if value_coef:
            self.requires = self.requires | {'values'}

    def aggregate(self, losses: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        return sequences.over_tokens(losses)

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        result = super().__call__(inputs, outputs, **kwargs)
        if not self.value_coef:
            return result
        given = {**inputs, **kwargs}
        values = outputs['values']
        if given.get('returns') is None or given.get('old_values') is None:
            raise DataError(f'PPOLoss: value_coef={self.value_coef} needs returns and old_values [B, T].')
        sequences = Sequences.of(given)
        returns, old = (_like(given[name], values, name, sequences) for name in ('returns', 'old_values'))
        bounded = old + (values - old).clamp(-self.value_clip, self.value_clip)
        errors = torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)
        value_loss = sequences.over_tokens(errors)[0] * self.value_coef / 2
        return LossOutput(
            result.loss_sum + value_loss, result.count, {**result.metrics, 'value_loss': value_loss.detach()}
        )


def _like(values: Any, logps: Tensor, name: str, sequences: Sequences) -> Tensor:
    """What was given by token, as a constant. Places without a label may hold anything: there the policy's own value stands."""
    values = torch.as_tensor(values, device=logps.device, dtype=logps.dtype).detach()
    if values.shape != logps.shape:
        raise DataError(
            f'{name} has shape {tuple(values.shape)}, and labels have {tuple(logps.shape)}: one per token, padded alike.'
        )
    return torch.where(sequences.kept_BT, values, logps.detach())
