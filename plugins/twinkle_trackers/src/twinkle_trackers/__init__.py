"""Experiment trackers: each forwards a run's metrics to a library of its own, which is imported when the run starts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from twinkle.errors import MissingPackageError, StateError
from twinkle.tracker import Tracker

__all__ = ['SwanLabTracker', 'TensorBoardTracker', 'TrackioTracker', 'WandbTracker']


def _require(module: str, extra: str) -> Any:
    """Import a tracker's library.

    Raises:
        MissingPackageError: with the line that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f'The tracker {extra!r} needs {module.partition(".")[0]}: pip install twinkle-trackers[{extra}]'
        ) from error


class TensorBoardTracker(Tracker):
    """Writes TensorBoard event files into `<run folder>/tensorboard`.

    Args:
        log_dir: another folder for them.
        flush_secs: how often they are flushed.
    """

    def __init__(self, log_dir: str | Path | None = None, flush_secs: int = 30) -> None:
        self._log_dir = log_dir
        self._flush_secs = flush_secs
        self._writer: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        _require('tensorboard', 'tensorboard')
        writer = _require('torch.utils.tensorboard', 'tensorboard').SummaryWriter
        self._writer = writer(log_dir=str(self._log_dir or run_dir / 'tensorboard'), flush_secs=self._flush_secs)
        if config:
            self._writer.add_text('config', '\n'.join(f'    {key}: {value}' for key, value in sorted(config.items())))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            raise StateError('TensorBoardTracker.log() comes after start().')
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _RunTracker(Tracker):
    """A library of the shape `run = module.init(...); run.log(metrics, step=step); run.finish()`.

    Args:
        project: the project that runs are listed under.
        **options: go to the library's `init`.
    """

    module: ClassVar[str]
    folder_option: ClassVar[str | None] = None

    def __init__(self, project: str = 'twinkle', **options: Any) -> None:
        self._options = {'project': project, **options}
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        library = _require(self.module, self.module)
        folder = {self.folder_option: str(run_dir)} if self.folder_option is not None else {}
        self._run = library.init(**{**folder, 'config': dict(config), **self._options})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._run is None:
            raise StateError(f'{type(self).__name__}.log() comes after start().')
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class WandbTracker(_RunTracker):
    """Weights & Biases. `mode='offline'` keeps everything in the run's folder."""

    module = 'wandb'
    folder_option = 'dir'


class SwanLabTracker(_RunTracker):
    """SwanLab. `mode='local'` keeps everything in the run's folder."""

    module = 'swanlab'
    folder_option = 'logdir'


class TrackioTracker(_RunTracker):
    """trackio, which keeps its data on this machine unless told otherwise."""

    module = 'trackio'
