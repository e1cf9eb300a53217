"""Rewards: format, answer and length by rule, functions, and the registry."""

from __future__ import annotations

import pytest

from tests.helpers.tokenizers import tiny_tokenizer
from twinkle import rewards
from twinkle.errors import ConfigError, DataError, InvalidPartError
from twinkle.reward import AnswerReward, FormatReward, LengthReward, Reward


@pytest.mark.parametrize(
    ('completion', 'reward'),
    [
        ('<think>2 + 2</think><answer>4</answer>', 1.0),
        ('two and two\nis four</think>\n\n<answer>\n4\n</answer>\n', 1.0),
        ('<answer>4</answer>', 0.0),
        ('<think>2</think><answer>4</answer> indeed', 0.0),
        ('<think>2</think>so <answer>4</answer>', 0.0),
        ('<think>2</think><answer>4</answer><answer>5</answer>', 0.0),
        ('<think>a<think>b</think><answer>4</answer>', 0.0),
        ('<think>a</think></think><answer>4</answer>', 0.0),
        ('<answer>4</answer></think><answer>4</answer>', 0.0),
        ('', 0.0),
    ],
)
def test_format(completion, reward):
    """Reasoning, then one answer, and nothing else; the prompt may have opened the reasoning."""
    assert FormatReward()([completion], [{}]) == [reward]


def test_format_of_ones_own():
    """Any pattern, matched as a whole and over lines; none is refused."""
    assert FormatReward(r'Yes\..*')(['Yes.\nSurely.', 'No. Yes.'], [{}, {}]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match='no regular expression'):
        FormatReward('(')


def test_format_is_quick_on_long_text():
    """A long completion that does not match costs no more than reading it a few times."""
    import time

    start = time.perf_counter()
    FormatReward()(['<think>' + 'a < b ' * 20000, '</think>' * 5000, ' ' * 50000 + 'x'], [{}] * 3)
    AnswerReward()(['<answer>' * 2000, '1,' * 20000, '1' * 5000 + 'x', '-' * 20000, '1/' * 20000], [{'answer': 4}] * 5)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ('completion', 'answer', 'reward'),
    [
        ('It is 4.', '4', 1.0),
        ('It is 4.', 4, 1.0),
        ('4 and no, it is 5.', '4', 0.0),
        ('5, no, 4', 4.0, 1.0),
        ('The total is $1,234.50.', '1234.5', 1.0),
        ('-3', '-3', 1.0),
        ('\u22123', '-3', 1.0),
        ('10-3', '3', 1.0),
        ('3', '-3', 0.0),
        ('0.75', '3/4', 1.0),
        ('It is 3/4', '0.75', 1.0),
        ('1e3', '1000', 1.0),
        ('50%', '50', 1.0),
        ('1, 2, 3', '3', 1.0),
        ('no number', '4', 0.0),
        ('v2', '2', 0.0),
        ('', '4', 0.0),
        ('0.3333333', '1/3', 1.0),
        ('0.33', '1/3', 0.0),
        ('1/0', '4', 0.0),
        ('72', 'Half of 48 is 24. 48 + 24 = 72.\n#### 72', 1.0),
        ('<answer>4</answer> or 5', '4', 1.0),
        ('<answer>5</answer><answer> 4 </answer>', '4', 1.0),
        ('<answer>it is 4</answer>', '4', 0.0),
        ('<answer></answer> 4', '4', 0.0),
        ('<answer>Paris</answer>', 'paris', 1.0),
        ('<answer>New\n York </answer>', 'new york', 1.0),
        ('Rome', 'Paris', 0.0),
        ('<think>Rome?</think>\nParis', 'Paris', 1.0),
        ('It is Paris', 'Paris', 0.0),
    ],
)
def test_answer(completion, answer, reward):
    """The last tagged answer, or the last number, against the row's: as numbers where both are, else as text."""
    assert AnswerReward()([completion], [{'answer': answer}]) == [reward]


def test_answer_options():
    """Another key, another tolerance; rows without an answer and a wrong tolerance are refused."""
    assert AnswerReward('solution', tolerance=0.1)(['95', '89'], [{'solution': 100}] * 2) == [1.0, 0.0]
    for row in ({}, {'answer': None}, {'answer': ' '}, {'answer': ['4']}, {'answer': True}):
        with pytest.raises(DataError, match='row 1 has answer='):
            AnswerReward()(['4', '4'], [{'answer': 4}, row])
    with pytest.raises(ConfigError, match='tolerance=-1'):
        AnswerReward(tolerance=-1)


def test_length_is_that_of_dapo():
    """Equation 13 of the paper: 0, then evenly down, then -1, by the ids of rows or by a tokenizer."""
    lengths = [0, 59, 60, 61, 80, 99, 100, 101, 1000]
    rows = [{'completion_ids': [0] * n} for n in lengths]
    expected = [0, 0, 0, -0.025, -0.5, -0.975, -1, -1, -1]
    assert LengthReward(100, 40)([''] * len(rows), rows) == pytest.approx(expected)
    tokenizer = tiny_tokenizer()
    n = len(tokenizer.encode('hello world', add_special_tokens=False))
    assert LengthReward(n + 1, 2, tokenizer=tokenizer)(['hello world', ''], [{}, {}]) == [-0.5, 0.0]
    assert LengthReward(4, 4)(['', ''], [{'completion_ids': []}, {'completion_ids': [1, 2]}]) == [0.0, -0.5]


def test_length_refusals():
    """Lengths that make no ramp, and completions that nobody can count."""
    for lengths in ((10, 0), (10, 11), (0, 0), (10, -1)):
        with pytest.raises(ConfigError, match='0 < cache <= max_length'):
            LengthReward(*lengths)
    with pytest.raises(DataError, match='row 0 has no completion_ids'):
        LengthReward(10, 5)(['a'], [{}])


@pytest.mark.parametrize('reward', [FormatReward(), AnswerReward(), LengthReward(10, 5)])
def test_each_completion_has_its_row(reward):
    """Other numbers of rows, one text, and what is no text are refused; nothing gives nothing."""
    name = type(reward).__name__
    with pytest.raises(DataError, match=f'{name}: 2 completions and 1 rows'):
        reward(['a', 'b'], [{'answer': 1}])
    with pytest.raises(DataError, match='one text'):
        reward('a', [{'answer': 1}])
    with pytest.raises(DataError, match='completion 0 is list'):
        reward([[1]], [{'answer': 1}])
    assert reward([], []) == []


def test_names():
    """The registry has the three, builds them with options, and takes functions; other things are refused."""
    assert {'answer', 'format', 'length'} <= set(rewards.names())
    assert rewards.build('length', max_length=10, cache=5).cache == 5
    assert rewards.resolve('AnswerReward') is AnswerReward

    def shortness(completions, rows):
        return [-float(len(completion)) for completion in completions]

    class Wordy(Reward):
        def __call__(self, completions, rows):
            return [float(len(completion.split())) for completion in completions]

    assert rewards.resolve(shortness) is shortness
    assert rewards.build(Wordy)(['a b'], [{}]) == [2.0]
    for part in (7, dict):
        with pytest.raises(InvalidPartError):
            rewards.resolve(part)
