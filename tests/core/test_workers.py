"""Registries in child processes: the same names, and registrations at run time that are there or fail loudly."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

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


def _register_again(_):
    losses.register('again', MSELoss)
    return losses.resolve('again').__name__, losses.names().count('again')


def test_a_worker_that_registers_the_same_again_is_not_in_its_own_way():
    """A spawned worker runs its modules' registrations a second time: the name is its own then, and no conflict."""
    with losses.temporary('again', MSELoss):
        assert _in_child('spawn', _register_again, None) == ('MSELoss', 1)


def test_instances_and_shadowed_names_are_told_apart_in_spawned_workers():
    """An instance cannot travel by name, and its class is not used instead of it."""
    with losses.temporary('built', MSELoss()):
        assert 'registered at run time in the parent process' in _in_child('spawn', _resolve, 'built')
    with losses.temporary('cross_entropy', MSELoss):
        assert _in_child('spawn', _resolve, 'cross_entropy') == 'twinkle.loss.mse:MSELoss'


SCRIPT = """
import multiprocessing
from twinkle.loss import MSELoss
from twinkle.registry import losses


class OfTheScript(MSELoss):
    pass


def ask(name):
    return losses.resolve(name).__name__


if __name__ == '__main__':
    losses.register('scripted', OfTheScript)
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print(pool.apply(ask, ('scripted',)))
"""


def test_a_class_of_the_script_itself_is_found_in_its_spawned_workers(tmp_path):
    """The usual script: classes at the top, registration and training under `if __name__ == '__main__'`."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(tmp_path / 'script.py')], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == 'OfTheScript', done.stderr


def test_another_program_does_not_take_its_own_class_for_the_scripts(tmp_path):
    """A child that is another script has another `__main__`, and says that the part is not there."""
    other = tmp_path / 'other.py'
    other.write_text(
        'from twinkle.loss import MSELoss\nfrom twinkle.registry import losses\nclass OfTheScript(MSELoss): pass\n'
        'try: print(losses.resolve("scripted"))\nexcept ImportError as error: print(error)\n'
    )
    call = f'import subprocess, sys; subprocess.run([sys.executable, {str(other)!r}])'
    text = SCRIPT[: SCRIPT.index('    with')] + f'    {call}\n'
    (tmp_path / 'script.py').write_text(text)
    done = subprocess.run([sys.executable, str(tmp_path / 'script.py')], capture_output=True, text=True, check=False)
    assert 'registered at run time in the parent process' in done.stdout, done.stderr


def test_a_decorated_class_of_a_module_is_found_in_workers(tmp_path):
    """`@losses.register('x')` runs before the class has its name; workers find it all the same."""
    (tmp_path / 'decorated_of_test.py').write_text(
        'from twinkle.loss import MSELoss\nfrom twinkle.registry import losses\n'
        "@losses.register('decorated')\nclass Decorated(MSELoss): pass\n"
    )
    child = 'from twinkle.registry import losses; print(losses.resolve("decorated").__name__)'
    code = f'import subprocess, sys, decorated_of_test; subprocess.run([sys.executable, "-c", {child!r}])'
    env = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip() == 'Decorated', done.stderr


def test_the_environment_is_clean_again_without_registrations():
    """The word left for workers goes when the registration does."""
    before = os.environ.get('TWINKLE_RUNTIME_PARTS')
    with losses.temporary('mine', MSELoss):
        assert 'mine' in os.environ['TWINKLE_RUNTIME_PARTS']
    assert os.environ.get('TWINKLE_RUNTIME_PARTS') == before


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork on this system')
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_worker_forked_while_another_thread_holds_the_lock_does_not_hang():
    """The lock of the parent's other thread is not the child's."""
    held, release = threading.Event(), threading.Event()

    def hold():
        with losses._lock:
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        child = multiprocessing.get_context('fork').Process(target=losses.register, args=('of_the_child', MSELoss))
        child.start()
        child.join(20)
        assert child.exitcode == 0
    finally:
        release.set()
        holder.join()
