"""Sources of data sets: every kind, rows as they were given, slices, and errors that name the place."""

from __future__ import annotations

import copy
import csv
import json
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import pytest

import twinkle
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle.errors import ConfigError, DataError, SourceError
from twinkle.hub import Source

KINDS = [Dataset, LazyDataset, IterableDataset]

CALL = {'type': 'function', 'function': {'name': 'weather', 'arguments': {'city': 'Paris', 'days': 2}}}
ROWS = [
    {
        'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}],
        'score': 0.1,
        'note': None,
    },
    {
        'messages': [
            {'role': 'user', 'content': 'Wetter in Köln? 🌦\u2028 "ja"\n'},
            {'role': 'assistant', 'content': '', 'tool_calls': [CALL]},
            {'role': 'tool', 'content': '{"t": 1e-3}', 'name': 'weather'},
            {'role': 'assistant', 'content': '日本'},
        ],
        'score': 1e300,
        'note': 'x',
    },
    {'messages': [{'role': 'assistant', 'content': 'So.', 'train': False, 'weight': 0.3}], 'score': -2.5, 'note': ''},
]
MIXED = [
    {'a': 1, 'b': [1, 'x', None, 2.5, {'c': []}]},
    {'a': 'one'},
    {'a': None, 'b': {}, 'c': True},
    {'a': [], 'd': 2**60},
]
FLAT = [
    {'text': 'a,b "c"', 'n': 1, 'x': 0.1},
    {'text': 'über\nzwei Zeilen', 'n': 2, 'x': 2.0},
    {'text': '', 'n': -3, 'x': 1e-9},
]


def texts(*words):
    return [{'text': word} for word in words]


def write_jsonl(path, rows):
    path.write_text(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows), encoding='utf-8')
    return path


def write_csv(path, rows):
    with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def file_source(kind, folder, rows):
    """`rows` as a file of that kind."""
    path = folder / f'rows.{kind}'
    if kind == 'jsonl':
        return write_jsonl(path, rows)
    if kind == 'json':
        path.write_text(json.dumps(rows), encoding='utf-8')
    elif kind == 'csv':
        write_csv(path, rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def source(kind, folder, rows):
    """`rows` as a source of that kind."""
    if kind in ('jsonl', 'json', 'csv', 'parquet'):
        return file_source(kind, folder, rows)
    if kind == 'folder':
        (folder / 'deep').mkdir()
        write_jsonl(folder / 'a.jsonl', rows[:1])
        file_source('json', folder / 'deep', rows[1:])
        (folder / 'readme.md').write_text('not data')
        return folder
    if kind in EXACT:
        return {'list': rows, 'tuple': tuple(rows), 'function': lambda: (r for r in rows), 'iterator': iter(rows)}[kind]
    table = datasets.Dataset.from_list(rows)
    if kind == 'saved':
        table.save_to_disk(str(folder / 'saved'))
        return str(folder / 'saved')
    return table if kind == 'table' else table.to_iterable_dataset()


EXACT = ['jsonl', 'json', 'folder', 'list', 'tuple', 'function', 'iterator']
ARROW = ['parquet', 'saved', 'table', 'stream']


@pytest.fixture(autouse=True)
def _no_cache(tmp_path, monkeypatch):
    """What the datasets library caches goes away with the test."""
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'hf_cache')


# -- sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', EXACT + ARROW)
@pytest.mark.parametrize('cls', KINDS)
def test_rows_come_back_exactly_as_given(cls, kind, tmp_path):
    """Messages with and without tool calls, unicode, floats, top-level None: no key comes, goes or changes, from any source."""
    (tmp_path / 'data').mkdir()
    before = copy.deepcopy(ROWS)
    dataset = cls(DatasetMeta(source(kind, tmp_path / 'data', ROWS)))
    assert list(dataset) == ROWS == before
    if cls is not IterableDataset:
        assert len(dataset) == 3
        assert [dataset[-1], dataset[0]] == [ROWS[2], ROWS[0]]
        with pytest.raises(IndexError):
            dataset[3]


@pytest.mark.parametrize('kind', EXACT)
@pytest.mark.parametrize('cls', KINDS)
def test_rows_of_mixed_shapes_and_types_come_back(cls, kind, tmp_path):
    """A column may hold a number here, a list there and nothing elsewhere."""
    (tmp_path / 'data').mkdir()
    assert list(cls(DatasetMeta(source(kind, tmp_path / 'data', MIXED)))) == MIXED


@pytest.mark.parametrize('cls', KINDS)
def test_csv_keeps_numbers_quotes_and_line_breaks(cls, tmp_path):
    """Numbers are numbers; a quoted text may hold commas, quotes and line breaks."""
    assert list(cls(DatasetMeta(write_csv(tmp_path / 'x.csv', FLAT)))) == FLAT


def test_csv_keeps_dates_as_text(tmp_path):
    """What looks like a date stays the text that is in the file."""
    rows = [{'text': '2024-01-02', 'at': '2024-01-02 10:00:00', 'clock': '10:30'}]
    assert list(Dataset(DatasetMeta(write_csv(tmp_path / 'x.csv', rows)))) == rows


def test_jsonl_may_have_blank_lines_and_a_byte_order_mark(tmp_path):
    """Blank lines are no rows; a mark at the start, as Windows editors write it, is no part of the first row; nor are CRs."""
    path = tmp_path / 'x.jsonl'
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert list(Dataset(DatasetMeta(path))) == texts('a', 'b')


def test_half_a_surrogate_pair_survives():
    """Broken escapes, as scraped data have them, are kept rather than crash the table."""
    rows = [{'text': '\ud83d half'}, {'text': '😀'}]
    assert list(Dataset(DatasetMeta(rows))) == rows


def test_numbers_of_numpy_become_plain_ones():
    """Arrays and scalars come back as lists and numbers."""
    row = {'ids': np.arange(3), 'score': np.float64(0.1), 'flag': np.bool_(True), 'pair': (1, 2)}
    assert Dataset(DatasetMeta([row]))[0] == {'ids': [0, 1, 2], 'score': 0.1, 'flag': True, 'pair': [1, 2]}


@pytest.mark.parametrize('value', [object(), {1: 'x'}, [{'a': {2: 3}}], b'raw', {1, 2}])
def test_what_a_table_cannot_keep_is_refused_with_the_row(value):
    """An object, bytes or a key that is no text is an error that names row and columns and points to LazyDataset, which takes it."""
    rows = [{'text': 'a'}, {'image': value}]
    with pytest.raises(DataError, match=r"Row 1 .*'image'.*LazyDataset"):
        Dataset(DatasetMeta(rows))
    assert LazyDataset(DatasetMeta(rows))[1] == {'image': value}


def test_a_split_of_a_saved_dictionary_is_chosen(tmp_path):
    """`split` picks one of several saved together; another name is an error that lists them."""
    both = datasets.DatasetDict(
        {'train': datasets.Dataset.from_list(texts('a')), 'test': datasets.Dataset.from_list(texts('b', 'c'))}
    )
    both.save_to_disk(str(tmp_path / 'both'))
    assert list(Dataset(DatasetMeta(tmp_path / 'both'))) == texts('a')
    assert list(Dataset(DatasetMeta(tmp_path / 'both', split='test'))) == texts('b', 'c')
    with pytest.raises(DataError, match="no split 'dev'; there are test, train"):
        Dataset(DatasetMeta(tmp_path / 'both', split='dev'))


@pytest.mark.parametrize('layout', ['file', 'saved', 'folder'])
def test_what_a_source_fetches_may_be_a_file_a_saved_table_or_a_repository(layout, tmp_path):
    """A source of any scheme brings a file, a saved table, or a folder as hubs hold it."""
    (tmp_path / 'data').mkdir()
    kind = {'file': 'jsonl', 'saved': 'saved', 'folder': 'parquet'}[layout]
    path = Path(source(kind, tmp_path / 'data', ROWS))

    class Shelf(Source):
        """Brings one thing."""

        def fetch(self, rest, **options):
            return path.parent if layout == 'folder' else path

    with twinkle.sources.temporary('shelf', Shelf):
        assert list(Dataset(DatasetMeta('shelf://org/rows'))) == ROWS


SLICES = [
    (slice(2), [0, 1]),
    (slice(1, None), [1, 2, 3, 4]),
    (slice(0, 5, 2), [0, 2, 4]),
    (slice(3, 100), [3, 4]),
    (slice(-2, None), [3, 4]),
    (slice(None, -3), [0, 1]),
    (slice(None, None, -1), [4, 3, 2, 1, 0]),
    (range(3), [0, 1, 2]),
    (range(4, 0, -2), [4, 2]),
    ([3, 0, 3, -1], [3, 0, 3, 4]),
    ((1,), [1]),
]


@pytest.mark.parametrize(('where', 'expected'), SLICES)
@pytest.mark.parametrize('cls', KINDS)
def test_data_slice_chooses_rows_as_a_list_would(cls, where, expected):
    """Slices (negative ones too), ranges and indices choose the rows that a list would give, in that order."""
    dataset = cls(DatasetMeta(({'n': n} for n in range(5)), data_slice=where))
    assert [row['n'] for row in dataset] == expected


def test_a_slice_reads_no_further_than_it_must():
    """The first rows of an endless source can be had."""

    def endless():
        n = 0
        while True:
            yield {'n': n}
            n += 1

    assert len(Dataset(DatasetMeta(endless, data_slice=slice(3)))) == 3


@pytest.mark.parametrize('where', [[5], [-6], range(4, 7), [0, 99]])
def test_data_slice_out_of_range_is_an_error(where):
    """An index that is not there is named, with how many rows there are."""
    with pytest.raises(DataError, match=r'data_slice asks for row .* there are 5'):
        Dataset(DatasetMeta([{'n': n} for n in range(5)], data_slice=where))


@pytest.mark.parametrize('where', ['0:3', 3, {1}, [0.5], ['a'], [True], slice(0, 3, 0), slice('a')])
def test_a_data_slice_of_another_type_is_refused_at_once(where):
    """What chooses no rows is refused before anything is read."""
    with pytest.raises(ConfigError, match='data_slice='):
        DatasetMeta(texts('a'), data_slice=where)


# -- errors of sources -------------------------------------------------------------------------------------------------


@contextmanager
def refused(cls, error, match):
    """An error while a data set is made or, for a stream, read."""
    with pytest.raises(error, match=match):
        yield lambda given, **options: list(cls(DatasetMeta(given, **options)))


@pytest.mark.parametrize('cls', KINDS)
def test_unreadable_sources_name_file_and_line(cls, tmp_path):
    """No file, bad JSON, no UTF-8, a row that is no dictionary, no rows: each names the place and the rule."""
    with refused(cls, SourceError, 'missing.jsonl.*no such file or folder') as read:
        read(tmp_path / 'missing.jsonl')
    path = tmp_path / 'x.jsonl'
    path.write_text('{"text": "a"}\n\n{"text": }\n')
    with refused(cls, DataError, 'x.jsonl, line 3: not JSON .*column 10') as read:
        read(path)
    path.write_text('{"text": "a"}\n[1]\n')
    with refused(cls, DataError, 'x.jsonl, line 2: a row is a dictionary.*list') as read:
        read(path)
    with refused(cls, DataError, 'x.jsonl, line 2: a row is a dictionary.*list') as read:
        read(tmp_path)
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with refused(cls, DataError, 'x.jsonl, line 2: not UTF-8') as read:
        read(path)
    path.write_text('\n')
    with refused(cls, DataError, 'x.jsonl: the data set is empty') as read:
        read(path)


@pytest.mark.parametrize('cls', KINDS)
def test_other_broken_files_are_named(cls, tmp_path):
    """JSON that is no list of rows, csv and parquet that are none, and other types of files."""
    path = tmp_path / 'x.json'
    for text, match in [
        ('[{"a": 1},\n{"b" 2}]', 'x.json, line 2: not JSON .*jsonl'),
        ('{"a": 1}', 'must hold a list of rows'),
        ('[{"a": 1}, 2]', 'x.json: row 1: a row is a dictionary.*int'),
        ('[]', 'empty'),
    ]:
        path.write_text(text)
        with refused(cls, DataError, match) as read:
            read(path)
    for name, data in [('x.parquet', b'nothing'), ('x.csv', b''), ('y.csv', b'a,b\n1,2\n3\n')]:
        (tmp_path / name).write_bytes(data)
        with refused(cls, DataError, f'{name}: cannot be read as') as read:
            read(tmp_path / name)
    (tmp_path / 'x.txt').write_text('a')
    with refused(cls, DataError, "'.txt' are not read; use .jsonl") as read:
        read(tmp_path / 'x.txt')
    (tmp_path / 'none').mkdir()
    with refused(cls, DataError, 'the folder holds no .jsonl') as read:
        read(tmp_path / 'none')


@pytest.mark.parametrize('cls', KINDS)
def test_rows_that_are_none_are_refused_by_index(cls):
    """An empty list, a row of another type, and what gives no rows at all."""
    for given, match in [
        ([], 'empty'),
        ([{'a': 1}, 'b'], 'row 1: a row is a dictionary.*str'),
        (3, 'dataset_id is int: pass'),
        ({'text': ['a', 'b']}, 'dataset_id is dict: pass'),
        (lambda: None, 'dataset_id is function: pass'),
    ]:
        with refused(cls, DataError, match) as read:
            read(given)
    with refused(cls, DataError, 'empty') as read:
        read(texts('a'), data_slice=slice(5, None))


@pytest.mark.parametrize('cls', KINDS)
def test_a_data_set_takes_a_meta(cls):
    """A bare path or list is refused, with what to write; an empty id, too."""
    with pytest.raises(ConfigError, match='DatasetMeta'):
        cls(texts('a'))
    for nothing in (None, ''):
        with pytest.raises(ConfigError, match='needs a dataset_id'):
            DatasetMeta(nothing)


def test_an_iterator_that_is_used_up_is_an_error():
    """A stream over an iterator gives one epoch; a second is refused with the way out, a function gives it."""
    dataset = IterableDataset(DatasetMeta(iter(texts('a', 'b'))))
    assert list(dataset) == texts('a', 'b')
    with pytest.raises(DataError, match=r'read only once.*function'):
        list(dataset)
    again = IterableDataset(DatasetMeta(lambda: iter(texts('a'))))
    assert list(again) == list(again) == texts('a')


def test_nothing_is_left_in_a_cache(tmp_path):
    """Reading and mapping write no file."""
    dataset = Dataset(DatasetMeta(file_source('parquet', tmp_path, ROWS)))
    dataset.map(lambda row: row)
    assert [path.name for path in tmp_path.rglob('*') if path.is_file()] == ['rows.parquet']
