"""What the rest needs of a file system: durable writes, locks, and deletion that never leaves half a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from twinkle.checkpoint.names import new_sibling
from twinkle.logging import get_logger

__all__ = ['discard', 'hold', 'locked', 'sync', 'write_durably']

logger = get_logger('twinkle.checkpoint')


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    if os.name == 'nt' and path.is_dir():
        return  # Windows has no handle on a folder that could be flushed
    descriptor = os.open(path, os.O_RDONLY if os.name != 'nt' else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a small text file and force it to the disk."""
    with open(path, 'w', encoding='utf-8', newline='\n') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def discard(path: Path, name: str) -> None:
    """Delete the checkpoint `name` at `path`: first out of sight, so that half of it is never taken for the whole."""
    try:
        if path.is_symlink():
            path.unlink()
            return
        trash = new_sibling(path.with_name(name), 'trash')
        os.rename(path, trash)
        shutil.rmtree(trash)
    except FileNotFoundError:
        return  # another process was quicker
    except OSError as error:
        # What was to be kept is safe already, so a run need not end over this; the next save tries again.
        logger.warning('%s could not be deleted: %s', path, error)


@contextlib.contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Keep other savers of the same output folder out. The system drops the lock when its process dies."""
    lock = FileLock(str(output_dir / '.twinkle.lock'))
    try:
        lock.acquire()
    except NotImplementedError:
        warnings.warn(
            f'{output_dir}: this file system keeps no locks, so let only one process at a time save there.',
            stacklevel=2,
        )
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Mark a folder as being written, for cleaners that cannot see this process (in another container)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks: the process id in the name is the mark
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
