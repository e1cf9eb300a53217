"""Several samples in one row, without padding and without seeing each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.data_format import IGNORE_INDEX, InputFeature
from twinkle.errors import DataError, NotSupportedError
from twinkle.processor.collate import CONCATENATED, sample_count

__all__ = ['join_features']

# One number of these stands for all tokens of its sample.
_SPREAD = ('loss_weights', 'advantages')
_MEDIA = ('images', 'videos', 'audios')


def join_features(rows: Sequence[Mapping[str, Any]]) -> InputFeature:
    """One row of several samples, each of one token or more; they stay as they are.

    `position_ids` start again at 0 with each sample, and the last label of each is -100, so that none is trained to go on as the
    next. Tokens that an attention mask leaves out are dropped. Of other keys, numbers per token are joined, `loss_weights` and
    `advantages` of a whole sample are spread over its tokens, images and their like are joined; what else a sample has becomes a
    list with one entry per sample (None where it has none).

    Raises:
        DataError: a sample that does not fit with itself.
        NotSupportedError: positions of more than one dimension.
    """
    samples = [_attended(row) for row in rows]
    lengths = [len(sample['input_ids']) for sample in samples]
    counts = [sample_count(sample.get('position_ids')) for sample in samples]
    total = sum(lengths)
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        if key not in ('attention_mask', 'position_ids', 'length'):
            joined[key] = _joined(key, [sample.get(key) for sample in samples], lengths, counts)
    positions = [_positions(sample, n) for sample, n in zip(samples, lengths, strict=True)]
    joined |= {'attention_mask': [1] * total, 'position_ids': [p for part in positions for p in part], 'length': total}
    return cast(InputFeature, joined)


def _attended(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, what it has per token as lists, without the tokens that its attention mask leaves out."""
    for key, value in row.items():
        nested = key == 'position_ids' and value is not None and _is_list(value[0])
        if nested or (key.endswith('_grid_thw') and value is not None):
            raise NotSupportedError(
                f'A row with {key} cannot be packed: its model counts positions in several dimensions. Use a Dataset, which pads.'
            )
    length = len(row['input_ids'])
    for key in ('labels', 'attention_mask', 'position_ids'):
        value = row.get(key)
        if value is not None and not _is_per_token(value, length):
            told = f'{len(value)} {key}' if _is_list(value) else f'{key}={value!r}'
            raise DataError(f'A row with {length} input_ids and {told} cannot be packed: they must be as many.')
    mask = row.get('attention_mask')
    kept = None if mask is None or all(mask) else [index for index, value in enumerate(mask) if value]
    copy = {}
    for key, value in row.items():
        if _is_per_token(value, length):
            value = _plain(value)
            copy[key] = value if kept is None else [value[index] for index in kept]
        else:
            copy[key] = value
    return copy


def _positions(sample: Mapping[str, Any], length: int) -> Sequence[int]:
    positions: Sequence[int] | None = sample.get('position_ids')
    if positions is None:
        return range(length)
    if positions[0] != 0:
        raise DataError(
            f'A row whose position_ids start at {positions[0]} cannot be packed: 0 tells where a sample starts.'
        )
    return positions


def _joined(key: str, values: list[Any], lengths: list[int], counts: list[int]) -> Any:
    if key == 'labels':
        found = [[IGNORE_INDEX] * n if v is None else v for v, n in zip(values, lengths, strict=True)]
        return [label for labels in found for label in (*labels[:-1], IGNORE_INDEX)]
    if key == 'loss_weights':
        values = [1.0 if value is None else value for value in values]
    if key in _SPREAD and None not in values:
        plain = [_plain(value) for value in values]
        values = [v if _is_list(v) else [float(v)] * n for v, n in zip(plain, lengths, strict=True)]
    if all(_is_per_token(value, n) for value, n in zip(values, lengths, strict=True)):
        return [number for value in values for number in value]
    if key in ('input_ids', 'loss_weights'):
        raise DataError(f'{key} of a packed row must be one number per token.')
    return _media(key, values, counts)


def _media(key: str, values: list[Any], counts: list[int]) -> Any:
    """Images and their like joined along the first dimension; anything else one entry per sample."""
    if key not in _MEDIA and key not in CONCATENATED:
        # A row that is a pack already brings one entry for each of its samples.
        lists = [
            _plain(v) if n > 1 and _is_list(v) and len(v) == n else [v] * n for v, n in zip(values, counts, strict=True)
        ]
        return [entry for entries in lists for entry in entries]
    present = [value for value in values if value is not None]
    if all(isinstance(value, (list, tuple)) for value in present):
        return [one for value in present for one in value]
    import torch

    return torch.cat([torch.as_tensor(value) for value in present])


def _is_list(value: Any) -> bool:
    return (hasattr(value, 'ndim') and value.ndim > 0) or isinstance(value, (list, tuple))


def _is_per_token(value: Any, length: int) -> bool:
    """Whether it holds a number, or several, for each of `length` tokens."""
    if not _is_list(value) or len(value) != length or not length:
        return False
    first = value[0]
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return hasattr(value, 'ndim') or isinstance(first, (int, float))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, 'tolist') else value
