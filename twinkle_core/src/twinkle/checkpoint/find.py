"""From a path that a user gave to a checkpoint that is whole."""

from __future__ import annotations

import time
from pathlib import Path

from twinkle.checkpoint.manifest import MANIFEST, read_manifest, verify
from twinkle.checkpoint.names import LATEST, Sibling, checkpoint_path, siblings
from twinkle.errors import CheckpointError, NameNotAllowedError
from twinkle.logging import get_logger

__all__ = ['find_checkpoint', 'latest_checkpoint', 'latest_name', 'moved_aside']

logger = get_logger('twinkle.checkpoint')

_SWAP_SECONDS = 2.0  # two renames take microseconds; a saver that is alive and slower than this is stuck


def find_checkpoint(path: str | Path, *, require_manifest: bool = True, checksums: bool = True) -> Path:
    """The folder to load from: `path` itself if it is a checkpoint, or the one that its file `latest` names.

    A checkpoint whose replacement was interrupted between two renames is found where it was moved aside.

    Args:
        require_manifest: False also takes a folder that other tools wrote (Transformers, PEFT), for its weights.
        checksums: compare every file's CRC-32 with the manifest (a read of the whole checkpoint), not only sizes.

    Raises:
        CheckpointError: there is none, or it is incomplete; the file at fault is named.
    """
    path = Path(path)
    if path.is_dir() and not (path / MANIFEST).exists() and (require_manifest or not _holds_weights(path)):
        named = latest_checkpoint(path)
        if named is not None:
            path = named
    folder = path if path.is_dir() else _replaced(path)
    if folder is None:
        raise CheckpointError(f'There is no checkpoint at {path}.{_others(path.parent)}')
    if (folder / MANIFEST).exists():
        verify(folder, checksums=checksums)
    elif require_manifest:
        raise CheckpointError(
            f'{folder} is not a complete checkpoint of Twinkle: {MANIFEST} is missing, and so is a file {LATEST!r} '
            'that names one.'
            f'{_others(folder)} Weights that other tools wrote are taken by load(), or as a model_id.'
        )
    return folder


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The checkpoint that `output_dir/latest` names, or None if there is no such file. It is not verified.

    Raises:
        CheckpointError: the file names something that cannot be a checkpoint.
    """
    name = latest_name(Path(output_dir))
    if name is None:
        return None
    try:
        return checkpoint_path(output_dir, name)
    except NameNotAllowedError as error:
        raise CheckpointError(f'{Path(output_dir) / LATEST} does not name a checkpoint: {error}') from error


def latest_name(output_dir: Path) -> str | None:
    """What the file `latest` says."""
    try:
        return (output_dir / LATEST).read_text(encoding='utf-8').strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f'{output_dir / LATEST} cannot be read: {error}. Name a checkpoint folder instead.'
        ) from error


def moved_aside(output_dir: Path, name: str | None = None) -> list[Sibling]:
    """Checkpoints (of this name) that saves have moved aside, the newest first."""
    found = []
    for sibling in siblings(output_dir, 'old'):
        if name in (None, sibling.name):
            try:
                found.append((read_manifest(sibling.path).sequence, sibling))
            except CheckpointError:
                continue  # half deleted
    return [sibling for _, sibling in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _replaced(path: Path) -> Path | None:
    """Where an interrupted save left the old checkpoint of this name; waits for a save that is only just swapping."""
    deadline = time.monotonic() + _SWAP_SECONDS
    while True:
        old = moved_aside(path.parent, path.name)
        if path.is_dir():
            return path
        if not old:
            return None
        if not old[0].owner_may_live() or time.monotonic() > deadline:
            logger.warning('%s: its replacement was interrupted; using the old checkpoint, %s', path, old[0].path)
            return old[0].path
        time.sleep(0.02)


def _holds_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in ('config.json', 'adapter_config.json')) or any(
        folder.glob('*.safetensors')
    )


def _others(output_dir: Path) -> str:
    """A sentence on the checkpoints that are there."""
    names = sorted(p.parent.name for p in output_dir.glob(f'*/{MANIFEST}') if not p.parent.name.startswith('.'))
    return f' In {output_dir} there are {names}.' if names else ''
