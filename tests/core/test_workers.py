"""Registries in child processes: the same names, and registrations at run time that are there or fail loudly."""

from __future__ import annotations

import multiprocessing

import pytest

from twinkle.errors import UnknownNameError
from twinkle.loss import MSELoss
from twinkle.registry import losses


def _resolve(name):
    try:
        part = losses.resolve(name)
    except UnknownNameError as error:
        return str(error)
    return f'{part.__module__}:{part.__qualname__}'


def _names(_):
    return losses.names()


def _in_child(method, function, argument):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(function, (argument,))


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
@pytest.mark.parametrize('method', ['spawn', 'fork'])
def test_children_see_the_same_names(method):
    """Spawned and forked workers list what the parent lists."""
    assert _in_child(method, _names, None) == losses.names()


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
@pytest.mark.parametrize('method', ['spawn', 'fork'])
def test_importable_registrations_are_there_in_children(method):
    """A class at the top level of a module, registered at run time, is found in a worker too."""
    with losses.temporary('mine', MSELoss):
        assert _in_child(method, _resolve, 'mine') == 'twinkle.loss.mse:MSELoss'
    assert 'Unknown name' in _in_child(method, _resolve, 'mine')


def test_what_cannot_be_imported_fails_loudly_in_spawned_children():
    """A lambda that the parent registered is not just unknown in a spawned worker: the message says why."""
    with losses.temporary('little', lambda inputs, outputs: outputs['logps'].sum()):
        assert 'registered at run time in the parent process' in _in_child('spawn', _resolve, 'little')
