"""Lists of rows to tensors, one key at a time, by way of numpy: filling an array row by row is the fastest way."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import DataError

__all__ = ['check_lengths', 'collate_rows', 'positions_of', 'sample_count']

CONCATENATED = frozenset({
    'pixel_values', 'pixel_values_videos', 'pixel_attention_mask', 'image_grid_thw', 'video_grid_thw',
    'second_per_grid_ts', 'image_sizes', 'image_position_ids', 'num_patches', 'image_flags', 'input_features',
    'feature_attention_mask',
})  # fmt: skip
"""Keys whose rows hold any number of images, videos or sounds: joined along the first dimension, as models expect."""

Rows = Sequence[Mapping[str, Any]]


def collate_rows(rows: Rows, *, pad_token_id: int, multiple: int | None, max_length: int | None) -> dict[str, Any]:
    """The tensors of `rows`, on the CPU, right-padded to the longest [B, T]. `rows` stay as they are.

    Raises:
        DataError: rows that do not fit together, or with themselves; the row is named.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if 'input_ids' not in keys:
        return {key: _collate_other(key, rows, None, 0) for key in keys}
    samples = [sample_count(row.get('position_ids')) for row in rows]
    lengths = check_lengths(rows, max_length)
    width = max(lengths)
    if multiple is not None:
        width = -(-width // multiple) * multiple
    ids = _padded('input_ids', [row['input_ids'] for row in rows], lengths, width, pad_token_id)
    real = np.arange(width)[None, :] < np.asarray(lengths)[:, None]
    batch: dict[str, Any] = {'input_ids': torch.from_numpy(ids)}
    given = [row.get('attention_mask') for row in rows]
    if all(mask is None for mask in given):
        mask = real.astype(np.int64)
    else:
        full = [np.ones(n, np.int64) if m is None else m for m, n in zip(given, lengths, strict=True)]
        mask = _padded('attention_mask', full, lengths, width, 0)
    batch['attention_mask'] = torch.from_numpy(mask)
    batch['position_ids'] = torch.from_numpy(_positions(rows, lengths, width, mask, real))
    for key in keys:
        if key == 'labels':
            batch[key] = _collate_labels(rows, lengths, width)
        elif key == 'loss_weights':
            batch[key] = torch.from_numpy(_loss_weights(rows, lengths, width, real))
        elif key not in batch:
            per_sample = _collate_samples(key, rows, lengths, samples)
            batch[key] = _collate_other(key, rows, lengths, width) if per_sample is None else per_sample
    return batch


def sample_count(position_ids: Any) -> int:
    """How many samples a row holds: positions start again at 0 with each."""
    if position_ids is None or getattr(position_ids, 'ndim', 1) != 1:
        return 1
    values = np.asarray(_numpy(position_ids))
    return max(int((values == 0).sum()), 1) if values.ndim == 1 else 1


def check_lengths(rows: Rows, max_length: int | None) -> list[int]:
    """Tokens of each row.

    Raises:
        DataError: a row without any, or with more than `max_length`.
    """
    lengths = []
    for index, row in enumerate(rows):
        ids = row.get('input_ids')
        if ids is None or not hasattr(ids, '__len__') or len(ids) == 0:
            raise DataError(
                f'Row {index} has no input_ids (keys: {sorted(map(str, row))}); every row needs at least one token.'
            )
        if max_length is not None and len(ids) > max_length:
            raise DataError(
                f'Row {index} has {len(ids)} tokens, more than max_length={max_length}; truncate in the template.'
            )
        lengths.append(len(ids))
    return lengths


def _padded(
    key: str, values: Sequence[Any], lengths: Sequence[int], width: int, fill: float, dtype: Any = np.int64
) -> np.ndarray:
    """Rows of numbers, as many as `lengths` says, in one array [B, width]."""
    out = np.full((len(values), width), fill, dtype)
    for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if len(value) != length:
            raise DataError(
                f'Row {index} has {length} input_ids and {len(value)} {key}; they must be as many. Encode the row '
                f'again, or leave {key} out.'
            )
        try:
            out[index, :length] = _numpy(value)
        except (TypeError, ValueError) as error:
            raise DataError(f'{key} of row {index} is not a sequence of numbers: {error}') from error
    return out


def _numpy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return value


def positions_of(mask: np.ndarray) -> np.ndarray:
    """Positions [B, T] that count the tokens attended to, from 0 at the first (also behind padding on the left)."""
    positions: np.ndarray = np.maximum(np.cumsum(mask != 0, axis=-1) - 1, 0)
    return positions


def _positions(rows: Rows, lengths: Sequence[int], width: int, mask: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The rows' own positions where they have them (packed rows start again at 0), else counted from the mask."""
    given = [row.get('position_ids') for row in rows]
    if all(position is None for position in given):
        if (mask == real).all():
            return np.tile(np.arange(width), (len(rows), 1))
        return positions_of(mask)
    counted = positions_of(mask)
    full = [counted[i, :n] if p is None else p for i, (p, n) in enumerate(zip(given, lengths, strict=True))]
    return _padded('position_ids', full, lengths, width, 0)


def _collate_labels(rows: Rows, lengths: Sequence[int], width: int) -> Any:
    values = [row.get('labels') for row in rows]
    if not any(value is None or _is_sequence(value) for value in values):
        return _collate_other('labels', rows, lengths, width)
    full = [np.full(n, IGNORE_INDEX) if v is None else v for v, n in zip(values, lengths, strict=True)]
    for index, value in enumerate(full):
        if not _is_sequence(value):
            raise DataError(
                f'Row {index} has the labels {value!r}, and other rows have one per token; a batch has one kind only.'
            )
    floats = any(np.asarray(_numpy(value)[:1]).dtype.kind == 'f' for value in full)
    return torch.from_numpy(_padded('labels', full, lengths, width, IGNORE_INDEX, np.float32 if floats else np.int64))


def _loss_weights(rows: Rows, lengths: Sequence[int], width: int, real: np.ndarray) -> np.ndarray:
    """Weights [B, T]: a row may give one per token, one for all of them, or none (then 1)."""
    out = real.astype(np.float32)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        weights = row.get('loss_weights')
        if weights is None:
            continue
        if _is_sequence(weights):
            out[index] = _padded_one('loss_weights', weights, index, length, width)
        else:
            out[index, :length] = float(weights)
    return out


def _padded_one(key: str, value: Any, index: int, length: int, width: int) -> np.ndarray:
    if len(value) != length:
        raise DataError(f'Row {index} has {length} input_ids and {len(value)} {key}; they must be as many.')
    out = np.zeros(width, np.float32)
    out[:length] = _numpy(value)
    return out


def _is_sequence(value: Any) -> bool:
    if hasattr(value, 'ndim'):
        return bool(value.ndim > 0)
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _collate_samples(key: str, rows: Rows, lengths: Sequence[int], samples: Sequence[int]) -> Any:
    """Numbers [S], one for each sample of rows of which some are packed; None where `key` holds something else."""
    if max(samples) == 1:
        return None
    numbers_S: list[Any] = []
    for row, length, count in zip(rows, lengths, samples, strict=True):
        value = row.get(key)
        if count == 1 and not _is_sequence(value):
            value = [value]
        if value is None or not _is_sequence(value) or len(value) != count or count == length:
            return None
        numbers_S.extend(_numpy(value))
    if not all(isinstance(number, (numbers.Number, np.generic)) for number in numbers_S):
        return None
    return _tensor(np.asarray(numbers_S))


def _collate_other(key: str, rows: Rows, lengths: Sequence[int] | None, width: int) -> Any:
    """Numbers become [B], those per token [B, T, ...] padded with 0, arrays of one shape [B, ...]; else a list."""
    values = [row.get(key) for row in rows]
    if key in CONCATENATED:
        return _concatenated(key, values)
    if any(value is None for value in values):
        return values
    if all(isinstance(value, (numbers.Number, np.generic)) for value in values):
        return _tensor(np.asarray(values))
    arrays = [array for array in map(_array, values) if array is not None]
    if len(arrays) < len(values):
        return values
    if lengths is not None and all(a.ndim > 0 and a.shape[0] == n for a, n in zip(arrays, lengths, strict=True)):
        inner = {array.shape[1:] for array in arrays}
        if len(inner) == 1:
            out = np.zeros((len(rows), width, *inner.pop()), np.result_type(*arrays))
            for index, array in enumerate(arrays):
                out[index, : len(array)] = array
            return _tensor(out)
    if len({array.shape for array in arrays}) == 1:
        return _tensor(np.stack(arrays))
    return values


def _array(value: Any) -> np.ndarray | None:
    """`value` as an array of numbers, or None."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        array = np.asarray(_numpy(value))
    elif _is_sequence(value) and len(value) > 0 and (isinstance(value[0], numbers.Number) or _is_sequence(value[0])):
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # ragged, or a mixture: it is kept as it is
            return None
    else:
        return None
    return array if array.dtype.kind in 'biuf' else None


def _tensor(array: np.ndarray) -> Any:
    """A tensor in the precision that models use: float32, int64 or bool."""
    if array.dtype.kind == 'f':
        array = array.astype(np.float32)
    elif array.dtype.kind in 'iu':
        array = array.astype(np.int64)
    elif array.dtype.kind != 'b':
        return array.tolist()
    return torch.from_numpy(np.ascontiguousarray(array))


def _concatenated(key: str, values: Sequence[Any]) -> Any:
    present = [torch.as_tensor(np.asarray(v) if isinstance(v, (list, tuple)) else v) for v in values if v is not None]
    if not present:
        return list(values)
    if len({(tensor.ndim, *tensor.shape[1:]) for tensor in present}) > 1:
        raise DataError(
            f'{key} of the rows cannot be joined: shapes {[tuple(tensor.shape) for tensor in present]} differ behind '
            'the first dimension. Bring images to one size, or put such rows into batches of their own.'
        )
    return torch.cat(present)
