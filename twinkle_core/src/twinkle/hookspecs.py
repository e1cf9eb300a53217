"""Moments of a run at which plugins may act (pluggy). Hooks observe or add; what is chosen by name is a registry entry.

A plugin is a module or object in the entry-point group `twinkle.hooks`, its functions marked with `hookimpl`:

    from twinkle.hookspecs import hookimpl

    @hookimpl
    def checkpoint_saved(path, step): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ['add_cli_commands', 'checkpoint_saved', 'hookimpl', 'metrics_logged', 'run_failed']

hookspec = pluggy.HookspecMarker('twinkle')
hookimpl = pluggy.HookimplMarker('twinkle')


@hookspec
def metrics_logged(metrics: Mapping[str, float], step: int) -> None:
    """Metrics were logged for an optimizer step."""


@hookspec
def checkpoint_saved(path: str, step: int) -> None:
    """A checkpoint is complete on disk."""


@hookspec
def run_failed(error: BaseException, output_dir: str | None) -> None:
    """A run within `twinkle.initialize(...)` ended with an exception."""


@hookspec
def add_cli_commands(commands: Any) -> None:
    """Add commands to the `twinkle` program. `commands` is the argparse sub-parsers object; set `run` as a parser default."""
