"""A run: its mesh, executor, folder, log and trackers."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from twinkle.current import get_runtime, set_runtime
from twinkle.device_mesh import DeviceGroup, DeviceMesh
from twinkle.errors import ConfigError
from twinkle.launcher import rank
from twinkle.logging import get_logger

if TYPE_CHECKING:
    from twinkle.runtime.executor import Executor
    from twinkle.tracker import Tracker

__all__ = ['Runtime']

logger = get_logger('twinkle.runtime')


class Runtime:
    """A run. As a context manager it ends the run, and reports a failure to plugins (hook `run_failed`).

    Made by `twinkle.initialize`. Without a `with`, the run ends with `shutdown()`, or with the process.

    Attributes:
        mode: the name of the executor.
        executor: who runs remote classes.
        device_mesh: the mesh of models that are given none.
        groups: the named device groups.
        device: this process's device: `cpu`, `cuda:0`, ...
        seed: the seed that was given, if one was.
        output_dir: the run's folder, if it has one.
    """

    def __init__(
        self,
        mode: str,
        executor: Executor,
        device_mesh: DeviceMesh,
        *,
        groups: Sequence[DeviceGroup] = (),
        device: str = 'cpu',
        seed: int | None = None,
        output_dir: Path | None = None,
        trackers: Sequence[Tracker] = (),
        ending: ExitStack | None = None,
    ) -> None:
        self.mode = mode
        self.executor = executor
        self.device_mesh = device_mesh
        self.groups = tuple(groups)
        self.device = device
        self.seed = seed
        self.output_dir = output_dir
        self._trackers = tuple(trackers)
        self._ending = ending or ExitStack()
        self._rank = rank()
        set_runtime(self)
        atexit.register(self._end_with_process)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log numbers of an optimizer step: a line of `metrics.jsonl` in the run's folder, every tracker, every observing plugin.

        Rank 0 logs; elsewhere nothing happens. What fails to log is reported, and does not end the run.

        Raises:
            ConfigError: a value that is no number (a tensor of one element is one), or a step that is none.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f'log(): step={step!r} must be an integer of at least 0.')
        numbers = {name: _as_number(name, value) for name, value in metrics.items()}
        if self._rank != 0:
            return
        for tracker in self._trackers:
            try:
                tracker.log(numbers, step)
            except Exception:
                logger.exception('%s failed to log step %d; the run goes on.', type(tracker).__name__, step)
        from twinkle.plugins import call_hook

        call_hook('metrics_logged', metrics=numbers, step=step)

    def shutdown(self) -> None:
        """End the run: checkpoints are written out, trackers finished, workers and the process group that `initialize` started let go.

        Once is enough.

        Raises:
            CheckpointError: a checkpoint that was being written in the background could not be.
        """
        try:
            if 'twinkle.checkpoint' in sys.modules:
                from twinkle.checkpoint import wait_for_saves

                wait_for_saves()
        finally:
            self._end(None, None, None)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or _is_planned(error):
            self.shutdown()
            return
        from twinkle.plugins import call_hook

        try:
            call_hook('run_failed', error=error, output_dir=None if self.output_dir is None else str(self.output_dir))
            self._end(kind, error, traceback)
        except Exception:  # the run's own error is the one to raise
            logger.exception('Ending the run after %s failed as well.', type(error).__name__)

    def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if get_runtime() is not self:
            return
        set_runtime(None)
        atexit.unregister(self._end_with_process)
        self._ending.__exit__(kind, error, traceback)

    def _end_with_process(self) -> None:
        error = getattr(sys, 'last_value', None)  # set where an error that nobody caught ends the process
        self._end(None if error is None else type(error), error, None)

    def __repr__(self) -> str:
        return (
            f'Runtime(mode={self.mode!r}, device_mesh={self.device_mesh!r}, device={self.device!r}, seed={self.seed!r})'
        )


def _is_planned(error: BaseException) -> bool:
    """Whether an exception is a way of ending, not a failure."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def _as_number(name: str, value: Any) -> float:
    if not isinstance(value, (bool, Real)) and getattr(value, 'shape', None) == () and hasattr(value, 'item'):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f'log(): {name}={value!r} is no number.')
    return value if isinstance(value, (int, float)) else float(value)
