"""Which samples go together into rows of a fixed length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from twinkle.errors import ConfigError, DataError, MissingPackageError, StateError

__all__ = ['Packing', 'token_count']

T = TypeVar('T')


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
