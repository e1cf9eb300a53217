"""Samples put together into rows of a fixed length: which go together, and the row that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar, cast

from twinkle.data_format import IGNORE_INDEX, InputFeature
from twinkle.errors import ConfigError, DataError, MissingPackageError, NotSupportedError, StateError

__all__ = ['Packing', 'join_features', 'token_count']

T = TypeVar('T')

# One number of these stands for all tokens of its sample.
_SPREAD = ('loss_weights', 'advantages')
_MEDIA = ('images', 'videos', 'audios')


@dataclass(frozen=True)
class Packing:
    """How samples are packed.

    Attributes:
        length: tokens of a full row; None for the template's `max_length`.
        interval: how many samples are looked at together.

    Raises:
        ConfigError: a value that is no positive integer.
        MissingPackageError: the library that packs is not installed.
    """

    length: int | None
    interval: int

    def __post_init__(self) -> None:
        for name, value in (('packing_length', self.length), ('packing_interval', self.interval)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole and value >= 1) and not (value is None and name == 'packing_length'):  # type: ignore[operator]
                raise ConfigError(f'{name}={value!r} must be an integer of at least 1.')
        _library()

    def length_for(self, template: Any) -> int:
        """Tokens of a full row.

        Raises:
            StateError: neither the packing nor the template says.
        """
        length = self.length if self.length is not None else getattr(template, 'max_length', None)
        if length is None:
            raise StateError(
                'Packing needs to know how long a row is: set_template(..., max_length=...), or packing_length=... .'
            )
        return int(length)

    def together(self, samples: Iterable[tuple[int, T]], length: int) -> Iterator[list[T]]:
        """Samples, given with their numbers of tokens, in groups of at most `length` tokens; each once.

        `interval` of them at a time go, longest first, to the emptiest group with room; what is in the emptiest group waits for the
        next ones. Samples of a group keep their order, and groups come in the order of their first sample.
        """
        samples = iter(samples)
        waiting: list[tuple[int, T]] = []
        while new := list(islice(samples, self.interval)):
            waiting += new
            groups = _groups([tokens for tokens, _ in waiting], length)
            emptiest = min(groups, key=lambda group: sum(waiting[i][0] for i in group))
            for group in groups:
                if group is not emptiest:
                    yield [waiting[i][1] for i in group]
            waiting = [waiting[i] for i in emptiest]
        if waiting:
            yield [sample for _, sample in waiting]


def _groups(lengths: Sequence[int], length: int) -> list[list[int]]:
    bins = _library().to_constant_volume(dict(enumerate(lengths)), length)
    return sorted(sorted(group) for group in bins)


def _library() -> Any:
    try:
        import binpacking
    except ImportError as error:
        raise MissingPackageError(f"Packing needs binpacking ({error}): pip install 'twinkle-core[packing]'") from error
    return binpacking


def token_count(row: Mapping[str, Any], index: int, length: int) -> int:
    """How many tokens a row takes in a pack: those that its attention mask does not leave out.

    Raises:
        StateError: the row is not encoded.
        DataError: it has no token, or more than `length`.
    """
    if row.get('input_ids') is None:
        raise StateError(f'Row {index} is not encoded (columns: {sorted(row)}): call encode() before rows are packed.')
    mask = row.get('attention_mask')
    count = len(row['input_ids']) if mask is None else sum(1 for value in mask if value)
    if not 1 <= count <= length:
        raise DataError(
            f'Encoded row {index} has {count} tokens, and a packed row takes 1 to {length}: set max_length and a truncation in the '
            'template, or filter such rows out.'
        )
    return count


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
    total = sum(lengths)
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        if key not in ('attention_mask', 'position_ids', 'length'):
            joined[key] = _joined(key, [sample.get(key) for sample in samples], lengths)
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


def _joined(key: str, values: list[Any], lengths: list[int]) -> Any:
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
    return _media(key, values)


def _media(key: str, values: list[Any]) -> Any:
    """Images and their like joined along the first dimension; anything else one entry per sample."""
    if key not in _MEDIA and not any(_is_list(value) for value in values):
        return values
    from twinkle.processor.collate import CONCATENATED

    if key not in _MEDIA and key not in CONCATENATED:
        return values
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
