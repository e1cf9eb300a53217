"""Names of checkpoints, and of the hidden siblings that a save works in."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twinkle.errors import NameNotAllowedError

__all__ = ['LATEST', 'Sibling', 'checkpoint_path', 'new_sibling', 'siblings']

LATEST = 'latest'
"""The file of an output folder that names its newest checkpoint."""

Role = Literal['tmp', 'old', 'trash']

_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_WINDOWS_DEVICES = re.compile(r'(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?', re.IGNORECASE)
_MAX_BYTES = 128  # leaves room for a sibling's suffix within the 255 of most file systems
_SIBLING = re.compile(
    r'\.(?P<name>.+)\.(?P<role>tmp|old|trash)~(?P<host>[^~]+)~(?P<pid>[0-9]+)~(?P<started>[0-9]+)~[0-9a-f]{8}'
)


def checkpoint_path(output_dir: str | Path, name: str) -> Path:
    """The folder `output_dir/name`. It need not exist.

    Raises:
        NameNotAllowedError: the name would leave `output_dir`, means something else there, or is no file name on some
            system.
    """
    problem = _problem(name)
    if problem:
        raise NameNotAllowedError(
            f'Checkpoint name {name!r} {problem}. A name is one folder inside output_dir; put a path into output_dir, '
            "for example save('step-100', output_dir='runs/a')."
        )
    return Path(output_dir) / name


def _problem(name: object) -> str | None:
    if not isinstance(name, str) or not name:
        return 'is not a non-empty string'
    forbidden = _FORBIDDEN.search(name)
    if forbidden:
        return f'contains {forbidden[0]!r}, which separates folders or is not allowed on Windows'
    if name.startswith('.'):
        return 'begins with a dot, which is kept for saves in progress'
    if name.endswith(('.', ' ')) or name.startswith(' '):
        return 'begins or ends with a space, or ends with a dot, which Windows drops'
    if name.casefold() == LATEST:
        return f'is the name of the {LATEST!r} file, which says which checkpoint is the newest'
    if _WINDOWS_DEVICES.fullmatch(name):
        return 'is the name of a device on Windows'
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return 'cannot be encoded as UTF-8'
    return f'is {length} bytes long; at most {_MAX_BYTES} are allowed' if length > _MAX_BYTES else None


@dataclass(frozen=True)
class Sibling:
    """A hidden folder beside checkpoints: one being written (`tmp`), moved aside (`old`) or being deleted (`trash`)."""

    path: Path
    name: str
    role: Role
    host: str
    pid: int
    started: int

    def days_old(self) -> float:
        """Days since it last changed; 0 if it is gone."""
        try:
            return (time.time() - self.path.stat().st_mtime) / 86400
        except FileNotFoundError:
            return 0.0

    def owner_may_live(self) -> bool:
        """Whether the process that made it may still run. Of another host nothing is known, so the answer is yes."""
        if self.host != _host():
            return True
        started = _started(self.pid)
        if started is None:
            return _is_locked(self.path)  # a process of another container may carry the same host name
        return started == self.started or _is_locked(self.path)


def new_sibling(folder: Path, role: Role) -> Path:
    """A fresh hidden path beside the checkpoint `folder`, marked with this process."""
    pid = os.getpid()
    mark = f'{_host()}~{pid}~{_started(pid) or 0}~{secrets.token_hex(4)}'
    return folder.with_name(f'.{folder.name}.{role}~{mark}')


def siblings(output_dir: Path, *roles: Role) -> list[Sibling]:
    """The hidden siblings of these roles in `output_dir`, by name. Nothing else there is ever one."""
    found = []
    for path in sorted(output_dir.iterdir()) if output_dir.is_dir() else []:
        match = _SIBLING.fullmatch(path.name)
        if match and match['role'] in roles:
            found.append(
                Sibling(path, match['name'], match['role'], match['host'], int(match['pid']), int(match['started']))
            )
    return found


def _host() -> str:
    return re.sub(r'[^A-Za-z0-9.-]', '-', socket.gethostname())[:40] or 'localhost'


def _started(pid: int) -> int | None:
    """When a process of this machine began, in ticks (0 where the system does not tell); None if it does not run.

    Process ids are used again, in containers after every restart, and the start tells such processes apart.
    """
    try:
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
        return None if fields[0] in 'ZX' else int(fields[19])  # a zombie has ended; nobody asked how
    except (OSError, IndexError, ValueError):
        return 0 if not Path('/proc/self/stat').exists() and _exists(pid) else None


def _exists(pid: int) -> bool:
    if os.name == 'nt':
        return True  # os.kill(pid, 0) would end the process there; not knowing, leave its folder
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_locked(folder: Path) -> bool:
    """Whether a process holds the lock that `commit` takes on the folder it writes."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # this file system keeps no locks
    finally:
        os.close(descriptor)
    return False
