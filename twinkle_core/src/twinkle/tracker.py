"""The base of experiment trackers, which are parts of the registry `trackers`, and the plain log that every run with a folder has."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle.errors import StateError

__all__ = ['MetricsLog', 'Tracker']


class Tracker(ABC):
    """Shows a run's numbers somewhere. Called on rank 0 only."""

    @abstractmethod
    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """The run begins; `run_dir` exists. Libraries are imported here, not before."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers of an optimizer step."""

    @abstractmethod
    def finish(self) -> None:
        """The run is over. Called once, also after a failure."""


class MetricsLog(Tracker):
    """`metrics.jsonl` in the run's folder: one JSON object per line, `step` first.

    A resumed run in the same folder goes on in the same file. What is not finite is `null`: JSON has no NaN.
    """

    def __init__(self) -> None:
        self._path: Path | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._path = run_dir / 'metrics.jsonl'

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._path is None:
            raise StateError('MetricsLog.log() comes after start().')
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items() if name != 'step'}
        line = json.dumps({'step': step, **numbers}, allow_nan=False)
        with self._path.open(
            'a', encoding='utf-8'
        ) as file:  # opened for each line: all of it is there whatever happens next
            file.write(line + '\n')

    def finish(self) -> None:
        self._path = None
