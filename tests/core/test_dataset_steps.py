"""Steps of data sets: mapping, filtering, mixing and encoding, the same ahead, at access and as a stream."""

from __future__ import annotations

import copy

import datasets
import pytest

from tests.helpers.tokenizers import tiny_tokenizer
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle.errors import ConfigError, DataError, SampleTooLongError, StateError
from twinkle.template import Template

KINDS = [Dataset, LazyDataset, IterableDataset]

ROWS = [
    {
        'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}],
        'score': 0.1,
        'note': None,
    },
    {'messages': [{'role': 'assistant', 'content': 'So.', 'train': False}], 'score': -2.5, 'note': ''},
]
MIXED = [{'a': 1, 'b': [1, 'x', None, {'c': []}]}, {'a': 'one'}, {'a': None, 'b': {}, 'c': True}]


def texts(*words):
    return [{'text': word} for word in words]


@pytest.fixture
def template():
    return Template(tokenizer=tiny_tokenizer())


def grow(row):
    """Changes what it is given, deep inside, as careless functions do."""
    row['messages'][0]['content'] += '!'
    row['messages'].append({'role': 'user', 'content': 'more'})
    row['new'] = 1
    return row


@pytest.mark.parametrize('kind', [list, lambda rows: lambda: rows, iter])
@pytest.mark.parametrize('cls', KINDS)
def test_the_callers_data_is_unchanged(cls, kind):
    """CASES 26: even where a step changes its row in place, inputs compare equal, and reading twice gives the same rows."""
    rows = copy.deepcopy(ROWS)
    dataset = cls(DatasetMeta(kind(rows)))
    dataset.map(grow)
    once = list(dataset)
    if kind is not iter:
        assert once == list(dataset)
    assert once[0]['messages'][0]['content'] == 'Hi!'
    assert len(once[0]['messages']) == 3
    assert rows == ROWS


@pytest.mark.parametrize('cls', KINDS)
def test_a_filter_cannot_change_rows(cls):
    """What a filter does to its row is not seen behind it."""
    dataset = cls(DatasetMeta(copy.deepcopy(ROWS)))
    dataset.filter(grow)
    assert list(dataset) == ROWS


@pytest.mark.parametrize('cls', KINDS)
def test_steps_run_in_the_order_they_are_given(cls):
    """Each step sees what the one before it made, and a filter decides by that."""
    dataset = cls(DatasetMeta([{'n': n} for n in range(6)]))
    dataset.map(lambda row: {'n': row['n'] * 2})
    dataset.filter(lambda row: row['n'] > 4)
    dataset.map(lambda row: {'n': row['n'] + 1, 'old': row['n']})
    dataset.filter(lambda row: row['n'] != 9)
    assert list(dataset) == [{'n': 7, 'old': 6}, {'n': 11, 'old': 10}]


def test_source_names_the_source_a_step_works_on():
    """By default the one added last; mixing makes one of them; a number that is not there is an error."""
    dataset = Dataset(DatasetMeta(texts('a')))
    dataset.add_dataset(DatasetMeta(texts('b', 'c')))
    dataset.map(lambda row: {'text': row['text'] + '1'})
    dataset.map(lambda row: {'text': row['text'] + '0'}, source=0)
    dataset.filter(lambda row: row['text'] != 'c1', source=1)
    assert list(dataset) == texts('a0', 'b1')
    assert [len(dataset), dataset[1], dataset[-2]] == [2, {'text': 'b1'}, {'text': 'a0'}]
    for wrong in (2, -1):
        with pytest.raises(ConfigError, match=f'source={wrong}: there are sources 0 to 1'):
            dataset.map(grow, source=wrong)
    dataset.mix_dataset(interleave=False)
    with pytest.raises(ConfigError, match='sources 0 to 0'):
        dataset.map(grow, source=1)


def test_two_processes_give_the_same_rows(template):
    """`num_proc=2` changes nothing about rows or their order, for each step."""
    results = []
    for num_proc in (None, 2):
        dataset = Dataset(DatasetMeta([{'n': n} for n in range(150)]))
        dataset.map(lambda row: {**row, 'text': 'is' * (row['n'] % 5)}, num_proc=num_proc)
        dataset.filter(lambda row: row['text'], num_proc=num_proc)
        dataset.set_template(template)
        dataset.encode(num_proc=num_proc)
        results.append(list(dataset))
    assert results[0] == results[1]
    assert len(results[0]) == 120


def boom(row):
    """Fails at row 70."""
    return {'n': 1 // (70 - row['n'])}


@pytest.mark.parametrize('num_proc', [None, 2])
def test_errors_in_steps_name_the_row(num_proc):
    """What a preprocessor raises comes out as a DataError with row, function, cause and columns, out of other processes too."""
    dataset = Dataset(DatasetMeta([{'n': n} for n in range(100)]))
    with pytest.raises(DataError, match=r"Row 70: boom raised ZeroDivisionError: .*\(columns: \['n'\]\)"):
        dataset.map(boom, num_proc=num_proc)
    assert len(dataset) == 100


@pytest.mark.parametrize('cls', KINDS)
def test_a_preprocessor_must_return_a_row(cls):
    """None or a list is an error that names function and row and says how rows are dropped; options do not hide the name."""

    def nothing(row, at=1):
        return [row] if row['n'] == at else row

    with pytest.raises(DataError, match=r'Row 1: the preprocessor .*nothing returned list; .*filter\(\)'):
        dataset = cls(DatasetMeta([{'n': n} for n in range(3)]))
        dataset.map(nothing, at=1)
        list(dataset)
    with pytest.raises(DataError, match=r'Row 0: .*returned NoneType'):
        dataset = cls(DatasetMeta([{'n': 0}]))
        dataset.map(lambda row: None)
        list(dataset)


@pytest.mark.parametrize('cls', KINDS)
def test_errors_of_twinkle_keep_their_kind(cls):
    """A DataError of a preprocessor gets the row in front."""
    with pytest.raises(DataError, match='Row 1: AlpacaProcessor: the row has no output'):
        dataset = cls(DatasetMeta([{'instruction': 'a', 'output': 'b'}, {'instruction': 'a'}]))
        dataset.map('alpaca')
        list(dataset)


def test_a_row_that_a_step_makes_and_a_table_cannot_keep_is_named():
    """The row's own number is told, also far behind the first rows."""
    with pytest.raises(DataError, match='Row 70 holds what a table cannot keep'):
        Dataset(DatasetMeta([{'n': n} for n in range(100)])).map(lambda row: {'x': b'' if row['n'] == 70 else ''})


@pytest.mark.parametrize('cls', KINDS)
def test_a_filter_that_leaves_nothing_is_an_error(cls):
    """It says how many rows there were."""
    with pytest.raises(DataError, match='no row is left of 2'):
        dataset = cls(DatasetMeta(texts('a', 'b')))
        dataset.filter(lambda row: False)
        list(dataset)


@pytest.mark.parametrize('cls', KINDS)
def test_without_rows_nothing_can_be_done(cls):
    """Steps and mixing on a data set without a source are an error of order."""
    with pytest.raises(StateError, match=r'[Aa]dd a data set first'):
        dataset = cls()
        dataset.filter(grow)
        list(dataset)
    with pytest.raises(StateError, match='add a data set first'):
        Dataset().mix_dataset()


@pytest.mark.parametrize('cls', [LazyDataset, IterableDataset])
def test_rows_that_are_added_later_go_through_the_same_steps(cls):
    """Steps and filters count for the sources behind them too, and errors number all rows that were read."""
    dataset = cls(DatasetMeta([{'n': n} for n in range(4)]))
    dataset.map(lambda row: {'n': row['n'] + 1})
    dataset.filter(lambda row: row['n'] % 2)
    dataset.map(lambda row: {'n': 10 // (row['n'] - 7)})
    dataset.add_dataset(DatasetMeta([{'n': 4}, {'n': 5}]))
    assert [row['n'] for row in dataset] == [10 // -6, 10 // -4, 10 // -2]
    dataset.add_dataset(DatasetMeta([{'n': 6}]))
    with pytest.raises(DataError, match=r'Row 6: .*ZeroDivisionError'):
        list(dataset)


# -- mixing ------------------------------------------------------------------------------------------------------------

PARTS = [[{'n': 100 * part + n} for n in range(size)] for part, size in enumerate((7, 3, 5))]


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'stopping_strategy': 'all_exhausted'},
        {'probabilities': [0.6, 0.3, 0.1], 'seed': 3},
        {'probabilities': (0.2, 0.2, 0.6), 'seed': 4, 'stopping_strategy': 'all_exhausted'},
        {'interleave': False},
    ],
)
def test_mixing_gives_what_the_datasets_library_gives(options):
    """Rows in turn, by probabilities, or one source after the other; also where a source went through a step before."""
    tables = [datasets.Dataset.from_list(part) for part in PARTS]
    if options.get('interleave', True):
        given = {**options, 'probabilities': options.get('probabilities') and list(options['probabilities'])}
        expected = datasets.interleave_datasets(tables, **{'seed': 0, **given})
    else:
        expected = datasets.concatenate_datasets(tables)
    dataset = Dataset(DatasetMeta(PARTS[0]))
    dataset.map(lambda row: {'n': row['n']})
    dataset.add_dataset(DatasetMeta(PARTS[1]))
    dataset.add_dataset(DatasetMeta(PARTS[2]))
    dataset.mix_dataset(**options)
    assert list(dataset) == list(expected)
    assert [dataset[i] for i in range(len(dataset))] == list(expected)


def test_sources_of_different_columns_mix():
    """Each row keeps its own columns."""
    dataset = Dataset(DatasetMeta(ROWS[:2]))
    dataset.add_dataset(DatasetMeta(MIXED))
    dataset.mix_dataset(stopping_strategy='all_exhausted')
    assert [dataset[0], dataset[1], dataset[2], dataset[3]] == [ROWS[0], MIXED[0], ROWS[1], MIXED[1]]


@pytest.mark.parametrize(
    ('options', 'match'),
    [
        ({'probabilities': [1.0]}, 'one per source, and there are 2'),
        ({'probabilities': [1.5, -0.5]}, r'probabilities=\[1.5, -0.5\]'),
        ({'probabilities': [0.5, 0.6]}, 'sum to 1.1, not 1'),
        ({'probabilities': [0.5, float('nan')]}, 'probabilities'),
        ({'stopping_strategy': 'never'}, "stopping_strategy='never'"),
        ({'probabilities': [0.5, 0.5], 'interleave': False}, 'interleave'),
    ],
)
def test_mixing_options_that_cannot_work(options, match):
    """Each is named with its rule, and the sources stay as they were."""
    dataset = Dataset(DatasetMeta(PARTS[0]))
    dataset.add_dataset(DatasetMeta(PARTS[1]))
    with pytest.raises(ConfigError, match=match):
        dataset.mix_dataset(**options)
    assert list(dataset) == PARTS[0] + PARTS[1]


# -- encoding ----------------------------------------------------------------------------------------------------------


def encoded(cls, rows, **options):
    dataset = cls(DatasetMeta(rows))
    dataset.set_template('default', tokenizer=tiny_tokenizer(), **options)
    dataset.encode()
    return dataset


@pytest.mark.parametrize('cls', KINDS)
def test_a_text_trains_on_all_its_tokens(cls):
    """Each token but the first is a label, the end token included; other columns, such as rewards, survive."""
    rows = [{'text': 'Thank you!', 'reward': 0.25, 'id': 'x', 'none': None}]
    (feature,) = encoded(cls, rows)
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer('Thank you!')['input_ids'], tokenizer.eos_token_id]
    assert feature['input_ids'] == ids
    assert feature['labels'] == [*ids[1:], -100]
    assert {key: feature[key] for key in ('reward', 'id', 'none')} == {'reward': 0.25, 'id': 'x', 'none': None}
    assert 'text' not in feature


def test_every_kind_gives_the_same_features(template):
    """Ahead, at access and as a stream: the same steps give the same features, equal to the template's own."""
    rows = [row for row in ROWS[:1] * 3 if row] + [{**ROWS[0], 'score': n} for n in range(5)]
    results = []
    for cls in KINDS:
        dataset = cls(DatasetMeta(copy.deepcopy(rows)))
        dataset.map('self_cognition', name='T', author='us')
        dataset.filter('has_messages')
        dataset.set_template(template)
        dataset.encode()
        results.append(list(dataset))
    assert results[0] == results[1] == results[2]
    assert results[0] == [dict(feature) for feature in template.batch_encode(rows)]


def test_truncation_changes_the_number_of_rows():
    """`delete` drops long rows, `split` makes several of one; extra columns go with each part. Streams do the same."""
    rows = [{'text': 'model ' * 20, 'id': 0}, {'text': 'Hi', 'id': 1}]
    assert [row['id'] for row in encoded(Dataset, rows, max_length=8, truncation='delete')] == [1]
    whole = encoded(Dataset, rows)
    parts = encoded(Dataset, rows, max_length=7, truncation='split')
    assert len(parts) > 3
    assert [i for row in parts for i in row['input_ids']] == whole[0]['input_ids'] + whole[1]['input_ids']
    assert [row['id'] for row in parts] == [0] * (len(parts) - 1) + [1]
    for truncation in ('delete', 'split', 'left'):
        options = {'max_length': 8, 'truncation': truncation}
        assert list(encoded(IterableDataset, rows, **options)) == list(encoded(Dataset, rows, **options))


@pytest.mark.parametrize('truncation', ['delete', 'split'])
def test_a_lazy_data_set_refuses_what_changes_the_number_of_rows(truncation):
    """It tells the row and the ways out; rows that fit are given."""
    dataset = encoded(LazyDataset, texts('Hi', 'model ' * 20), max_length=8, truncation=truncation)
    assert dataset[0]['labels'][-1] == -100
    with pytest.raises(DataError, match=r"Row 1 became .*'left'"):
        dataset[1]


def test_deleting_all_rows_is_an_error():
    """A data set of which nothing is left says so when it is encoded."""
    with pytest.raises(DataError, match='no row is left of 1'):
        encoded(Dataset, texts('model ' * 20), max_length=8, truncation='delete')


@pytest.mark.parametrize('cls', KINDS)
def test_errors_of_encoding_name_the_row(cls):
    """A row without messages and text, one that is too long, and one in which the assistant says nothing."""
    with pytest.raises(DataError, match=r"Row 1 has neither messages nor text \(columns: \['prompt'\]\).*map"):
        list(encoded(cls, [{'text': 'a b'}, {'prompt': 'x'}]))
    with pytest.raises(SampleTooLongError, match=r'Row 1: The row has .* tokens, more than max_length=8'):
        list(encoded(cls, texts('Hi', 'model ' * 20), max_length=8))
    with pytest.raises(DataError, match=r'Row 0: .*no assistant turn'):
        list(encoded(cls, [{'messages': [{'role': 'user', 'content': 'x'}]}]))


@pytest.mark.parametrize('cls', KINDS)
def test_encode_needs_a_template(cls):
    """The error says which call is missing."""
    dataset = cls(DatasetMeta(texts('a')))
    with pytest.raises(StateError, match=r'set_template'):
        dataset.encode()


def test_encoding_joins_sources():
    """Sources that were not mixed follow one another; encoded rows can be filtered and mapped further."""
    dataset = Dataset(DatasetMeta(texts('Hi', 'model ' * 9)))
    dataset.add_dataset(DatasetMeta([{'text': 'you', 'reward': 1.0}]))
    dataset.set_template('default', tokenizer=tiny_tokenizer())
    dataset.encode()
    dataset.filter(lambda row: row['length'] < 9)
    dataset.map(lambda row: {**row, 'reward': row.get('reward', 0.0)})
    assert [row['reward'] for row in dataset] == [0.0, 1.0]


def test_encoded_rows_pass_through_encode_again(template):
    """Features, such as rows that were tokenized elsewhere, are taken as they are."""
    rows = [{'input_ids': [1, 2, 3], 'labels': [2, 3, -100]}]
    for cls in KINDS:
        (feature,) = encoded(cls, rows)
        assert {key: feature[key] for key in rows[0]} == rows[0]


def test_lazy_data_sets_share_objects_and_read_rows_when_asked():
    """An image is not copied, and no row is worked on before it is read."""
    image, seen = object(), []
    dataset = LazyDataset(DatasetMeta([{'image': image}, {'image': None}]))
    dataset.map(lambda row: seen.append(row) or row)
    assert not seen
    assert dataset[0]['image'] is image
    assert len(seen) == 1


def test_bars_of_the_datasets_library_are_left_as_they_were():
    """Mapping does not switch another program's progress bars on or off."""
    for switch in (datasets.disable_progress_bars, datasets.enable_progress_bars):
        switch()
        before = datasets.are_progress_bars_disabled()
        Dataset(DatasetMeta(texts('a'))).map(lambda row: row)
        assert datasets.are_progress_bars_disabled() is before
