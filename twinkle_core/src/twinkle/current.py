"""The one runtime of a process. It lies low, so that what runs under it can ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.errors import StateError

if TYPE_CHECKING:
    from twinkle.runtime.executor import Executor
    from twinkle.runtime.run import Runtime

__all__ = ['get_runtime', 'remote_executor', 'set_runtime']

_runtime: Runtime | None = None


def get_runtime() -> Runtime | None:
    """The runtime that `initialize` started, or None."""
    return _runtime


def set_runtime(runtime: Runtime | None) -> None:
    """Make `runtime` the process's own; None ends it.

    Raises:
        StateError: there is one already.
    """
    global _runtime
    if runtime is not None and _runtime is not None:
        raise StateError(
            'twinkle.initialize() was called already in this process. Call shutdown() on its runtime first, or use it as a context '
            'manager.'
        )
    _runtime = runtime


def remote_executor() -> Executor | None:
    """The executor, if it runs classes in workers; None where a plain call does it (also before `initialize`)."""
    return _runtime.executor if _runtime is not None and _runtime.executor.is_remote else None
