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


class Leaver:
    """Tries to end the program, and to wrap a hook."""

    @hookimpl
    def metrics_logged(self):
        raise SystemExit('bye')


class Wrapper:
    """A hook that would stand around the others."""

    @hookimpl(wrapper=True)
    def metrics_logged(self):
        return (yield)


def test_a_hook_cannot_end_the_program_or_wrap_others(caplog):
    """SystemExit from a hook is reported like any error; a wrapper, which would do nothing, is reported rather than ignored."""
    observer = Observer()
    for name, plugin in (('leaver', Leaver()), ('wrapper', Wrapper()), ('observer', observer)):
        get_hooks().register(plugin, name=name)
    call_hook('metrics_logged', metrics={}, step=1)
    assert observer.seen == [({}, 1)]
    assert 'leaver' in caplog.text
    assert 'wrapper' in caplog.text


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install made-up hooks; they are gone after the test."""
    before = set(sys.modules)

    def do(name, code, attribute='', **options):
        module = name.replace('-', '_')
        points = {'twinkle.hooks': {'it': module + attribute}}
        make_dist(tmp_path / name, name, points, modules={module: code}, **options)
        monkeypatch.syspath_prepend(str(tmp_path / name))
        plugin_cache.refresh()

    yield do
    for module in set(sys.modules) - before:
        if module.startswith('fake_'):
            del sys.modules[module]


HOOK = (
    'from twinkle.hookspecs import hookimpl\nSEEN = []\n@hookimpl\ndef checkpoint_saved(path):\n    SEEN.append(path)\n'
)


def test_hooks_are_not_loaded_before_the_first_call(install):
    """Resolving parts loads no hook module; the first hook call does."""
    from twinkle.registry import losses

    install('fake-lazy-hook', HOOK)
    losses.resolve('cross_entropy')
    assert 'fake_lazy_hook' not in sys.modules
    call_hook('checkpoint_saved', path='x', step=1)
    assert sys.modules['fake_lazy_hook'].SEEN == ['x']


def test_disabled_hooks_and_those_with_unmet_needs_are_left_out(install, monkeypatch, caplog):
    """The deny-list and the need of another core apply to hooks, too; the second is reported."""
    install('fake-denied', 'raise AssertionError("loaded")')
    install('fake-demanding', 'raise AssertionError("loaded")', requires=['twinkle-core>=99'])
    monkeypatch.setenv('TWINKLE_DISABLE_PLUGINS', 'fake-denied')
    call_hook('checkpoint_saved', path='x', step=1)
    assert 'fake-denied' not in caplog.text
    assert 'twinkle-core>=99' in caplog.text
    assert not {'fake_denied', 'fake_demanding'} & set(sys.modules)


def test_a_hook_module_may_call_hooks_while_it_is_imported(install):
    """Loading hooks from within the loading of hooks ends, and each is registered once."""
    install(
        'fake-eager', HOOK + 'from twinkle.plugins import call_hook\ncall_hook("checkpoint_saved", path="y", step=0)\n'
    )
    call_hook('checkpoint_saved', path='x', step=1)
    assert sys.modules['fake_eager'].SEEN == ['x']


def test_threads_that_come_at_once_all_reach_every_hook(install):
    """No thread misses a hook that another one is still loading, and none is registered twice."""
    import threading

    install('fake-slow-hook', 'import time\ntime.sleep(0.2)\n' + HOOK)
    threads = [
        threading.Thread(target=call_hook, args=('checkpoint_saved',), kwargs={'path': n, 'step': n}) for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sys.modules['fake_slow_hook'].SEEN) == list(range(16))


def test_a_class_in_the_hooks_group_is_made_into_an_observer(install):
    """An entry point may name a class with hook methods."""
    code = (
        'from twinkle.hookspecs import hookimpl\nSEEN = []\nclass it:\n    @hookimpl\n'
        '    def checkpoint_saved(self, path):\n        SEEN.append(path)\n'
    )
    install('fake-class-hook', code, attribute=':it')
    call_hook('checkpoint_saved', path='x', step=1)
    assert sys.modules['fake_class_hook'].SEEN == ['x']
