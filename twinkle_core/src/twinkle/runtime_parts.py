"""Names registered at run time, as seen from child processes.

A forked worker inherits them. A spawned one starts anew: there a part is imported under its own name when it is first asked for, and
asking for one that has none (a lambda, an instance) says that it exists in the parent only, instead of that it is unknown.
The parent leaves word in an environment variable, which children inherit.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from twinkle.errors import ConfigError, PluginLoadError
from twinkle.parts import PartEntry, fold

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ['VARIABLE', 'explain_missing', 'inherited', 'publish', 'withdraw']

VARIABLE = 'TWINKLE_RUNTIME_PARTS'
"""For launchers whose workers do not inherit the environment: hand this variable on to them."""

Table = dict[str, dict[str, 'str | None']]

_lock = threading.RLock()
_own: Table = {}


class _InheritedEntry(PartEntry):
    """A part that the parent process registered."""

    def load(self) -> Any:
        if self.part is None and self.target.startswith('__main__:') and not _same_main():
            self.error = PluginLoadError(_explain(self.name))
            raise self.error
        try:
            return super().load()
        except PluginLoadError as error:
            raise PluginLoadError(f'{_explain(self.name)} {error}') from error.__cause__


def publish(entry: PartEntry) -> None:
    """Leave word of a registration for child processes."""
    with _lock:
        _inherited()  # read before it is written
        _own.setdefault(entry.kind, {})[entry.name] = _address(entry)
        _write()


def withdraw(entry: PartEntry) -> None:
    """Take that word back."""
    with _lock:
        _own.get(entry.kind, {}).pop(entry.name, None)
        _write()


def inherited(kind: str) -> list[PartEntry]:
    """Entries that a parent process registered and that have a name to be imported by. Nothing is imported here."""
    return [
        _InheritedEntry(kind, name, target, 'runtime')
        for name, target in _inherited()[0].get(kind, {}).items()
        if target is not None
    ]


def explain_missing(kind: str, folded: str) -> str:
    """A sentence for a name that the parent registered and that cannot be brought here; empty otherwise."""
    for name, target in _inherited()[0].get(kind, {}).items():
        if fold(name) == folded and target is None:
            return _explain(name)
    return ''


def _explain(name: str) -> str:
    return (
        f'{name!r} was registered at run time in the parent process, and this worker cannot import it: define it at the top level of '
        'a module that workers can import (no lambda, no instance, nothing inside a function), or declare it as an entry point.'
    )


def _address(entry: PartEntry) -> str | None:
    """`module:Name` if a child can import the part by it."""
    part = entry.part
    if not hasattr(part, '__qualname__') or '<' in entry.target:
        return None
    module_name, _, path = entry.target.partition(':')
    module_name = '__main__' if module_name == '__mp_main__' else module_name
    found: Any = sys.modules.get(module_name)
    for name in path.split('.'):
        if found is None:
            break
        found = getattr(found, name, None)  # None: a decorator runs before the name that it decorates is bound
    return f'{module_name}:{path}' if found is None or found is part else None


@lru_cache(maxsize=1)
def _inherited() -> tuple[Table, str | None]:
    """What the parent left, and its main file. Read once: afterwards the variable holds this process's own word, too."""
    text = os.environ.get(VARIABLE)
    if not text:
        return {}, None
    try:
        content: Mapping[str, Any] = json.loads(text)
        return {kind: dict(names) for kind, names in content['parts'].items()}, content['main']
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f'The environment variable {VARIABLE} cannot be read ({error}). Twinkle writes it for its child processes; unset it.'
        ) from error


def _write() -> None:
    table = {kind: dict(names) for kind, names in _inherited()[0].items()}
    for kind, names in _own.items():
        table.setdefault(kind, {}).update(names)
    table = {kind: names for kind, names in table.items() if names}
    if table:
        os.environ[VARIABLE] = json.dumps({'main': _main_file(), 'parts': table})
    else:
        os.environ.pop(VARIABLE, None)


def _main_file() -> str | None:
    path = getattr(sys.modules.get('__main__'), '__file__', None)
    return None if path is None else os.path.abspath(path)


def _same_main() -> bool:
    """Whether this process runs the parent's script, as workers that multiprocessing spawns do."""
    theirs = _inherited()[1]
    return theirs is not None and theirs == _main_file()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_after_fork)
