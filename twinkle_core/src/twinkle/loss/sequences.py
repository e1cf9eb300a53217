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

__all__ = ['Sequences']


@dataclass(frozen=True)
class Sequences:
    """The samples of a batch. Shapes: [B, T] by token, S samples.

    Attributes:
        index_BT: the sample that each token is of.
        kept_BT: which positions have a label.
        count: S.
    """

    index_BT: Tensor
    kept_BT: Tensor
    count: int

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Sequences:
        """The samples of a collated batch: by `position_ids` where they start again within a row, else by row."""
        labels = inputs['labels']
        real = inputs.get('attention_mask')
        real = torch.ones_like(labels, dtype=torch.bool) if real is None else real.bool()
        positions = inputs.get('position_ids')
        starts = real & (real.cumsum(1) == 1)  # the first real token of every row
        if positions is not None and positions.shape == labels.shape:
            starts = starts | ((positions == 0) & real)
        index = (starts.flatten().cumsum(0) - 1).clamp(min=0).view(labels.shape)
        return cls(index, (labels != IGNORE_INDEX) & real, int(starts.sum()))

    def sum(self, values_BT: Tensor) -> Tensor:
        """Sums over each sample's labelled tokens, [S]."""
        kept = torch.where(self.kept_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))
        return values_BT.new_zeros(self.count).index_add(0, self.index_BT.flatten(), kept.flatten())

    @property
    def lengths(self) -> Tensor:
        """Labelled tokens of each sample, [S]."""
        return self.sum(self.kept_BT.float())

    def mean(self, values_BT: Tensor) -> Tensor:
        """Means over each sample's labelled tokens, [S]; 0 for a sample without one."""
        return self.sum(values_BT) / self.lengths.clamp(min=1)

    def by_token(self, values: Any, name: str) -> Tensor:
        """Values given per sample [S], per row or per token [B, T], as [B, T].

        Raises:
            DataError: another shape.
        """
        values = torch.as_tensor(values, device=self.index_BT.device, dtype=torch.float32)
        if values.shape == self.index_BT.shape:
            return values
        if values.ndim == 1 and len(values) == self.count:
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
