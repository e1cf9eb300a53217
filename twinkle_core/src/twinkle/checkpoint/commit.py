"""Publishing a checkpoint: all of it or nothing, whatever interrupts, and never at an older one's expense.

The order matters. The folder is filled under a hidden name, forced to the disk, and given its manifest; then an
existing checkpoint of the name is moved aside, the new one takes its place, and `latest` is replaced. Only after that
is anything deleted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinkle.checkpoint.files import discard, hold, locked, sync, write_durably
from twinkle.checkpoint.find import latest_name, moved_aside
from twinkle.checkpoint.manifest import MANIFEST, Manifest, measure, read_manifest, verify, write_manifest
from twinkle.checkpoint.names import LATEST, checkpoint_path, new_sibling, siblings
from twinkle.errors import CheckpointError, ConfigError
from twinkle.logging import get_logger

__all__ = ['check_target', 'commit_checkpoint', 'publishing']

logger = get_logger('twinkle.checkpoint')


@contextmanager
def commit_checkpoint(
    output_dir: str | Path, name: str, *, keep_last: int | None = None, set_latest: bool = True
) -> Iterator[Path]:
    """Fill the folder that this yields; on leaving the context it becomes `output_dir/name`.

    After an exception the half-filled folder is gone, and what was there before is as it was.

    Args:
        keep_last: how many checkpoints of `output_dir` to keep, this one included; older ones are deleted. What
            `latest` names, what is incomplete, what Twinkle did not write, and what was renamed or copied by hand
            stays.
        set_latest: name this one in the file `latest`.

    Raises:
        NameNotAllowedError: `name` cannot be a checkpoint's.
        CheckpointError: something that is not a checkpoint is in the place, or an earlier background save failed.
    """
    from twinkle.checkpoint.background import wait_for_saves

    target = check_target(output_dir, name, keep_last)
    wait_for_saves(output_dir)
    with publishing(target, keep_last=keep_last, set_latest=set_latest) as folder:
        yield folder


def check_target(output_dir: str | Path, name: str, keep_last: int | None) -> Path:
    """The folder to write, after everything that can be checked beforehand."""
    target = checkpoint_path(output_dir, name)
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        raise ConfigError(
            f'keep_last={keep_last!r} must be an integer of at least 1, or None to keep every checkpoint.'
        )
    if target.exists() and not (target.is_dir() and ((target / MANIFEST).exists() or not any(target.iterdir()))):
        raise CheckpointError(
            f'{target} exists and is not a checkpoint of Twinkle (no {MANIFEST}), so it is not replaced. Choose '
            'another name, or move it away.'
        )
    return target


@contextmanager
def publishing(target: Path, *, keep_last: int | None, set_latest: bool) -> Iterator[Path]:
    """`commit_checkpoint` after its checks."""
    root = target.parent
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        _clean(root)
    temporary = new_sibling(target, 'tmp')
    temporary.mkdir()
    try:
        with hold(temporary):
            yield temporary
            files = measure(temporary)
            with locked(root):
                write_manifest(temporary, Manifest(target.name, _next_sequence(root), files))
                aside = _swap(temporary, target, set_latest=set_latest)
                if aside is not None:
                    discard(aside, target.name)
                if keep_last is not None:
                    _rotate(root, keep_last, target.name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # what resists is cleaned at the next save
        raise


def _swap(temporary: Path, target: Path, *, set_latest: bool) -> Path | None:
    """Put the new folder in its place and name it in `latest`; returns where the old one went, if there was one."""
    root, aside = target.parent, new_sibling(target, 'old')
    pending = new_sibling(root / LATEST, 'tmp')
    committed = False
    try:
        if set_latest:
            # Before the swap: a full disk shows here, while nothing has changed.
            write_durably(pending, target.name + '\n')
        if target.exists():
            os.rename(target, aside)
        os.rename(temporary, target)
        sync(root)
        if set_latest:
            os.replace(pending, root / LATEST)
        committed = True
        sync(root)
    except BaseException:
        # With `latest` the moment of truth is its replacement: once `pending` is gone, readers may hold the new
        # checkpoint.
        if pending.exists() or not (set_latest or committed):
            _undo(temporary, target, aside)
        pending.unlink(missing_ok=True)
        raise
    return aside if aside.exists() or aside.is_symlink() else None


def _undo(temporary: Path, target: Path, aside: Path) -> None:
    if target.exists() and not temporary.exists():
        os.rename(target, temporary)
    if aside.exists() and not target.exists():
        os.rename(aside, target)


def _clean(root: Path) -> None:
    """Remove what dead processes left; a checkpoint that was moved aside and never replaced goes back."""
    for old in moved_aside(root):
        if not old.owner_may_live() and not (root / old.name).exists():
            os.rename(old.path, root / old.name)
    for left in siblings(root, 'tmp', 'old', 'trash'):
        if left.owner_may_live():
            if left.days_old() > 1:
                logger.warning('%s was left by a save on %s; if that run is over, delete it', left.path, left.host)
            continue
        if left.path.is_file() or left.path.is_symlink():
            left.path.unlink(missing_ok=True)
        else:
            discard(left.path, left.name)


def _complete(root: Path) -> list[tuple[int, str]]:
    """Sequence and name of the complete checkpoints that were saved here, oldest first."""
    found = []
    for folder in root.iterdir():
        if folder.name.startswith('.') or not (folder / MANIFEST).is_file():
            continue
        try:
            manifest = verify(folder, checksums=False)
        except CheckpointError:
            continue  # incomplete: not counted, and not ours to delete
        if manifest.name == folder.name and not folder.is_symlink():
            found.append((manifest.sequence, folder.name))
    return sorted(found)


def _next_sequence(root: Path) -> int:
    sequences = [0]
    for path in root.glob(f'*/{MANIFEST}'):
        try:
            sequences.append(read_manifest(path.parent).sequence)
        except CheckpointError:
            continue  # a broken neighbour does not keep a new checkpoint from being written
    return max(sequences) + 1


def _rotate(root: Path, keep_last: int, just_written: str) -> None:
    spared = {latest_name(root), just_written}
    for _, name in _complete(root)[:-keep_last]:
        if name not in spared:
            discard(root / name, name)
