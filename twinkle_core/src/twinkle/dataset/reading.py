"""Rows out of files, folders, hubs and objects, one at a time and as they are.

Arrow fills the keys that a nested value lacks with None (a message without `tool_calls` beside one with them). Rows of JSON are
therefore read as JSON; of what comes from Arrow, nested Nones are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.errors import DataError

if TYPE_CHECKING:
    from twinkle.dataset.meta import DatasetMeta

__all__ = ['drop_nested_none', 'read_rows']

_SUFFIXES = ('.jsonl', '.json', '.csv', '.parquet')


def read_rows(meta: DatasetMeta) -> Iterator[dict[str, Any]]:
    """The rows of `meta`, `data_slice` applied. Nothing that was passed in is changed.

    Raises:
        DataError: unreadable data, with file and line; a row that is no dictionary, with its index.
        SourceError: no such file, folder or address.
    """
    rows = _checked(_source(meta), meta.name)
    where = meta.data_slice
    if where is None:
        yield from rows
    elif isinstance(where, slice) and all(v is None or v >= 0 for v in (where.start, where.stop, where.step)):
        yield from islice(rows, where.start, where.stop, where.step)
    else:
        everything = list(rows)
        indices = range(len(everything))[where] if isinstance(where, slice) else where
        for index in indices:
            if not -len(everything) <= index < len(everything):
                raise DataError(f'{meta.name}: data_slice asks for row {index}, and there are {len(everything)}.')
            yield everything[index]


def drop_nested_none(value: Any, *, top: bool = True) -> Any:
    """`value` without the Nones that Arrow put into nested dictionaries. Top-level columns keep theirs."""
    if isinstance(value, Mapping):
        return {k: drop_nested_none(v, top=False) for k, v in value.items() if top or v is not None}
    if isinstance(value, list) and value and isinstance(value[0], (Mapping, list)):
        return [drop_nested_none(v, top=False) for v in value]
    return value


def _source(meta: DatasetMeta) -> Iterable[Any]:
    given: Any = meta.dataset_id
    if isinstance(given, (str, Path)):
        return _from_path(meta)
    if hasattr(given, 'features') and hasattr(given, 'map'):  # an object of the datasets library
        return (drop_nested_none(row) for row in given)
    if callable(given):
        given = given()
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise DataError(
            f'dataset_id is {type(meta.dataset_id).__name__}: pass a path, rows, or a function that returns rows.'
        )
    return given


def _from_path(meta: DatasetMeta) -> Iterable[Any]:
    from twinkle.hub import resolve_dataset

    local = Path(str(meta.dataset_id)).expanduser()
    if not local.exists():
        fetched = resolve_dataset(str(meta.dataset_id), revision=meta.revision)
        return _from_arrow(_load_dataset(fetched, meta))
    if local.is_file():
        return _from_file(local)
    if (local / 'dataset_info.json').is_file() or (local / 'dataset_dict.json').is_file():
        import datasets

        loaded = datasets.load_from_disk(str(local))
        return _from_arrow(loaded[meta.split] if isinstance(loaded, datasets.DatasetDict) else loaded)
    files = sorted(path for path in local.rglob('*') if path.suffix in _SUFFIXES)
    if not files:
        raise DataError(f'{local}: the folder holds no {", ".join(_SUFFIXES)} file.')
    return (row for path in files for row in _from_file(path))


def _load_dataset(folder: str, meta: DatasetMeta) -> Any:
    """A data set of a hub, by its own configuration; `datasets` runs no code from it."""
    import datasets

    try:
        return datasets.load_dataset(folder, name=meta.subset_name, split=meta.split)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise DataError(f'{meta.name}: {error}') from error


def _from_file(path: Path) -> Iterable[Any]:
    if path.suffix == '.jsonl':
        return _from_jsonl(path)
    if path.suffix == '.json':
        return _from_json(path)
    if path.suffix in ('.csv', '.parquet'):
        return _from_arrow(_read_table(path))
    raise DataError(f'{path}: files of type {path.suffix or "(none)"!r} are not read; use {", ".join(_SUFFIXES)}.')


def _read_table(path: Path) -> Any:
    """An Arrow table of a csv or parquet file, read directly: no copy is left in a cache."""
    import pyarrow

    try:
        if path.suffix == '.csv':
            from pyarrow import csv

            return csv.read_csv(str(path))
        from pyarrow import parquet

        return parquet.read_table(str(path), memory_map=True)
    except pyarrow.ArrowException as error:
        raise DataError(f'{path}: cannot be read as {path.suffix}: {error}') from error


def _from_arrow(table: Any) -> Iterator[Any]:
    batches = (
        (batch.to_pylist() for batch in table.to_batches())
        if hasattr(table, 'to_batches')
        else ([row] for row in table)
    )
    for batch in batches:
        for row in batch:
            yield drop_nested_none(row)


def _from_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding='utf-8') as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f'{path}, line {number}: not JSON ({error.msg}, column {error.colno}).') from error


def _from_json(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding='utf-8'))
    except json.JSONDecodeError as error:
        raise DataError(
            f'{path}, line {error.lineno}: not JSON ({error.msg}). For one row per line name it .jsonl.'
        ) from error
    if not isinstance(rows, list):
        raise DataError(f'{path}: holds {type(rows).__name__}; a .json file must hold a list of rows.')
    return rows


def _checked(rows: Iterable[Any], name: str) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f'{name}: row {index} is {type(row).__name__}; a row is a dictionary, such as {{"messages": [...]}}.'
            )
        yield dict(row)
