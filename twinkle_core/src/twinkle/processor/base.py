"""The input processor: the last stop of data before the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinkle.data_format import InputFeature
from twinkle.errors import ConfigError, DataError
from twinkle.processor.collate import check_lengths, collate_rows
from twinkle.processor.joining import join_features

__all__ = ['InputProcessor']


class InputProcessor:
    """Encoded rows to right-padded tensors on a device.

    From rows it makes `input_ids` [B, T] (padded with `pad_token_id`), `attention_mask` [B, T], `position_ids` [B, T]
    (the rows' own ones where they have them), and where rows have them `labels` [B, T] (padded with -100) and
    `loss_weights` [B, T] (padded with 0; one number stands for all tokens of its row, none for 1). Of other keys,
    numbers become [B], numbers per token [B, T], arrays of one shape [B, ...]; images and their like (`pixel_values`,
    `image_grid_thw`, ...) are joined along the first dimension; strings and other objects stay a list, as does a key
    that some rows lack. Rows that are packs (their positions start again at 0 with each sample) give one number per
    sample for what is given per sample.

    Args:
        padding_free: join the rows of a batch into one row, [1, total tokens], in which samples do not see each other. Nothing
            is padded (but up to `pad_to_multiple_of`), so nothing is computed for padding; losses and metrics see the same samples.
        pad_token_id: what stands in padded places; nothing is computed from it.
        pad_to_multiple_of: T is rounded up to a multiple of it.
        max_length: refuse longer rows (they are truncated in the template, not here).

    Raises:
        ConfigError: an option has a value that cannot work.
    """

    def __init__(
        self,
        *,
        pad_token_id: int = 0,
        pad_to_multiple_of: int | None = None,
        max_length: int | None = None,
        padding_free: bool = False,
    ) -> None:
        for name, value, least in (
            ('pad_token_id', pad_token_id, 0),
            ('pad_to_multiple_of', pad_to_multiple_of, 1),
            ('max_length', max_length, 1),
        ):
            if value is None and name != 'pad_token_id':
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f'InputProcessor: {name}={value!r} must be a whole number of at least {least}.')
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.max_length = max_length
        if not isinstance(padding_free, bool):
            raise ConfigError(f'InputProcessor: padding_free={padding_free!r} must be True or False.')
        self.padding_free = padding_free

    def __repr__(self) -> str:
        return (
            f'{type(self).__name__}(pad_token_id={self.pad_token_id}, pad_to_multiple_of={self.pad_to_multiple_of}, '
            f'padding_free={self.padding_free})'
        )

    def __call__(
        self,
        inputs: InputFeature | Sequence[InputFeature] | Mapping[str, Any],
        *,
        device: str | torch.device = 'cpu',
    ) -> dict[str, Any]:
        """The batch of one feature, a list of them, or a dictionary of tensors (which only gets what it lacks).

        Raises:
            DataError: nothing to collate, or rows that do not fit; the row is named.
        """
        if isinstance(inputs, Mapping):
            batch = self._complete(inputs) if _is_batch(inputs) else self._collate([inputs])
        elif isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
            batch = self._collate(inputs)
        else:
            raise DataError(
                f'inputs is {type(inputs).__name__}; pass an InputFeature, a list of them, or a dictionary of tensors.'
            )
        return {
            key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    def _collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not rows:
            raise DataError('There is no row to collate. Skip empty batches, or use drop_last=True.')
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f'Row {index} is {type(row).__name__}; a row is a dictionary with input_ids.')
        limit = self.max_length
        if self.padding_free and all('input_ids' in row for row in rows):
            check_lengths(rows, limit)  # of the rows; their sum may be longer
            rows, limit = [join_features(rows)], None
        return collate_rows(rows, pad_token_id=self.pad_token_id, multiple=self.pad_to_multiple_of, max_length=limit)

    def _complete(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of tensors, with the attention mask and positions that follow from it where they are missing."""
        batch = {key: _as_tensor(value) for key, value in inputs.items()}
        ids = batch.get('input_ids')
        if ids is None:
            return batch
        if self.padding_free and len(ids) > 1:
            raise DataError(
                f'padding_free=True joins rows, and these are padded already: input_ids of shape {tuple(ids.shape)}. Pass a list of '
                'rows, or use a processor without padding_free.'
            )
        for key in ('labels', 'attention_mask', 'loss_weights'):
            value = batch.get(key)
            if isinstance(value, Tensor) and value.ndim == 2 and value.shape != ids.shape:
                raise DataError(
                    f'{key} has the shape {tuple(value.shape)}, and input_ids {tuple(ids.shape)}; they must be equal.'
                )
        mask = batch.get('attention_mask')
        if mask is None:
            mask = batch['attention_mask'] = torch.ones_like(ids)
        if batch.get('position_ids') is None:
            if mask.ndim == 2:
                batch['position_ids'] = (mask.ne(0).cumsum(-1) - 1).clamp_(min=0)
            else:
                batch['position_ids'] = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape).contiguous()
        return batch


def _is_batch(inputs: Mapping[str, Any]) -> bool:
    """Whether a mapping is a batch of tensors already, rather than one row."""
    ids = inputs.get('input_ids')
    if ids is None:
        return True
    if isinstance(ids, (Tensor, np.ndarray)):
        return ids.ndim == 2
    return isinstance(ids, (list, tuple)) and len(ids) > 0 and isinstance(ids[0], (list, tuple))


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biuf':
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple, int, float)):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError) as error:
            raise DataError(
                f'A dictionary of lists must be rectangular to be a batch ({error}). Pass a list of rows instead; '
                'those are padded.'
            ) from error
    return value
