"""The conformance kit: right backends pass it, and each wrong one fails exactly the rule that it breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.kit import KIT, OPTIONS, run_kit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_toy_backend_passes():
    """The toy backend keeps every rule; only those about several ranks are left out."""
    outcomes = run_kit('twinkle.testing:ToyModel', '-W', 'error')
    assert outcomes.failed == set()
    assert set(outcomes.skipped.values()) == {'Skipped: one process: run with --twinkle-ranks 2'}


def test_the_toy_backend_is_small():
    """A third backend is possible in about 200 lines."""
    from twinkle.testing import toy

    assert len(Path(toy.__file__).read_text().splitlines()) <= 200


WRONG = {
    'AccumulationOffByOne': 'the_step_fires_after_g_micro_batches',
    'GradientNotNormalised': 'the_gradient_is_that_of_the_reported_mean',
    'GradientPerRow': 'the_gradient_is_that_of_the_reported_mean',
    'MeanOfMeans': 'the_split_into_micro_batches_does_not_matter',
    'AdapterIgnored': 'outputs_differ_by_adapter',
    'StateShared': 'interleaved_adapters_do_not_disturb_each_other',
    'OptimizerShared': 'interleaved_adapters_do_not_disturb_each_other',
    'DirtyContext': 'an_exception_ends_a_context',
    'DirtyMode': 'an_error_in_the_module_leaves_its_mode',
    'LabelsShiftedTwice': 'labels_are_the_targets_of_their_own_position',
    'NormInflated': 'the_norm_is_that_of_the_gradient',
    'GradientsKept': 'a_step_leaves_no_gradients',
    'InputsChanged': 'inputs_are_not_changed',
    'StateDictAliased': 'the_state_dict_is_a_copy_on_the_cpu',
    'RefusalBroken': 'what_is_declared_impossible_is_refused',
}


@pytest.mark.parametrize('name', WRONG)
def test_a_wrong_backend_fails_exactly_its_rule(name):
    """The kit finds each mistake, and blames nothing else for it."""
    assert run_kit(f'tests.core.wrong_backends:{name}').failed == {WRONG[name]}


def test_what_a_backend_declares_impossible_is_left_out_and_must_be_refused():
    """A backend without forward, loss, backward and evaluation on their own passes: it refuses them with its reasons."""
    outcomes = run_kit('tests.core.wrong_backends:Pipeline')
    assert outcomes.failed == set()
    assert 'what_is_declared_impossible_is_refused' in outcomes.passed
    assert 'declared impossible: logits stay on the last stage' in outcomes.skipped['outputs_differ_by_adapter']


def pytest_in_a_process(*arguments, cwd=None):
    """pytest in a process of its own."""
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    return subprocess.run(
        [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_the_kit_starts_itself_on_several_ranks():
    """--twinkle-ranks runs every rule on each process; the toy backend keeps those among ranks too."""
    done = pytest_in_a_process(*KIT, '--twinkle-model', 'twinkle.testing:ToyModel', '--twinkle-ranks', '2', '-q')
    assert done.returncode == 0, done.stdout + done.stderr
    assert ' passed' in done.stdout
    assert 'skipped' not in done.stdout
    assert done.stdout.count(' passed') == 1, 'one rank reports'


def test_a_backend_whose_ranks_train_apart_fails():
    """Gradients that are not summed over ranks are found, and the exit status says so."""
    model = 'tests.core.wrong_backends:RanksApart'
    done = pytest_in_a_process(*KIT, '--twinkle-model', model, '--twinkle-ranks', '2', '-q', '-k', 'ranks or divided')
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'test_rows_divided_among_ranks_give_one_gradient' in done.stdout
    assert 'test_metrics_are_over_all_ranks' in done.stdout


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        ([], '--twinkle-model MODULE:NAME'),
        (['--twinkle-model', 'no_colon'], 'must be package.module:Name'),
        (['--twinkle-model', 'no.such.module:Model'], "No module named 'no'"),
        (['--twinkle-model', 'twinkle.testing:NoModel'], 'NoModel'),
        (['--twinkle-model', 'twinkle.testing:ToyModel', '--twinkle-ranks', '0'], 'must be at least 1'),
    ],
)
def test_a_wrong_command_says_what_is_missing(arguments, says, capsys):
    """A model that is left out or cannot be loaded is one clear line and exit status 4, not a traceback per rule."""
    assert pytest.main([*KIT, *OPTIONS, *arguments]) == pytest.ExitCode.USAGE_ERROR
    told = ''.join(capsys.readouterr())
    assert says in told
    assert 'Traceback' not in told


def test_the_plugin_weighs_nothing(tmp_path):
    """Every pytest run of an environment with Twinkle loads the plugin: it imports no PyTorch, and adds no test."""
    (tmp_path / 'test_x.py').write_text(
        "import sys\ndef test_x():\n    assert 'torch' not in sys.modules\n    assert 'twinkle.testing.plugin' in sys.modules\n"
    )
    done = pytest_in_a_process('-q', cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '1 passed' in done.stdout
