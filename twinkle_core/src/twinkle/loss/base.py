"""The base of losses, and what makes a plain function one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from twinkle.data_format import IGNORE_INDEX, LossOutput
from twinkle.errors import InvalidPartError

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle.data_format import ModelOutput

__all__ = ['FunctionLoss', 'Loss', 'as_loss', 'counted']


class Loss(ABC):
    """Turns what a forward pass gave into a sum and what it counts.

    Attributes:
        requires: keys of `ModelOutput` that the forward pass must compute: `logits`, `logps`, `nll`, `entropies`, `embeddings`,
            `values`, `hidden_states`. Losses work from `logps` or `nll` wherever they can: logits are large.
        required_inputs: keys that the batch (or a keyword of the call) must hold beside `labels`.
        needs_labels: whether a batch without `labels` has nothing for this loss.
    """

    requires: frozenset[str] = frozenset({'logps'})
    required_inputs: ClassVar[tuple[str, ...]] = ()
    needs_labels: ClassVar[bool] = True

    @property
    def needs_reference(self) -> bool:
        """Whether the batch must hold `ref_logps` [B, T]; a model with adapters adds them, computed with the adapter disabled."""
        return False

    @abstractmethod
    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        """The loss of one micro-batch.

        Args:
            inputs: the collated batch; `labels` [B, T] hold the target of each position, -100 where there is none.
            outputs: what `requires` asked for.

        Returns:
            The sum over what is counted, and the count; never a mean.
        """


class FunctionLoss(Loss):
    """A function `f(inputs, outputs, **kwargs)` as a loss.

    A tensor that it returns is taken as the mean of one micro-batch, which then counts 1, whatever its size. It may return a
    `LossOutput` instead. It needs `logits` and `logps`, unless it has an attribute `requires` that says otherwise.

    Raises:
        InvalidPartError: it returned neither a scalar tensor nor a `LossOutput`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.requires = frozenset(getattr(function, 'requires', ('logits', 'logps')))

    def __call__(self, inputs: Mapping[str, Any], outputs: ModelOutput, **kwargs: Any) -> LossOutput:
        result = self.function(inputs, outputs, **kwargs)
        if isinstance(result, LossOutput):
            return result
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            given = (
                f'a tensor of shape {tuple(result.shape)}'
                if isinstance(result, torch.Tensor)
                else type(result).__name__
            )
            raise InvalidPartError(
                f'The loss {self.describe()} returned {given}; return a scalar tensor or a LossOutput.'
            )
        return LossOutput(loss_sum=result.reshape(()), count=1.0)

    def describe(self) -> str:
        """The function's name."""
        return getattr(self.function, '__qualname__', repr(self.function))


def as_loss(part: Any) -> Loss:
    """A `Loss` for a loss or a function."""
    return part if isinstance(part, Loss) else FunctionLoss(part)


def counted(inputs: Mapping[str, Any]) -> Tensor | float:
    """What a token-wise loss counts: labels that are not -100, or the sum of their `loss_weights` where given."""
    kept = inputs['labels'] != IGNORE_INDEX
    weights = inputs.get('loss_weights')
    return kept.sum() if weights is None else (weights * kept).sum()
