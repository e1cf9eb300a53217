"""The base of experiment trackers, which are parts of the registry `trackers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ['Tracker']


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
