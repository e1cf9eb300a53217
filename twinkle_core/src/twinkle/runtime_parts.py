"""Names registered at run time, as seen from child processes.

A forked worker inherits them. A spawned one starts anew: parts that can be imported under their own name are registered there too,
and asking for one that cannot (a lambda, an instance) says that it exists in the parent only, instead of that it is unknown.
The parent leaves word in an environment variable, which children inherit.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle.parts import PartEntry

__all__ = ['explain_missing', 'inherited', 'publish', 'withdraw']

VARIABLE = 'TWINKLE_RUNTIME_PARTS'
_OWN: set[tuple[str, str]] = set()


def publish(entry: PartEntry) -> None:
    """Leave word of a registration for child processes."""
    table = _table()
    table.setdefault(entry.kind, {})[entry.name] = entry.target if _importable(entry) else None
    _OWN.add((entry.kind, entry.name))
    os.environ[VARIABLE] = json.dumps(table)


def withdraw(entry: PartEntry) -> None:
    """Take that word back."""
    table = _table()
    table.get(entry.kind, {}).pop(entry.name, None)
    _OWN.discard((entry.kind, entry.name))
    table = {kind: names for kind, names in table.items() if names}
    if table:
        os.environ[VARIABLE] = json.dumps(table)
    else:
        os.environ.pop(VARIABLE, None)


def inherited(kind: str) -> list[PartEntry]:
    """Entries that a parent process registered and that can be imported here."""
    from twinkle.parts import PartEntry

    entries = []
    for name, target in _table().get(kind, {}).items():
        if target is None or (kind, name) in _OWN:
            continue
        part = _import(target)
        if part is not None:
            entries.append(PartEntry(kind, name, target, 'runtime', part=part))
    return entries


def explain_missing(kind: str, folded: str) -> str:
    """A sentence for a name that the parent registered and that could not be brought here; empty otherwise."""
    from twinkle.parts import fold

    for name in _table().get(kind, {}):
        if fold(name) == folded and (kind, name) not in _OWN:
            return (
                f'{name!r} was registered at run time in the parent process, and a spawned worker cannot import it: define it at the '
                'top level of a module (not in __main__, no lambda, no instance), or declare it as an entry point.'
            )
    return ''


def _table() -> dict[str, dict[str, Any]]:
    text = os.environ.get(VARIABLE)
    return json.loads(text) if text else {}


def _importable(entry: PartEntry) -> bool:
    return not entry.target.startswith('__main__:') and _import(entry.target) is entry.part


def _import(target: str) -> Any:
    module, _, path = target.partition(':')
    try:
        found: Any = importlib.import_module(module)
        for name in path.split('.'):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found
