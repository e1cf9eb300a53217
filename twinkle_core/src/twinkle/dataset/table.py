"""Rows kept exactly as they are, in a table of the `datasets` library: one JSON text per row.

Arrow's own nested columns would merge the shapes of all rows (missing keys come back as None, mixed types fail). As text, a row comes
back as it was given, and `datasets` does what it is good at: memory mapping, mapping in many processes, mixing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from twinkle.errors import DataError

if TYPE_CHECKING:
    import datasets

__all__ = ['iterate', 'make_table', 'map_table', 'unpack_row']

_COLUMN = 'row'

Step = Callable[[dict[str, Any], int], list[dict[str, Any]]]


def make_table(rows: Iterable[dict[str, Any]]) -> datasets.Dataset:
    """A table of rows, in memory."""
    import datasets

    return datasets.Dataset.from_dict(
        {_COLUMN: [_pack(row, index) for index, row in enumerate(rows)]}, features=_features()
    )


def unpack_row(record: dict[str, Any]) -> dict[str, Any]:
    """The row in a record of the table."""
    row: dict[str, Any] = json.loads(record[_COLUMN])
    return row


def map_table(table: datasets.Dataset, step: Step, *, desc: str, num_proc: int | None = None) -> datasets.Dataset:
    """Every row through `step`, which gives none, one or several rows. With a progress bar; nothing is left in a cache."""
    import os
    import uuid

    import datasets

    from twinkle.logging import rank_zero

    def batch(records: dict[str, list[str]], indices: list[int]) -> dict[str, list[str]]:
        made = (
            (new, index)
            for text, index in zip(records[_COLUMN], indices, strict=True)
            for new in step(json.loads(text), index)
        )
        return {_COLUMN: [_pack(row, index) for row, index in made]}

    shown = datasets.are_progress_bars_disabled()
    if not rank_zero() or os.environ.get('TWINKLE_PROGRESS', '1') == '0':
        datasets.disable_progress_bars()
    try:
        return table.map(
            batch,
            batched=True,
            batch_size=64,
            with_indices=True,
            num_proc=num_proc,
            keep_in_memory=not table.cache_files,
            load_from_cache_file=False,
            features=_features(),
            # Functions need no stable hash when nothing is read back from a cache.
            new_fingerprint=uuid.uuid4().hex,
            desc=desc,
        )
    finally:
        if not shown:
            datasets.enable_progress_bars()


def iterate(table: Any) -> Iterator[dict[str, Any]]:
    """The rows of a table."""
    return (unpack_row(record) for record in table)


def _features() -> datasets.Features:
    """The same for all tables, so that they can be mixed; large, so that no table is too big."""
    import datasets

    return datasets.Features({_COLUMN: datasets.Value('large_string')})


def _pack(row: dict[str, Any], index: int) -> str:
    try:
        _check_keys(row)
        text = json.dumps(row, ensure_ascii=False, default=_plain)
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which a table takes only as an escape
            text = json.dumps(row, default=_plain)
        return text
    except (TypeError, ValueError) as error:
        kinds = {key: type(value).__name__ for key, value in row.items()}
        raise DataError(
            f'Row {index} holds what a table cannot keep ({error}): {kinds}. Keep paths or plain numbers and texts in rows, or use '
            'LazyDataset, which keeps objects as they are.'
        ) from error


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy and PyTorch as plain ones."""
    if hasattr(value, 'tolist') and callable(value.tolist):
        return value.tolist()
    raise TypeError(f'{type(value).__name__} is neither text, number, list nor dictionary')


def _check_keys(value: Any) -> None:
    """Refuse keys that JSON would turn into text in silence."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f'the key {key!r} is {type(key).__name__}, not text')
            _check_keys(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            if isinstance(part, (dict, list, tuple)):
                _check_keys(part)
