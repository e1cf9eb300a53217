"""Which process this is: what torchrun (or another launcher) says, or the process group once there is one."""

from __future__ import annotations

import os
import sys
from typing import Any

from twinkle.errors import ConfigError

__all__ = ['local_rank', 'rank', 'world_size']


def rank() -> int:
    """This process's number among those launched together; 0 without a launcher."""
    group = _process_group()
    return int(group.get_rank()) if group is not None else _read('RANK', 0)


def world_size() -> int:
    """How many processes were launched together; 1 without a launcher."""
    group = _process_group()
    return int(group.get_world_size()) if group is not None else _read('WORLD_SIZE', 1)


def local_rank() -> int:
    """This process's number on its machine, which is also its device's; 0 without a launcher."""
    return _read('LOCAL_RANK', 0)


def _process_group() -> Any:
    """`torch.distributed` if a program started it, which may be without these variables. Nothing is imported for it."""
    distributed = sys.modules.get('torch.distributed')
    return (
        distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None
    )


def _read(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None or text == '':
        return default
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < (1 if name == 'WORLD_SIZE' else 0):
        raise ConfigError(
            f'The environment variable {name}={text!r} is no such number. torchrun sets it; otherwise unset it.'
        )
    return number
