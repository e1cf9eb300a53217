"""Load everything that is installed, in a process of its own, and say what is wrong and how to mend it.

Run as a module (`python -m twinkle.cli.doctor`) it is that process: it reads what to load from its input, and writes one line of JSON
for each part that it has loaded. If a part ends it or hangs, another process goes on with the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from twinkle.errors import TwinkleError

__all__ = ['HOOKS', 'examine', 'load_one']

Report = dict[str, list[dict[str, Any]]]
Job = dict[str, str]

HOOKS = 'hooks'
_STARTED = {'started': True}
_START = 120.0  # seconds for Python and PyTorch themselves, on a busy machine


def examine(timeout: float) -> Report:
    """The report on everything that is installed.

    Args:
        timeout: seconds that one part may take.
    """
    from twinkle.plugins import plugin_cache
    from twinkle.registry import registries

    jobs = _jobs()
    failures, seconds = [], []
    for job, took, problem in _load_all(jobs, timeout):
        seconds.append((job, took))
        if problem is not None:
            failures.append(
                _problem(job['kind'], f'{job["name"]} ({job["distribution"]} {job["version"]})'.strip(), problem)
            )
    unreadable = [
        _problem(
            '',
            name,
            f'Its entry points cannot be read, so nothing of it is found: {why}. Install it again: '
            f'pip install --force-reinstall {name}',
        )
        for name, why in plugin_cache.broken().items()
    ]
    conflicts = [
        _problem(registry.kind, name, str(error))
        for registry in registries.values()
        for name, error in registry.conflicts().items()
    ]
    return {
        'distributions': _by_distribution(seconds),
        'failures': [*unreadable, *failures],
        'conflicts': conflicts,
        'warnings': _other_twinkles(),
    }


def _jobs() -> list[Job]:
    """What is to be loaded: every part and hook that is not kept out, a distribution's own together."""
    from twinkle.parts import PartEntry
    from twinkle.plugins import HOOKS as GROUP
    from twinkle.plugins import plugin_cache
    from twinkle.registry import registries

    entries = [entry for registry in registries.values() for entry in registry.entries()]
    entries += [PartEntry.of_plugin(HOOKS, found) for found in plugin_cache.parts(GROUP)]
    return [
        {
            'kind': entry.kind,
            'name': entry.name,
            'target': entry.target,
            'distribution': entry.distribution,
            'version': entry.version,
        }
        for entry in sorted(entries, key=lambda entry: entry.distribution)
        if not entry.is_disabled and entry.source == 'plugin'
    ]


def _load_all(jobs: Sequence[Job], timeout: float) -> Iterator[tuple[Job, float, str | None]]:
    """Each job with its seconds and what went wrong; as many processes as it takes."""
    rest = list(jobs)
    while rest:
        start = time.perf_counter()
        with _Loader(rest, timeout) as loader:
            for result in loader:
                yield rest.pop(0), result['seconds'], result['problem']
                start = time.perf_counter()
        if rest:
            yield rest.pop(0), time.perf_counter() - start, loader.ended


class _Loader:
    """The process that loads, as an iterator over what it reports. `ended` says why it reported no more."""

    def __init__(self, jobs: Sequence[Job], timeout: float) -> None:
        self.ended = ''
        self._jobs = jobs
        self._timeout = timeout
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> _Loader:
        # What plugins print goes to a file: a pipe that nobody reads would block them.
        self._log = tempfile.TemporaryFile('w+')
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'twinkle.cli.doctor'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin:  # it ended at once: `ended` says why
            json.dump(list(self._jobs), self._process.stdin)
        return self

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put('')

    def __iter__(self) -> Iterator[dict[str, Any]]:
        timeout = max(self._timeout, _START)
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                self.ended = f'It did not load within {timeout:g} s.'
                return
            if not line:
                code = self._process.wait()
                self._log.seek(0)
                printed = self._log.read()[-500:].strip()
                self.ended = f'Loading it ended the process (exit {code}).{" It printed: " if printed else ""}{printed}'
                return
            result = json.loads(line)
            timeout = self._timeout
            if result != _STARTED:
                yield result

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()


def load_one(job: Job) -> None:
    """Load one part or hook in this process.

    Raises:
        TwinkleError: it cannot be used.
    """
    from twinkle.errors import UnknownNameError
    from twinkle.plugins import HOOKS as GROUP
    from twinkle.plugins import check_hooks, plugin_cache
    from twinkle.registry import registries

    if job['kind'] == HOOKS:
        for found in plugin_cache.parts(GROUP):
            if (found.name, found.target, found.dist.name) == (job['name'], job['target'], job['distribution']):
                check_hooks(found)
                return
    else:
        registry = registries[job['kind']]
        for entry in registry.entries():
            if (entry.name, entry.target, entry.distribution) == (job['name'], job['target'], job['distribution']):
                registry.check(entry.load(), name=entry.name, entry=entry)
                return
    raise UnknownNameError(f'{job["name"]!r} of {job["distribution"]} is not found in a fresh process.')


def _by_distribution(seconds: Sequence[tuple[Job, float]]) -> list[dict[str, Any]]:
    times: dict[tuple[str, str], list[float]] = {}
    for job, took in seconds:
        times.setdefault((job['distribution'], job['version']), []).append(took)
    return [
        {'distribution': name, 'version': version, 'parts': len(took), 'seconds': sum(took)}
        for (name, version), took in sorted(times.items())
    ]


def _other_twinkles() -> list[dict[str, Any]]:
    """Other distributions that install a package `twinkle`: whichever was installed last has overwritten the other's files."""
    from importlib.metadata import packages_distributions

    owners = {name for name in packages_distributions().get('twinkle', []) if name != 'twinkle-core'}
    return [
        _problem('', '', f'{name} also installs the package twinkle, and files of both are mixed: pip uninstall {name}, then pip install '
                 '--force-reinstall twinkle-core.')
        for name in sorted(owners)
    ]  # fmt: skip


def _problem(kind: str, name: str, problem: str) -> dict[str, Any]:
    return {'kind': kind, 'name': name, 'problem': problem}


def _serve() -> None:
    """Load what the input names, and report on what was standard output before plugins could print there."""
    with os.fdopen(os.dup(1), 'w') as report:
        os.dup2(2, 1)
        jobs = json.load(sys.stdin)
        with contextlib.suppress(
            Exception
        ):  # PyTorch first, so that its time is no plugin's; parts that need it report its errors
            import torch  # noqa: F401
        print(json.dumps(_STARTED), file=report, flush=True)
        for job in jobs:
            start, problem = time.perf_counter(), None
            try:
                load_one(job)
            except TwinkleError as error:
                problem = str(error)
            print(json.dumps({'seconds': time.perf_counter() - start, 'problem': problem}), file=report, flush=True)


if __name__ == '__main__':
    _serve()
