"""This process among those that torchrun started: its device, and the process group."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from twinkle.errors import ConfigError, MeshError
from twinkle.launcher import local_rank, world_size

__all__ = ['claim_device', 'join_processes']

Leave = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]

# Tensors on the CPU take gloo whatever the device is: counts and metrics are reduced without a copy to it.
_BACKENDS = {'cpu': 'gloo', 'cuda': 'cpu:gloo,cuda:nccl', 'npu': 'cpu:gloo,npu:hccl'}


_GROUPS = itertools.count()
_STORES: dict[tuple[str | None, str | None], tuple[Any, int, int]] = {}


def claim_device(device_type: str) -> str:
    """The device of this process (`cpu`, `cuda:1`), by its number on this machine; it is made the current one.

    Raises:
        MeshError: there is no such device here.
    """
    if device_type == 'cpu':
        return 'cpu'
    import torch

    module = getattr(torch, device_type, None)
    there = module.device_count() if module is not None and module.is_available() else 0
    index = local_rank()
    if module is None or index >= there:
        raise MeshError(
            f'The mesh has device_type={device_type!r}, this process needs device {index} (LOCAL_RANK), and {there} can be seen here. '
            f"Launch at most {there} process(es) on this machine, or use device_type='cpu'."
        )
    module.set_device(index)
    return f'{device_type}:{index}'


def join_processes(device_type: str, timeout: datetime.timedelta) -> Leave | None:
    """Start the default process group where a launcher started this process. Returns how to leave it, if it was started here.

    Raises:
        ConfigError: the launcher's environment variables are incomplete.
    """
    if world_size() == 1 and 'TORCHELASTIC_RUN_ID' not in os.environ:  # torchrun of one process is launched too
        return None
    import torch.distributed as dist

    if dist.is_initialized():
        return None
    try:
        store, rank, size = _meet(timeout)
    except ValueError as error:
        raise ConfigError(
            f'WORLD_SIZE={world_size()} says that processes were launched together, and they cannot meet: {error}. Launch with '
            f'torchrun --nproc-per-node {world_size()}, or unset WORLD_SIZE.'
        ) from error
    # The store outlives a group. Without a prefix of its own, a second group would read addresses of the first one.
    store = dist.PrefixStore(f'twinkle/{next(_GROUPS)}', store)  # type: ignore[attr-defined]
    dist.init_process_group(_BACKENDS[device_type], store=store, rank=rank, world_size=size, timeout=timeout)
    return _leave if device_type == 'cpu' else _leave_accelerators


def _meet(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """The store through which processes find each other, rank, and world size. It is kept: its address can be taken only once."""
    from torch.distributed.rendezvous import rendezvous

    address = (os.environ.get('MASTER_ADDR'), os.environ.get('MASTER_PORT'))
    if address not in _STORES:
        _STORES[address] = next(rendezvous('env://', timeout=timeout))
    store, rank, size = _STORES[address]
    store.set_timeout(timeout)
    return store, rank, size


def _leave(kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_accelerators(
    kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
) -> None:
    # NCCL waits for what the others still have to send. After a failure here they never will: end, and let the launcher end them.
    if error is None:
        _leave(kind, error, traceback)
