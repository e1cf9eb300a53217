"""What each of two processes does for tests/core/test_runtime.py. Started by torchrun; writes what it saw to <folder>/rank<r>.json."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.helpers.trackers import Memory
from twinkle import DeviceMesh, hookspecs
from twinkle.errors import MeshError
from twinkle.plugins import get_hooks
from twinkle.runtime import default_device_mesh, get_runtime, initialize


def a_mesh_of_another_size(seen: dict[str, Any], folder: Path) -> None:
    """Refused before the processes have met, so that none waits for another."""
    try:
        initialize(global_device_mesh=DeviceMesh.from_sizes(dp_size=3, device_type='cpu'))
    except MeshError as error:
        seen['mismatch'] = str(error)
    seen['met_after_mismatch'] = dist.is_initialized()
    seen['default_mesh_before'] = default_device_mesh().world_size


def a_run(seen: dict[str, Any], folder: Path) -> None:
    """Processes meet, seeds agree, rank 0 logs, everything is let go."""
    tracker = Memory()
    mesh = DeviceMesh.from_sizes(tp_size=2, device_type='cpu')
    with initialize(global_device_mesh=mesh, seed=7, output_dir=folder / 'run', trackers=[tracker]) as runtime:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        seen['run'] = {
            'backend': dist.get_backend(),
            'world': dist.get_world_size(),
            'sum': total.item(),
            'numbers': [random.random(), float(np.random.rand()), torch.rand(()).item()],
            'device': runtime.device,
            'default_mesh': repr(default_device_mesh()),
        }
        runtime.log({'loss': 1.0 + dist.get_rank()}, step=1)
    seen['run']['tracker'] = tracker.calls
    seen['run']['over'] = [dist.is_initialized(), get_runtime() is None]


def a_failure_on_one_rank(seen: dict[str, Any], folder: Path) -> None:
    """The rank that fails reports it; its own error is what ends it. A second run in the same processes works."""
    failures: list[str] = []

    class Observer:
        @hookspecs.hookimpl
        def run_failed(self, error: BaseException) -> None:
            failures.append(repr(error))

    get_hooks().register(Observer())
    try:
        with initialize():
            seen['second_world'] = dist.get_world_size()
            if dist.get_rank() == 1:
                raise ValueError('rank 1 only')
    except ValueError as error:
        seen['raised'] = str(error)
    seen['failures'] = failures
    seen['left_after_failure'] = not dist.is_initialized()


def somebody_elses_group(seen: dict[str, Any], folder: Path) -> None:
    """A process group that the program started is used, and stays."""
    dist.init_process_group('gloo')
    with initialize():
        pass
    seen['kept'] = dist.is_initialized()
    dist.destroy_process_group()


def a_stuck_call(seen: dict[str, Any], folder: Path) -> None:
    """A rank that waits for another raises after the timeout, not after half an hour."""
    rank = int(os.environ['RANK'])
    done = folder / 'rank0-gave-up'
    started = time.monotonic()
    with initialize(timeout=2):
        if rank == 0:
            try:
                dist.all_reduce(torch.zeros(1))
            except RuntimeError as error:
                seen['stuck'] = str(error)
            seen['waited'] = time.monotonic() - started
            done.touch()
        while not done.exists() and time.monotonic() - started < 60:
            time.sleep(0.05)


def main() -> None:
    """Every case, in one launch: starting a process costs seconds."""
    folder = Path(sys.argv[1])
    seen: dict[str, Any] = {}
    for case in (a_mesh_of_another_size, a_run, a_failure_on_one_rank, somebody_elses_group, a_stuck_call):
        case(seen, folder)
    (folder / f'rank{os.environ["RANK"]}.json').write_text(json.dumps(seen))


if __name__ == '__main__':
    main()
