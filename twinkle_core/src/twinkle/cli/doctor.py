"""Load everything that is installed, in a process of its own, and say what is wrong and how to mend it.

Run as a module (`python -m twinkle.cli.doctor`) it is that process: it prints the report as JSON on its last line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from twinkle.errors import TwinkleError

__all__ = ['examine', 'examine_here']

Report = dict[str, list[dict[str, Any]]]


def examine(timeout: float) -> Report:
    """The report, from a fresh process: a plugin that crashes or hangs on import does not take this one along."""
    empty: Report = {'distributions': [], 'failures': [], 'conflicts': [], 'warnings': []}
    try:
        done = subprocess.run(
            [sys.executable, '-m', 'twinkle.cli.doctor'], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        last = _last_started(error.stderr)
        return {
            **empty,
            'failures': [
                _problem('', '', f'Loading did not end within {timeout:g} s; the last part begun was {last}.')
            ],
        }
    if done.returncode != 0:
        last = _last_started(done.stderr)
        return {
            **empty,
            'failures': [
                _problem('', '', f'Loading {last} ended the process (exit {done.returncode}). {done.stderr[-500:]}')
            ],
        }
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


def _last_started(stderr: str | bytes | None) -> str:
    text = stderr.decode(errors='replace') if isinstance(stderr, bytes) else stderr or ''
    begun = [line.removeprefix('loading ') for line in text.splitlines() if line.startswith('loading ')]
    return begun[-1] if begun else '(none)'


def examine_here() -> Report:
    """Load every part in this process."""
    from twinkle.errors import AmbiguousNameError
    from twinkle.registry import registries

    seconds: dict[tuple[str, str], list[float]] = {}
    failures, conflicts = [], []
    for registry in registries.values():
        asked = set()
        for entry in registry.entries():
            if entry.state == 'disabled':
                continue
            print(f'loading {entry.kind}:{entry.name} of {entry.distribution}', file=sys.stderr, flush=True)
            start = time.perf_counter()
            try:
                registry.check(entry.load(), name=entry.name, entry=entry)
            except TwinkleError as error:
                failures.append(
                    _problem(entry.kind, f'{entry.name} ({entry.distribution} {entry.version})', str(error))
                )
            seconds.setdefault((entry.distribution, entry.version), []).append(time.perf_counter() - start)
            if entry.name not in asked:
                asked.add(entry.name)
                try:
                    registry.find(entry.name)
                except AmbiguousNameError as error:
                    conflicts.append(_problem(entry.kind, entry.name, str(error)))
    return {
        'distributions': [
            {'distribution': name, 'version': version, 'parts': len(times), 'seconds': sum(times)}
            for (name, version), times in sorted(seconds.items())
        ],
        'failures': failures,
        'conflicts': conflicts,
        'warnings': _other_twinkles(),
    }


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


if __name__ == '__main__':
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):  # what plugins print on import is not the report
        found = examine_here()
    print(json.dumps(found))
