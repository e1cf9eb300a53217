"""Trackers: TensorBoard for real, the others by the calls that they make."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from twinkle.errors import MissingPackageError, StateError
from twinkle.registry import trackers


def test_tensorboard_event_files_hold_what_was_logged(tmp_path):
    """Scalars and steps are read back from the event files."""
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = trackers.build('tensorboard')
    tracker.start(tmp_path, {'lr': 0.1})
    for step in (1, 2, 3):
        tracker.log({'loss': 1.0 / step, 'lr': 0.1}, step)
    tracker.finish()
    events = EventAccumulator(str(tmp_path / 'tensorboard'))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars('loss')] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert {'loss', 'lr'} <= set(events.Tags()['scalars'])


@pytest.mark.parametrize(('name', 'folder'), [('wandb', 'dir'), ('swanlab', 'logdir'), ('trackio', None)])
def test_run_trackers_start_log_and_finish(monkeypatch, tmp_path, name, folder):
    """init gets project, config and folder; log gets metrics and step; finish ends the run once."""
    calls = []
    run = SimpleNamespace(
        log=lambda metrics, step: calls.append(('log', metrics, step)), finish=lambda: calls.append(('finish',))
    )
    library = SimpleNamespace(init=lambda **options: calls.append(('init', options)) or run)
    monkeypatch.setitem(sys.modules, name, library)
    tracker = trackers.build(name, project='star')
    tracker.start(tmp_path, {'lr': 0.1})
    tracker.log({'loss': 2.0}, 5)
    tracker.finish()
    tracker.finish()
    expected = {'project': 'star', 'config': {'lr': 0.1}, **({folder: str(tmp_path)} if folder else {})}
    assert calls == [('init', expected), ('log', {'loss': 2.0}, 5), ('finish',)]


@pytest.mark.parametrize('name', ['tensorboard', 'wandb', 'swanlab', 'trackio'])
def test_a_missing_library_gives_its_pip_line(monkeypatch, tmp_path, name):
    """Without the library, starting says which extra brings it; logging before the start says so."""
    monkeypatch.setitem(sys.modules, name, None)
    tracker = trackers.build(name)
    with pytest.raises(MissingPackageError, match=rf'pip install twinkle-trackers\[{name}\]'):
        tracker.start(tmp_path, {})
    with pytest.raises(StateError, match='start'):
        tracker.log({'loss': 1.0}, 1)
