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
    if isinstance(value, list) and any(isinstance(v, (Mapping, list)) for v in value):
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
    fetched = not local.exists()
    if fetched:
        local = Path(resolve_dataset(str(meta.dataset_id), revision=meta.revision))
    if local.is_file():
        return _from_file(local)
    if (local / 'dataset_info.json').is_file() or (local / 'dataset_dict.json').is_file():
        return _from_arrow(_load_from_disk(local, meta))
    if fetched:
        return _from_arrow(_load_dataset(str(local), meta))
    files = sorted(path for path in local.rglob('*') if path.suffix in _SUFFIXES)
    if not files:
        raise DataError(f'{local}: the folder holds no {", ".join(_SUFFIXES)} file.')
    return (row for path in files for row in _from_file(path))


def _load_from_disk(folder: Path, meta: DatasetMeta) -> Any:
    """What `save_to_disk` of the datasets library wrote."""
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if meta.split not in loaded:
        raise DataError(f'{folder}: there is no split {meta.split!r}; there are {", ".join(sorted(loaded))}.')
    return loaded[meta.split]


def _load_dataset(folder: str, meta: DatasetMeta) -> Any:
    """A data set of a hub, by its own configuration; `datasets` runs no code from it."""
    import datasets

    try:
        return datasets.load_dataset(folder, name=meta.subset_name, split=meta.split)
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f'{meta.name}: {error}') from error


def _from_file(path: Path) -> Iterable[Any]:
    if path.suffix == '.jsonl':
        return _from_jsonl(path)
    if path.suffix == '.json':
        return _checked(_from_json(path), str(path))
    if path.suffix in ('.csv', '.parquet'):
        return _from_arrow(_read_table(path))
    raise DataError(f'{path}: files of type {path.suffix or "(none)"!r} are not read; use {", ".join(_SUFFIXES)}.')


def _read_table(path: Path) -> Any:
    """An Arrow table of a csv or parquet file, read directly: no copy is left in a cache."""
    import pyarrow

    try:
        if path.suffix == '.csv':
            return _read_csv(path)
        from pyarrow import parquet

        return parquet.read_table(str(path), memory_map=True)
    except pyarrow.ArrowException as error:
        raise DataError(f'{path}: cannot be read as {path.suffix}: {error}') from error


def _read_csv(path: Path) -> Any:
    """Numbers become numbers; what looks like a date stays the text that it is. Texts may go over several lines."""
    import pyarrow
    from pyarrow import csv

    parse = csv.ParseOptions(newlines_in_values=True)
    table = csv.read_csv(str(path), parse_options=parse)
    dates = {field.name: pyarrow.string() for field in table.schema if pyarrow.types.is_temporal(field.type)}
    if not dates:
        return table
    return csv.read_csv(str(path), parse_options=parse, convert_options=csv.ConvertOptions(column_types=dates))


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
    with path.open('rb') as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = _parse(line, f'{path}, line {number}')
                if not isinstance(row, Mapping):
                    raise DataError(f'{path}, line {number}: {_no_row(row)}')
                yield row


def _from_json(path: Path) -> list[Any]:
    rows = _parse(path.read_bytes(), str(path), ' For one row per line name it .jsonl.')
    if not isinstance(rows, list):
        raise DataError(f'{path}: holds {type(rows).__name__}; a .json file must hold a list of rows.')
    return rows


def _parse(data: bytes, where: str, hint: str = '') -> Any:
    """JSON out of UTF-8, with or without a byte-order mark."""
    try:
        return json.loads(data.decode('utf-8-sig'))
    except UnicodeDecodeError as error:
        raise DataError(
            f'{where}: not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8.'
        ) from error
    except json.JSONDecodeError as error:
        line = f', line {error.lineno}' if error.lineno > 1 or hint else ''
        raise DataError(f'{where}{line}: not JSON ({error.msg}, column {error.colno}).{hint}') from error


def _checked(rows: Iterable[Any], name: str) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f'{name}: row {index}: {_no_row(row)}')
        yield dict(row)


def _no_row(row: Any) -> str:
    return f'a row is a dictionary, such as {{"messages": [...]}}, and this is {type(row).__name__}.'
