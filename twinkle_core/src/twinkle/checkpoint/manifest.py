"""The manifest of a checkpoint: what it consists of. It is written last, so a folder that has it was complete once."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from twinkle.checkpoint.files import sync, write_durably
from twinkle.errors import CheckpointError

__all__ = ['MANIFEST', 'FileEntry', 'Manifest', 'measure', 'read_manifest', 'verify', 'write_manifest']

MANIFEST = 'twinkle_manifest.json'

_VERSION = 1
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and CRC-32 of one file. A checksum against accidents, not against attackers."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's files by relative path, its name when it was saved, and its place in the order of saves there."""

    name: str
    sequence: int
    files: dict[str, FileEntry]


def measure(folder: Path) -> dict[str, FileEntry]:
    """Force everything in `folder` to the disk, and say what there is.

    Raises:
        CheckpointError: there is nothing, or something that is neither a file nor a folder.
    """
    entries: dict[str, FileEntry] = {}
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(
                    f'{relative} in {folder} is a link or a special file; a checkpoint holds plain files only.'
                )
            sync(path)
            entries[relative] = FileEntry(path.stat().st_size, _crc32(path))
        sync(Path(parent))
    if not entries:
        raise CheckpointError(f'Nothing was written into the checkpoint ({folder} is empty).')
    return entries


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, durably."""
    files = {path: {'size': entry.size, 'crc32': f'{entry.crc32:08x}'} for path, entry in manifest.files.items()}
    content = {'format_version': _VERSION, 'name': manifest.name, 'sequence': manifest.sequence, 'files': files}
    write_durably(folder / MANIFEST, json.dumps(content, indent=2) + '\n')
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`.

    Raises:
        CheckpointError: it is missing, broken, or of a newer Twinkle.
    """
    path = folder / MANIFEST
    try:
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f'{folder} is not a complete checkpoint of Twinkle: {MANIFEST} is missing.') from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f'{path} cannot be read: {error}. The checkpoint is broken; use another.') from error
    version = content.get('format_version') if isinstance(content, dict) else None
    if isinstance(version, int) and version > _VERSION:
        raise CheckpointError(
            f'{path} has format_version {version}; this Twinkle knows up to {_VERSION}. Upgrade twinkle-core to read '
            'it.'
        )
    try:
        files = {_inside(name): FileEntry(int(e['size']), int(e['crc32'], 16)) for name, e in content['files'].items()}
        return Manifest(str(content['name']), int(content['sequence']), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f'{path} is not a manifest: {error!r}. The checkpoint is broken; use another.') from error


def verify(folder: Path, *, checksums: bool = True) -> Manifest:
    """Compare `folder` with its manifest. Files that the manifest does not list are somebody's own, and are left out.

    Args:
        checksums: also read every file (about 1 GB/s) and compare its CRC-32; without it, presence and sizes.

    Raises:
        CheckpointError: a file is missing, or has another size or content. The file is named.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f'{folder} is broken: {name} is missing. Use another checkpoint.')
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f'{folder} is broken: {name} has {size} bytes and was saved with {entry.size}. Use another checkpoint.'
            )
        if checksums and _crc32(path) != entry.crc32:
            raise CheckpointError(
                f'{folder} is broken: the content of {name} has changed (its CRC-32 differs). Use another checkpoint.'
            )
    return manifest


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or '..' in path.parts or '\\' in name or ':' in name:
        raise ValueError(f'{name!r} is not a path inside the checkpoint')
    return name


def _crc32(path: Path) -> int:
    checksum = 0
    with open(path, 'rb') as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum
