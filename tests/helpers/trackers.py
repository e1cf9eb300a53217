"""Trackers for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle.tracker import Tracker

__all__ = ['Memory']


class Memory(Tracker):
    """Keeps its calls; raises in those named by `failing`."""

    def __init__(self, failing: str = '') -> None:
        self.calls: list[Any] = []
        self.failing = failing

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._note('start', str(run_dir.name), dict(config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._note('log', dict(metrics), step)

    def finish(self) -> None:
        self._note('finish')

    def _note(self, name: str, *details: Any) -> None:
        self.calls.append([name, *details])
        if name == self.failing:
            raise OSError(f'{name} failed')
