"""The demo's script and data: what it promises before and after training, on a tiny random model that learns no name."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.helpers.models import tiny_llama_dir
from tests.helpers.tokenizers import tiny_tokenizer
from twinkle.preprocessor import SelfCognitionProcessor

COOKBOOK = Path(__file__).parents[2] / 'cookbook'
DATA = COOKBOOK / 'data' / 'self_cognition.jsonl'


@pytest.fixture(scope='module')
def sft() -> ModuleType:
    """cookbook/sft.py as a module."""
    pytest.importorskip('twinkle_hf')
    spec = importlib.util.spec_from_file_location('sft', COOKBOOK / 'sft.py')
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.read_text().splitlines()]


@pytest.fixture(scope='module')
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model of two layers with a tokenizer and a chat template."""
    tokenizer = tiny_tokenizer()
    folder = tiny_llama_dir(tmp_path_factory.mktemp('tiny'), vocab=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def words(text: str) -> str:
    return ' '.join(re.findall(r'[a-z0-9]+', text.lower()))


# -- the data ------------------------------------------------------------------------------------------------------------


def test_rows_teach_a_name_and_manners(rows):
    """At least 80 rows, no question twice, about a quarter of ordinary chat, names only as placeholders."""
    questions = [words(row['messages'][0]['content']) for row in rows]
    assert len(rows) >= 80
    assert len(set(questions)) == len(rows)
    assert all([message['role'] for message in row['messages']] == ['user', 'assistant'] for row in rows)
    texts = [json.dumps(row) for row in rows]
    ordinary = [text for text in texts if '{{' not in text]
    assert 20 <= len(ordinary) <= len(rows) / 3
    assert not [text for text in texts if 'twinkle' in text.lower()]
    left = [SelfCognitionProcessor(name='N', author='A')(row) for row in rows]
    assert '{{' not in json.dumps(left)


def test_held_out_questions_are_not_in_the_data(sft, rows):
    """No question that is asked before and after is one that was trained on, nor a part of one."""
    asked = [words(question) for question in [*sft.HELD_OUT, *sft.KEPT]]
    trained = [words(row['messages'][0]['content']) for row in rows]
    assert len(sft.HELD_OUT) >= 6
    assert len(set(asked)) == len(asked)
    assert [(one, other) for one in asked for other in trained if one == other or one in other] == []


# -- the script ----------------------------------------------------------------------------------------------------------


def test_the_script_runs_and_says_that_nothing_was_learned(sft, tiny, tmp_path, capsys):
    """With a model that cannot learn it in three steps it exits 1 and says why; all files are there, the adapter PEFT's own."""
    from matplotlib.image import imread

    out = tmp_path / 'out'
    arguments = [
        '--model',
        tiny,
        '--output-dir',
        str(out),
        '--steps',
        '3',
        '--accumulation',
        '2',
        '--max-new-tokens',
        '8',
    ]
    assert sft.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "PROBLEM: only 0 of 6 answers name 'Twinkle' or 'the Twinkle team' after training" in printed
    assert 'plain PEFT answers' not in printed
    assert all(f'> {question}' in printed for question in [*sft.HELD_OUT, *sft.KEPT])
    assert 'in 3 steps' in printed
    assert {'adapter_config.json', 'adapter_model.safetensors'} <= {path.name for path in (out / 'last').iterdir()}
    assert imread(out / 'loss.png').shape[:2] == (600, 1050)
    logged = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    assert [entry['step'] for entry in logged if 'loss' in entry] == [1, 2, 3]


def test_a_last_partial_window_is_a_step(sft, tiny, tmp_path, capsys):
    """88 rows in batches of 16, four to a step, over two epochs: 6 batches, so 2 steps an epoch, the second of two batches."""
    arguments = ['--model', tiny, '--output-dir', str(tmp_path), '--epochs', '2', '--batch-size', '16']
    sft.main([*arguments, '--accumulation', '4', '--max-new-tokens', '1'])
    assert 'in 4 steps' in capsys.readouterr().out


@pytest.mark.parametrize('option', ['--epochs', '--steps', '--batch-size', '--rank'])
def test_numbers_below_one_are_refused(sft, option, capsys):
    """argparse says which option, and why."""
    with pytest.raises(SystemExit):
        sft.parse([option, '0'])
    assert f'argument {option}: 0 is less than 1' in capsys.readouterr().err


def test_help_lists_the_options_and_their_defaults(sft, capsys):
    """`--help` tells what can be changed."""
    with pytest.raises(SystemExit):
        sft.parse(['--help'])
    printed = capsys.readouterr().out
    assert all(
        f'--{name}' in printed for name in ('model', 'data', 'output-dir', 'name', 'author', 'lr', 'rank', 'seed')
    )
    assert 'smollm2://135m-instruct' in printed


NAMED = ['I am Twinkle.'] * 6
OTHER = ['I am an assistant.'] * 6


@pytest.mark.parametrize(
    ('before', 'after', 'reloaded', 'problem'),
    [
        (OTHER, NAMED, NAMED[0], None),
        (OTHER, [*NAMED[:5], 'No.'], NAMED[0], None),
        (OTHER, ['Made by the Twinkle team.'] * 6, 'Made by the Twinkle team.', None),
        (NAMED, NAMED, NAMED[0], 'before training already'),
        ([*OTHER[:5], 'TWINKLE'], NAMED, NAMED[0], 'before training already'),
        (OTHER, OTHER, OTHER[0], 'only 0 of 6'),
        (OTHER, [*NAMED[:4], 'No.', 'No.'], NAMED[0], 'only 4 of 6'),
        (OTHER, NAMED, 'I am SmolLM.', 'plain PEFT answers'),
    ],
)
def test_the_verdict(sft, before, after, reloaded, problem):
    """Good is: no name before, in all answers but one after, and the same answer from plain PEFT."""
    options = SimpleNamespace(name='Twinkle', author='the Twinkle team')
    problems = sft.check(before, after, reloaded, options)
    assert problems == [] if problem is None else any(problem in text for text in problems)
