"""`DatasetMeta`: where rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle.errors import ConfigError

__all__ = ['DatasetMeta']


@dataclass(frozen=True)
class DatasetMeta:
    """One source of rows.

    Attributes:
        dataset_id: a file (jsonl, json, csv, parquet), a folder of such files or one written by `save_to_disk`, an address
            (`hf://org/name`, `ms://org/name`, `org/name`), a list of rows, a generator or a function that returns one, or an object
            of the `datasets` library.
        subset_name, split: which part of a data set from a hub.
        data_slice: which rows: a slice, a range, or indices.
        revision: of a data set from a hub.

    Raises:
        ConfigError: no `dataset_id`, or a `data_slice` of another type.
    """

    dataset_id: str | Path | Sequence[Any] | Iterable[Any] | Callable[[], Iterable[Any]] | Any
    subset_name: str | None = None
    split: str = 'train'
    data_slice: slice | range | Sequence[int] | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.dataset_id is None or (isinstance(self.dataset_id, str) and not self.dataset_id):
            raise ConfigError(
                'DatasetMeta needs a dataset_id: a file, a folder, an address, rows, or a function that makes them.'
            )
        where = self.data_slice
        parts = [where.start, where.stop, where.step] if isinstance(where, slice) else where
        parts = () if isinstance(where, range) else parts
        if where is not None and (
            isinstance(where, (str, bytes))
            or not isinstance(parts, Sequence)
            or not all(_is_integer(part) or (part is None and isinstance(where, slice)) for part in parts)
        ):
            raise ConfigError(f'data_slice={where!r} must be a slice, a range or a list of indices.')
        if isinstance(where, slice) and where.step == 0:
            raise ConfigError(f'data_slice={where!r} has a step of 0.')

    @property
    def name(self) -> str:
        """A short name for messages."""
        return (
            str(self.dataset_id) if isinstance(self.dataset_id, (str, Path)) else f'<{type(self.dataset_id).__name__}>'
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
