"""Preprocessors and filters, by themselves and by every way to name them."""

from __future__ import annotations

import copy
from functools import partial

import pytest

import twinkle
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.errors import ConfigError, DataError, InvalidPartError, UnknownNameError
from twinkle.preprocessor import AlpacaProcessor, Filter, HasMessagesFilter, Preprocessor, SelfCognitionProcessor

ALPACA = {'instruction': 'Add.', 'input': '1 + 1', 'output': '2', 'system': 'Be brief.', 'reward': 0.5}


class Shout(Preprocessor):
    """Puts marks behind texts."""

    def __init__(self, marks='!', times=1):
        self.end = marks * times

    def __call__(self, row):
        return {**row, 'text': row['text'] + self.end}


class Longer(Filter):
    """Keeps texts longer than a bound."""

    def __init__(self, than=1):
        self.than = than

    def __call__(self, row):
        return len(row['text']) > self.than


def shout(row, marks='!'):
    """Puts marks behind texts."""
    return {**row, 'text': row['text'] + marks}


def long(row, than=1):
    """Keeps texts longer than a bound."""
    return len(row['text']) > than


def rows(*texts):
    return Dataset(DatasetMeta([{'text': text} for text in texts]))


def texts(dataset):
    return [row['text'] for row in dataset]


def test_alpaca_becomes_messages_and_other_columns_stay():
    """Instruction and input are one user message; system comes first; what else a row has stays; the row is unchanged."""
    row = copy.deepcopy(ALPACA)
    assert AlpacaProcessor()(row) == {
        'messages': [
            {'role': 'system', 'content': 'Be brief.'},
            {'role': 'user', 'content': 'Add.\n1 + 1'},
            {'role': 'assistant', 'content': '2'},
        ],
        'reward': 0.5,
    }
    assert row == ALPACA


@pytest.mark.parametrize('extra', [{}, {'input': ''}, {'input': None}, {'system': None}])
def test_alpaca_without_input_and_system(extra):
    """A missing, empty or null input or system leaves no trace."""
    made = AlpacaProcessor()({'instruction': 'Hi', 'output': 'Ho', **extra})
    assert made == {'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}]}


@pytest.mark.parametrize('row', [{'instruction': 'Hi'}, {'output': 'Ho'}, {'instruction': '', 'output': 'Ho'}])
def test_alpaca_names_what_is_missing(row):
    """A row without instruction or output is an error that names the column and what there is."""
    missing = 'instruction' if not row.get('instruction') else 'output'
    with pytest.raises(DataError, match=f'no {missing} .*columns'):
        AlpacaProcessor()(row)


@pytest.mark.parametrize('column', ['instruction', 'input', 'output', 'system'])
def test_alpaca_takes_texts_only(column):
    """A number where a text must be (a csv column of numbers, say) is named, not joined or trained on."""
    with pytest.raises(DataError, match=rf'{column} is int.*text'):
        AlpacaProcessor()({**ALPACA, column: 42})


def test_self_cognition_fills_in_names_in_messages():
    """Both placeholders are replaced wherever they stand; contents that are no text stay; the row is unchanged."""
    parts = [{'type': 'text', 'text': 'x'}]
    row = {
        'messages': [
            {'role': 'user', 'content': 'Who is {{NAME}} of {{AUTHOR}}?'},
            {'role': 'assistant', 'content': '{{NAME}}, {{NAME}}.', 'train': True},
            {'role': 'user', 'content': parts},
            {'role': 'assistant', 'content': None, 'tool_calls': []},
        ],
        'id': 7,
    }
    before = copy.deepcopy(row)
    made = SelfCognitionProcessor('Twinkle', author='us')(row)
    assert [message['content'] for message in made['messages']] == [
        'Who is Twinkle of us?',
        'Twinkle, Twinkle.',
        parts,
        None,
    ]
    assert made['messages'][1]['train'] is True
    assert made['id'] == 7
    assert row == before


def test_self_cognition_makes_messages_of_query_and_response():
    """Query and response become a user and an assistant message."""
    made = SelfCognitionProcessor('T', 'us')({'query': 'Who?', 'response': 'I am {{NAME}}.', 'tag': 'en'})
    assert made == {
        'messages': [{'role': 'user', 'content': 'Who?'}, {'role': 'assistant', 'content': 'I am T.'}],
        'tag': 'en',
    }


def test_self_cognition_refuses_empty_names_and_other_rows():
    """No name, no author, or a row of another layout is an error that tells which."""
    with pytest.raises(ConfigError, match="name=''"):
        SelfCognitionProcessor('', 'us')
    with pytest.raises(DataError, match='no messages, and no query and response'):
        SelfCognitionProcessor('T', 'us')({'text': 'x'})


@pytest.mark.parametrize(
    ('row', 'kept'),
    [
        ({'messages': [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y'}]}, True),
        ({'messages': [{'role': 'assistant', 'content': None, 'tool_calls': [{'name': 'f'}]}]}, True),
        ({'messages': [{'role': 'assistant', 'content': ''}]}, False),
        ({'messages': [{'role': 'user', 'content': 'x'}]}, False),
        ({'messages': []}, False),
        ({'messages': None}, False),
        ({'text': 'x'}, False),
    ],
)
def test_has_messages_keeps_rows_in_which_the_assistant_speaks(row, kept):
    """A content or a tool call of the assistant counts; anything else does not, and is no error."""
    assert HasMessagesFilter()(row) is kept


@pytest.mark.parametrize(
    ('spec', 'options', 'end'),
    [
        (Shout, {}, '!'),
        (Shout, {'marks': '?', 'times': 2}, '??'),
        (Shout('.'), {}, '.'),
        (shout, {}, '!'),
        (shout, {'marks': '??'}, '??'),
        (partial(shout, marks='#'), {}, '#'),
        (lambda row: {'text': row['text'] + '~'}, {}, '~'),
        ('tests.core.test_preprocessor:Shout', {'times': 3}, '!!!'),
        ('tests.core.test_preprocessor:shout', {'marks': '-'}, '-'),
    ],
)
def test_map_takes_every_way_to_name_a_preprocessor(spec, options, end):
    """Classes get their options, functions have them bound, instances come as they are, and a path names either."""
    dataset = rows('a', 'b')
    dataset.map(spec, **options)
    assert texts(dataset) == ['a' + end, 'b' + end]


@pytest.mark.parametrize(
    ('spec', 'options'),
    [
        (Longer, {}),
        (Longer, {'than': 1}),
        (Longer(1), {}),
        (long, {}),
        (long, {'than': 1}),
        (lambda row: row['text'] == 'bbb', {}),
        ('tests.core.test_preprocessor:Longer', {'than': 2}),
        ('tests.core.test_preprocessor:long', {'than': 2}),
    ],
)
def test_filter_takes_every_way_to_name_a_filter(spec, options):
    """Filters are named as preprocessors are."""
    dataset = rows('a', 'bbb')
    dataset.filter(spec, **options)
    assert texts(dataset) == ['bbb']


def test_registered_names_resolve():
    """Built-in names and own registrations are found."""
    dataset = Dataset(DatasetMeta([ALPACA, {**ALPACA, 'output': 'two'}]))
    dataset.map('alpaca')
    dataset.filter('has_messages')
    assert dataset[1]['messages'][-1] == {'role': 'assistant', 'content': 'two'}
    dataset.map('self_cognition', name='T', author='us')
    assert len(dataset) == 2
    with twinkle.preprocessors.temporary('shout', Shout):
        other = rows('a')
        other.map('shout', marks='*')
    assert texts(other) == ['a*']


def test_an_unknown_name_suggests_one():
    """A typing error is answered with the name that was meant."""
    with pytest.raises(UnknownNameError, match='alpaca'):
        rows('a').map('alpacca')


def test_options_that_do_not_fit_are_refused():
    """An option that the class or function does not take, or any for an instance, is an error before a row is read."""
    for spec in (Shout, shout):
        with pytest.raises(ConfigError, match='colour'):
            rows('a').map(spec, colour='red')
    with pytest.raises(ConfigError, match='marks'):
        rows('a').map(Shout(), marks='?')
    with pytest.raises(ConfigError, match='name'):
        rows('a').map('self_cognition', author='us')


def test_what_is_no_preprocessor_is_refused():
    """A filter is no preprocessor, and a number is neither."""
    with pytest.raises(InvalidPartError):
        rows('a').map(Longer)
    with pytest.raises(InvalidPartError):
        rows('a').map(3)
