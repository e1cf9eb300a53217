"""Saving in a thread: the loop goes on while a snapshot is written."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from pathlib import Path

from twinkle.checkpoint.commit import check_target, publishing
from twinkle.errors import CheckpointError, StateError
from twinkle.logging import get_logger

__all__ = ['PendingSave', 'save_async', 'wait_for_saves']

logger = get_logger('twinkle.checkpoint')

_pending: dict[Path, PendingSave] = {}
_starting = threading.Lock()


class PendingSave:
    """A save in progress. Its error, if any, is raised once: by `wait`, or by the next save into that folder."""

    def __init__(
        self,
        write: Callable[[Path], None],
        path: Path,
        keep_last: int | None,
        set_latest: bool,
        then: Callable[[Path], None] | None = None,
    ) -> None:
        self.path = path
        self._write = write
        self._then = then
        self._options = (keep_last, set_latest)
        self._error: BaseException | None = None
        # Not a daemon: the interpreter waits for it, so a script that ends does not lose its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f'twinkle-save-{path.name}', daemon=False)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is in its place, and return it.

        Raises:
            TimeoutError: after `timeout` seconds; the save goes on.
            Exception: whatever went wrong while writing.
        """
        if not self.join(timeout):
            raise TimeoutError(
                f'The checkpoint {self.path} is not written after {timeout} s; it goes on in the background.'
            )
        error = self.take_error()
        if error is not None:
            raise error
        return self.path

    def join(self, timeout: float | None = None) -> bool:
        """Wait without raising what went wrong; whether it has ended.

        Raises:
            StateError: called by the save itself, which would wait for ever.
        """
        if self._thread is threading.current_thread():
            raise StateError(
                f'The save of {self.path} would wait for itself: write() of save_async() must not save into the same '
                'folder.'
            )
        self._thread.join(timeout)
        return self.done

    def take_error(self) -> BaseException | None:
        """The error, unless somebody was told of it already."""
        error, self._error = self._error, None
        return error

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def _run(self) -> None:
        keep_last, set_latest = self._options
        try:
            with publishing(self.path, keep_last=keep_last, set_latest=set_latest) as folder:
                self._write(folder)
            if self._then is not None:
                self._then(self.path)
        except BaseException as error:  # kept, and raised where somebody waits for it
            self._error = error
        del self._write  # lets go of the snapshot


def save_async(
    write: Callable[[Path], None],
    output_dir: str | Path,
    name: str,
    *,
    keep_last: int | None = None,
    set_latest: bool = True,
    then: Callable[[Path], None] | None = None,
) -> PendingSave:
    """`commit_checkpoint` in a thread: `write` fills the folder that it is given.

    `write` must work from a snapshot (`snapshot_state`, cloned weights), since training goes on meanwhile. One save at
    a time runs per output folder: another one first waits for it. At exit the interpreter waits too. `then` is called with the
    checkpoint's path once it is in its place.

    Raises:
        NameNotAllowedError, ConfigError: before anything is started.
        CheckpointError: the place is taken by something else, or the previous background save failed (its error is
            chained).
    """
    target = check_target(output_dir, name, keep_last)
    key, pending = _key(output_dir), PendingSave(write, target, keep_last, set_latest, then)
    while True:
        wait_for_saves(output_dir)
        with _starting:
            if key not in _pending:  # else another thread was quicker
                _pending[key] = pending
                pending.start()
                return pending


def wait_for_saves(output_dir: str | Path | None = None) -> None:
    """Wait for the background saves into `output_dir`, or for all of them.

    Raises:
        CheckpointError: one failed, and nobody was told yet.
    """
    keys = list(_pending) if output_dir is None else [_key(output_dir)]
    for pending in [_pending[key] for key in keys if key in _pending]:
        pending.join()
        with _starting:
            if _pending.get(_key(pending.path.parent)) is pending:
                del _pending[_key(pending.path.parent)]
        error = pending.take_error()
        if error is not None:
            raise CheckpointError(f'The background save of {pending.path} failed: {error!r}') from error


def _key(output_dir: str | Path) -> Path:
    return Path(output_dir).resolve()


@atexit.register
def _report() -> None:
    """Threads have ended by now; an error that nobody asked for is still told."""
    for pending in list(_pending.values()):
        error = pending.take_error() if pending.done else None
        if error is not None:
            logger.error('The background save of %s failed: %r', pending.path, error)
