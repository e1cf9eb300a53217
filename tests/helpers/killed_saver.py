"""Saves checkpoints and kills itself with SIGKILL at the n-th call that touches the disk. Run as a script, with a work
folder.

Each case is a forked child, so that torch is imported once. For each scenario and n it leaves a folder `<scenario>-<n>`
as the killed child left it, and prints one JSON line with the scenario, n, the call it died at (null: it finished) and
the folder.
"""

from __future__ import annotations

import builtins
import functools
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from twinkle.checkpoint import TrainerState, commit_checkpoint, save_async, save_state, states, write_trainer_state

WATCHED = [(os, name) for name in ('mkdir', 'rename', 'replace', 'fsync', 'unlink', 'rmdir', 'open')]
WATCHED += [(builtins, 'open'), (io, 'open'), (states, 'save_file')]


def write(folder: Path, step: int) -> None:
    """What a model writes: weights, training state, trainer state; all of it says `step`."""
    save_state(folder, 'training_state', {'step': step, 'moments': [torch.full((64, 64), float(step)), torch.ones(3)]})
    write_trainer_state(folder, TrainerState(cur_step=step))


def save(output_dir: Path, name: str, step: int, **options: object) -> None:
    """One whole save."""
    with commit_checkpoint(output_dir, name, **options) as folder:  # type: ignore[arg-type]
        write(folder, step)


def save_in_background(output_dir: Path, name: str, step: int) -> None:
    """One whole save in a thread."""
    save_async(lambda folder: write(folder, step), output_dir, name).wait()


SCENARIOS = {
    'replace': lambda out: save(out, 'a', 2),
    'next': lambda out: save(out, 'b', 2, keep_last=1),
    'background': lambda out: save_in_background(out, 'a', 2),
}


def kill_at(n: int, report: int) -> None:
    """From now on the n-th watched call tells its name and kills the process; a tensor file is half-written then."""
    calls = 0

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def counted(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == n:
                os.write(report, name.encode())
                if name == 'save_file':
                    real(*args, **kwargs)
                    os.truncate(str(args[1]), os.path.getsize(str(args[1])) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, name, counted)

    for owner, name in WATCHED:
        watch(owner, name)


def run_case(scenario: str, start: Path, folder: Path, n: int) -> str | None:
    """Fork a child that saves into a copy of `start` and dies at call n; the call's name, or None if it finished."""
    shutil.copytree(start, folder)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kill_at(n, writer)
            SCENARIOS[scenario](folder)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    died_at = os.read(reader, 100).decode() or None
    os.close(reader)
    ended = os.WIFSIGNALED(status) if died_at else os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    if not ended:
        raise SystemExit(f'{scenario} at call {n} ended with status {status}')
    return died_at


def sweep(scenario: str, start: Path, prefix: Path) -> list[Path]:
    """All n until the child finishes; the folders, in order."""
    folders = []
    for n in range(1, 1000):
        folder = prefix.with_name(f'{prefix.name}-{n}')
        died_at = run_case(scenario, start, folder, n)
        print(json.dumps([scenario, n, died_at, str(folder)]), flush=True)
        folders.append(folder)
        if died_at is None:
            return folders
    raise SystemExit(f'{scenario} never finished')


def shape(folder: Path) -> frozenset[str]:
    """What kind of things are left in a folder."""
    kinds = {name.split('~')[0] for name in os.listdir(folder)}
    return frozenset(kinds)


def main(work: Path) -> None:
    """Every scenario from a good checkpoint; then a second interruption on each kind of wreck that the first left."""
    torch.set_num_threads(1)
    start = work / 'start'
    save(start, 'a', 1)
    wrecks: dict[frozenset[str], Path] = {}
    for scenario in SCENARIOS:
        for folder in sweep(scenario, start, work / scenario):
            if scenario == 'replace':
                wrecks.setdefault(shape(folder), folder)
    for index, wreck in enumerate(wrecks.values()):
        copy = work / f'wreck{index}'
        shutil.copytree(wreck, copy)
        sweep('next', copy, work / f'again{index}')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
