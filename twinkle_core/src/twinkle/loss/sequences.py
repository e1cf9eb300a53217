"""Which tokens belong to which sample, padded or packed, and sums over them.

Padded, a row is a sample. Packed, a row holds several, and positions start again at 0 with each. Losses over whole samples (pairs,
completions) see the same samples, in the same order, either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import DataError

__all__ = ['Sequences', 'sample_starts']


def sample_starts(inputs: Mapping[str, Any], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Which tokens [B, T] of a collated batch are real, and which of them begin a sample: `position_ids` start again there."""
    given, positions = inputs.get('attention_mask'), inputs.get('position_ids')
    if given is not None and given.shape == shape:
        real = given.bool()
    else:
        device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
        real = torch.ones(shape, dtype=torch.bool, device=device)
    starts = real & (real.cumsum(1) == 1)  # the first real token of every row
    if positions is not None and positions.ndim == 3 and len(positions) == 4:
        # Of text; the other three are multimodal rotary positions, which do not tell samples apart.
        positions = positions[0]
    if positions is not None and positions.shape == shape:
        starts = starts | ((positions == 0) & real)
    return real, starts


@dataclass(frozen=True)
class Sequences:
    """The samples of a batch. Shapes: [B, T] by token, S samples.

    Attributes:
        index_BT: the sample that each token is of.
        kept_BT: which positions have a label.
        count: S.
        weights_BT: `loss_weights`, relative weights of the tokens of a sample, if there are any.
        weights_S: `sample_weights`, if there are any.
    """

    index_BT: Tensor
    kept_BT: Tensor
    count: int
    weights_BT: Tensor | None = None
    weights_S: Tensor | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Sequences:
        """The samples of a collated batch: by `position_ids` where they start again within a row, else by row.

        Raises:
            DataError: `sample_weights` of another number of samples.
        """
        labels = inputs['labels']
        real, starts = sample_starts(inputs, labels.shape)
        index = (starts.flatten().cumsum(0) - 1).clamp(min=0).view(labels.shape)
        count = int(starts.sum())
        weights = inputs.get('sample_weights')
        if weights is not None:
            weights = torch.as_tensor(weights, device=labels.device, dtype=torch.float32)
            if weights.shape != (count,):
                raise DataError(
                    f'sample_weights has shape {tuple(weights.shape)}, and there are {count} samples: give one each.'
                )
        return cls(index, (labels != IGNORE_INDEX) & real, count, inputs.get('loss_weights'), weights)

    def sum(self, values_BT: Tensor) -> Tensor:
        """Sums over each sample's labelled tokens, weighted, [S]."""
        if self.weights_BT is not None:
            values_BT = values_BT * self.weights_BT
        # Selected, not multiplied by a mask: what stands in padded places may be anything.
        kept = torch.where(self.kept_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))
        return values_BT.new_zeros(self.count).index_add(0, self.index_BT.flatten(), kept.flatten())

    @property
    def lengths(self) -> Tensor:
        """Labelled tokens of each sample, or the sum of their weights, [S]."""
        return self.sum(self.kept_BT.float())

    @property
    def labelled(self) -> Tensor:
        """Which samples have something to learn from, [S]."""
        return self.lengths > 0

    def mean(self, values_BT: Tensor) -> Tensor:
        """Weighted means over each sample's labelled tokens, [S]; 0 for a sample without one."""
        lengths = self.lengths
        return self.sum(values_BT) / torch.where(lengths > 0, lengths, 1.0)

    def over_tokens(self, values_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over all labelled tokens, and their number; both weighted."""
        return self._weighted(self.sum(values_BT)), self._weighted(self.lengths)

    def over_samples(self, values_S: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over samples that have a labelled token, and their number; both weighted."""
        labelled = self.labelled
        return self._weighted(torch.where(labelled, values_S, 0.0)), self._weighted(labelled.float())

    def _weighted(self, values_S: Tensor) -> Tensor:
        return values_S.sum() if self.weights_S is None else (values_S * self.weights_S).sum()

    def by_token(self, values: Any, name: str) -> Tensor:
        """Values given per sample [S], or per token [B, T], as [B, T].

        Raises:
            DataError: another shape.
        """
        values = torch.as_tensor(values, device=self.index_BT.device, dtype=torch.float32)
        if values.shape == self.index_BT.shape:
            return values
        if values.shape == (self.count,):
            return values[self.index_BT]
        raise DataError(
            f'{name} has shape {tuple(values.shape)}: give one per sample ({self.count}) or one per token {tuple(self.index_BT.shape)}.'
        )

    def pairs(self, values_S: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen and rejected, [S/2] each: samples come in turn, chosen first.

        Raises:
            DataError: an odd number of samples.
        """
        if self.count % 2:
            raise DataError(
                f'A batch of preferences holds chosen and rejected samples in turn, and this one has {self.count}, an odd number. '
                'Keep pairs together: use an even batch size per rank.'
            )
        return values_S[0::2], values_S[1::2]

    def pair_weights(self) -> Tensor:
        """The weight of each pair, [S/2]: the mean of its samples' weights, 0 where one of the two has nothing to learn from."""
        chosen, rejected = self.pairs(self.labelled)
        first, second = (1.0, 1.0) if self.weights_S is None else self.pairs(self.weights_S)
        return (chosen & rejected) * (first + second) / 2
