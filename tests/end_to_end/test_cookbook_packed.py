"""cookbook/sft_packed.py on a tiny random model: the padding it counts, the steps it takes, and its verdict."""

from __future__ import annotations

import math
import re
from types import ModuleType

import pytest

from tests.helpers.cookbook import load_script, logged, tiny_chat_dir


@pytest.fixture(scope='module')
def script() -> ModuleType:
    """cookbook/sft_packed.py as a module."""
    pytest.importorskip('twinkle_hf')
    pytest.importorskip('binpacking')
    return load_script('sft_packed')


@pytest.fixture(scope='module')
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with a tokenizer."""
    return tiny_chat_dir(tmp_path_factory.mktemp('tiny'))


def test_packing_saves_padding_and_the_loss_falls(script, tiny, tmp_path, capsys):
    """With 512 tokens a row: fewer rows, less padding, as many tokens; the loss of all rows goes down, and it exits 0."""
    arguments = [
        '--model',
        tiny,
        '--output-dir',
        str(tmp_path),
        '--packing-length',
        '512',
        '--epochs',
        '4',
        '--lr',
        '2e-2',
    ]
    assert script.main(arguments) == 0
    printed = capsys.readouterr().out
    found = re.findall(r'^(padded|packed): (\d+) rows, .*; (\d+) tokens in (\d+) places', printed, re.MULTILINE)
    (_, rows, tokens, places), (_, packs, packed_tokens, packed_places) = found
    assert int(rows) == 88
    assert 0 <= int(packs) - int(tokens) / 512 <= 1.5  # hardly more packs than the tokens fill
    assert packed_tokens == tokens
    assert int(packed_places) < int(places)
    numbers = logged(tmp_path)
    assert [entry['step'] for entry in numbers] == list(range(1, 4 * math.ceil(int(packs) / 2) + 1))
    before, after = map(float, re.search(r'Loss per token (\S+) -> (\S+) in', printed).groups())
    assert after < 0.9 * before
    assert {'adapter_config.json', 'adapter_model.safetensors'} <= {path.name for path in (tmp_path / 'last').iterdir()}


def test_a_learning_rate_of_nothing_learns_nothing(script, tiny, tmp_path, capsys):
    """It says so and exits 1, after as many steps as were asked for."""
    arguments = ['--model', tiny, '--output-dir', str(tmp_path), '--packing-length', '512', '--steps', '2', '--lr', '0']
    assert script.main(arguments) == 1
    assert 'only: nothing was learned' in capsys.readouterr().out
    assert [entry['step'] for entry in logged(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ('numbers', 'problem'),
    [
        ((2.0, 1.0, 0.3, 0.1), None),
        ((2.0, 1.9, 0.3, 0.1), 'nothing was learned'),
        ((2.0, 1.0, 0.1, 0.3), 'more padding'),
    ],
)
def test_the_verdict(script, numbers, problem):
    """Good is: a tenth off the loss at least, and no more padding than without packing."""
    problems = script.check(*numbers)
    assert problems == [] if problem is None else any(problem in text for text in problems)


def test_not_a_number_is_no_success(script):
    """A loss that is not finite is a problem."""
    assert script.check(2.0, math.nan, 0.3, 0.1)


def test_help_lists_the_options(script, capsys):
    """`--help` tells what can be changed."""
    with pytest.raises(SystemExit):
        script.parse(['--help'])
    printed = capsys.readouterr().out
    assert all(f'--{name}' in printed for name in ('model', 'data', 'output-dir', 'packing-length', 'epochs', 'lr'))
