"""Checkpoints that are written in a thread while the loop goes on."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.helpers.checkpoints import content, hidden, names, write
from twinkle.checkpoint import (
    commit_checkpoint,
    find_checkpoint,
    load_state,
    save_async,
    snapshot_state,
    wait_for_saves,
)
from twinkle.errors import CheckpointError, ConfigError, NameNotAllowedError, StateError


def _writer(text, gate=None):
    def write_(folder):
        if gate is not None:
            assert gate.wait(30)
        (folder / 'sub').mkdir()
        (folder / 'sub' / 'weights.txt').write_text(text)

    return write_


def test_a_background_save_lets_the_loop_go_on(tmp_path):
    """The call returns at once; wait() gives the finished checkpoint."""
    gate = threading.Event()
    pending = save_async(_writer('x', gate), tmp_path, 'a')
    assert not pending.done
    with pytest.raises(TimeoutError, match='goes on'):
        pending.wait(0.01)
    gate.set()
    assert pending.wait() == tmp_path / 'a'
    assert pending.done
    assert content(find_checkpoint(tmp_path)) == 'x'


def test_a_snapshot_is_not_changed_by_later_steps(tmp_path):
    """What is written is the state at the call, with the names of what cannot be saved told at once."""
    weights = torch.zeros(3)
    shared = {'w': weights, 'again': weights, 'view': weights[1:]}
    snapshot = snapshot_state(shared)
    weights += 1
    save_async(lambda folder: snapshot.save(folder, 's'), tmp_path, 'a').wait()
    state = load_state(find_checkpoint(tmp_path), 's')
    assert state['w'].tolist() == [0, 0, 0]
    assert state['w'] is state['again']
    with pytest.raises(CheckpointError, match=r"state\['f'\]"):
        snapshot_state({'f': print})


def test_one_background_save_at_a_time(tmp_path):
    """A second save into the same folder, in the background or not, waits for the first."""
    gate, order = threading.Event(), []

    def slow(folder):
        gate.wait(30)
        _writer('a')(folder)
        order.append('a')

    def quick(folder):
        _writer('b')(folder)
        order.append('b')

    save_async(slow, tmp_path, 'a')
    threading.Timer(0.1, gate.set).start()
    save_async(quick, tmp_path, 'b', keep_last=2)
    with commit_checkpoint(tmp_path, 'c', keep_last=2) as folder:
        order.append('c')
        _writer('c')(folder)
    assert order == ['a', 'b', 'c']
    assert names(tmp_path) == ['b', 'c', 'latest']


def test_an_error_in_the_background_is_raised_once(tmp_path):
    """wait() raises it as it was; else the next save does, before it starts, and names the checkpoint that was lost."""

    def fail(folder):
        raise ValueError('disk on fire')

    pending = save_async(fail, tmp_path, 'a')
    with pytest.raises(ValueError, match='disk on fire'):
        pending.wait()
    write(tmp_path, 'b')
    for save in (lambda: write(tmp_path, 'd'), lambda: save_async(_writer('d'), tmp_path, 'd'), wait_for_saves):
        save_async(fail, tmp_path, 'c')
        with pytest.raises(
            CheckpointError, match=r"background save of .*c failed: ValueError\('disk on fire'\)"
        ) as error:
            save()
        assert isinstance(error.value.__cause__, ValueError)
    assert names(tmp_path) == ['b', 'latest']
    assert hidden(tmp_path) == []


def test_a_background_save_into_its_own_folder_is_refused(tmp_path):
    """write() that saves into the same folder would wait for itself; it is told so."""
    pending = save_async(lambda folder: write(tmp_path, 'inner'), tmp_path, 'outer')
    with pytest.raises(StateError, match='wait for itself'):
        pending.wait()


def test_bad_names_are_refused_before_the_thread_starts(tmp_path):
    """The caller learns of a bad name or keep_last at the call."""
    with pytest.raises(NameNotAllowedError):
        save_async(_writer('x'), tmp_path, '../x')
    with pytest.raises(ConfigError):
        save_async(_writer('x'), tmp_path, 'x', keep_last=0)
