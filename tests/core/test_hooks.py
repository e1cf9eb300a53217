"""Hooks: plugins observe; one that raises is named and ends nothing."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.fake_dists import make_dist
from twinkle.hookspecs import hookimpl
from twinkle.plugins import call_hook, get_hooks, plugin_cache
from twinkle.runtime import initialize


class Observer:
    """Keeps what it is told."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def metrics_logged(self, metrics, step):
        self.seen.append((dict(metrics), step))

    @hookimpl
    def run_failed(self, error):
        self.seen.append(type(error).__name__)


class Broken:
    """Raises."""

    @hookimpl
    def metrics_logged(self, step):
        raise RuntimeError(f'no step {step} for me')


@pytest.fixture(autouse=True)
def _fresh():
    plugin_cache.refresh()
    yield
    plugin_cache.refresh()


def test_a_raising_hook_is_named_and_the_others_still_run(caplog):
    """The plugin's name and the hook are in the log; the next plugin is told all the same."""
    observer = Observer()
    get_hooks().register(Broken(), name='the broken one')
    get_hooks().register(observer)
    get_hooks().register(Broken(), name='another broken one')
    with caplog.at_level('ERROR', logger='twinkle'):
        call_hook('metrics_logged', metrics={'loss': 1.0}, step=3)
    assert observer.seen == [({'loss': 1.0}, 3)]
    assert 'the broken one' in caplog.text
    assert 'another broken one' in caplog.text
    assert 'metrics_logged' in caplog.text


def test_a_run_tells_observers_what_it_logs_and_that_it_failed(tmp_path):
    """`run.log` reaches observers, and an exception within the run is reported before it goes on."""
    observer = Observer()
    get_hooks().register(observer)
    with pytest.raises(KeyError, match='boom'), initialize(output_dir=tmp_path) as run:
        run.log({'loss': 2.0}, step=1)
        raise KeyError('boom')
    assert observer.seen == [({'loss': 2.0}, 1), 'KeyError']


def test_installed_hooks_are_loaded_at_the_first_call_and_broken_ones_reported(tmp_path, monkeypatch, caplog):
    """An entry point in `twinkle.hooks` observes; one whose import fails is reported and left out."""
    code = 'from twinkle.hookspecs import hookimpl\nSEEN = []\n@hookimpl\ndef checkpoint_saved(path, step):\n    SEEN.append((path, step))\n'
    make_dist(tmp_path / 'a', 'fake-hooks', {'twinkle.hooks': {'watch': 'fake_hooks'}}, modules={'fake_hooks': code})
    make_dist(
        tmp_path / 'b', 'fake-bad', {'twinkle.hooks': {'bad': 'fake_bad_hooks'}}, modules={'fake_bad_hooks': '1 / 0'}
    )
    for folder in 'ab':
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    plugin_cache.refresh()
    with caplog.at_level('WARNING', logger='twinkle'):
        call_hook('checkpoint_saved', path='x', step=4)
    assert sys.modules.pop('fake_hooks').SEEN == [('x', 4)]
    assert 'fake-bad' in caplog.text
    monkeypatch.undo()
