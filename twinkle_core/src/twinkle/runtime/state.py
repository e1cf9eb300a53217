"""The one runtime of a process: which executor runs remote classes, which mesh is the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.errors import StateError

if TYPE_CHECKING:
    from twinkle.runtime.executor import Executor
    from twinkle.runtime.run import Runtime

__all__ = ['current_executor', 'get_runtime', 'set_runtime']

_runtime: Runtime | None = None


def get_runtime() -> Runtime | None:
    """The runtime that `initialize` started, or None."""
    return _runtime


def set_runtime(runtime: Runtime | None) -> None:
    """Make `runtime` the process's own; None ends it."""
    global _runtime
    if runtime is not None and _runtime is not None:
        raise StateError('twinkle.initialize() was called already in this process. Call shutdown() on its runtime first.')
    _runtime = runtime


def current_executor() -> Executor | None:
    """The executor of the runtime, or None before `initialize`: classes are then made in this process."""
    return None if _runtime is None else _runtime.executor
