"""`initialize` and the `Runtime` that it returns: processes, seeds, the run's folder, its log and trackers."""

from __future__ import annotations

import datetime
import json
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from twinkle.device_mesh import DeviceGroup, DeviceMesh
from twinkle.errors import ConfigError, MeshError
from twinkle.logging import get_logger, rank_zero
from twinkle.runtime.state import get_runtime, set_runtime

if TYPE_CHECKING:
    from twinkle.runtime.executor import Executor
    from twinkle.tracker import Tracker

__all__ = ['Runtime', 'default_device_mesh', 'initialize', 'seed_everything']

logger = get_logger('twinkle.runtime')


class Runtime:
    """A run: its mesh, executor, folder and trackers. As a context manager it ends the run, and reports a failure to plugins."""

    def __init__(
        self,
        mode: str,
        executor: Executor,
        device_mesh: DeviceMesh,
        groups: Sequence[DeviceGroup],
        output_dir: Path | None,
        trackers: Sequence[Tracker],
        owns_process_group: bool,
    ) -> None:
        self.mode = mode
        self.executor = executor
        self.device_mesh = device_mesh
        self.groups = tuple(groups)
        self.output_dir = output_dir
        self._trackers = tuple(trackers)
        self._owns_process_group = owns_process_group

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers of an optimizer step: a line of `metrics.jsonl` in the run's folder, every tracker, every observing plugin.

        Rank 0 logs; elsewhere nothing happens. A tracker that fails is reported and does not end the run.

        Raises:
            ConfigError: a value that is no number.
        """
        numbers = {}
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f'log(): {name}={value!r} is no number.')
            numbers[name] = value
        if not rank_zero():
            return
        if self.output_dir is not None:
            with (self.output_dir / 'metrics.jsonl').open('a', encoding='utf-8') as file:
                file.write(json.dumps({'step': step, **numbers}) + '\n')
        for tracker in self._trackers:
            try:
                tracker.log(numbers, step)
            except Exception:
                logger.exception('Tracker %s failed to log step %d; the run goes on.', type(tracker).__name__, step)
        from twinkle.plugins import call_hook

        call_hook('metrics_logged', metrics=numbers, step=step)

    def shutdown(self) -> None:
        """End the run: trackers are finished, workers and the process group that `initialize` started are let go."""
        if get_runtime() is not self:
            return
        set_runtime(None)
        with ExitStack() as stack:  # each is done even if another fails
            if self._owns_process_group:
                import torch.distributed as dist

                stack.callback(dist.destroy_process_group)
            stack.callback(self.executor.shutdown)
            for tracker in self._trackers:
                stack.callback(tracker.finish)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            from twinkle.plugins import call_hook

            call_hook('run_failed', error=error, output_dir=None if self.output_dir is None else str(self.output_dir))
        self.shutdown()


def initialize(
    mode: str = 'local',
    groups: Sequence[DeviceGroup] | None = None,
    global_device_mesh: DeviceMesh | None = None,
    *,
    seed: int | None = None,
    full_determinism: bool = False,
    output_dir: str | Path | None = None,
    trackers: Sequence[Any] | None = None,
    timeout: float = 1800.0,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Runtime:
    """Start a run. Optional for one process; under torchrun it joins the processes.

    Args:
        mode: a name in the registry `executors`: `local`, or what an installed package brings.
        groups: named device groups, for executors that place models.
        global_device_mesh: the mesh of models that are given none; by default all ranks are data-parallel.
        seed: seeds Python, NumPy and PyTorch, on every rank alike.
        full_determinism: have PyTorch use deterministic algorithms only, and raise where there is none.
        output_dir: the run's folder; `metrics.jsonl` is written there.
        trackers: names or instances of the registry `trackers`.
        timeout: seconds after which a collective call that is stuck raises.
        config: what trackers show as the run's configuration.
        **options: go to the executor.

    Raises:
        MeshError: the mesh is not for as many processes as are running.
        UnknownNameError, MissingPackageError: an unknown mode, or one whose package is not installed.
        StateError: called a second time without `shutdown()`.
    """
    from twinkle import registry

    if get_runtime() is not None:
        set_runtime(get_runtime())  # raises, with the way out
    executor = registry.executors.build(mode)
    if trackers and output_dir is None:
        raise ConfigError('trackers need a folder for the run: pass output_dir=...')
    built = [registry.trackers.build(tracker) for tracker in trackers or ()]
    if not timeout > 0:
        raise ConfigError(f'timeout={timeout!r} must be above 0 seconds.')
    mesh = global_device_mesh or default_device_mesh()
    world = _world_size()
    if not executor.is_remote:
        mesh.check_world(world)
    if seed is not None or full_determinism:
        seed_everything(0 if seed is None else seed, full_determinism=full_determinism)
    folder = None if output_dir is None else Path(output_dir)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    owns_group = not executor.is_remote and world > 1 and _join_processes(mesh, timeout)
    executor.start(mesh, groups or (), options)
    if rank_zero() and folder is not None:
        for tracker in built:
            tracker.start(folder, dict(config or {}))
    runtime = Runtime(mode, executor, mesh, groups or (), folder, built if rank_zero() else (), owns_group)
    set_runtime(runtime)
    return runtime


def default_device_mesh() -> DeviceMesh:
    """The runtime's mesh, else one with all ranks data-parallel."""
    runtime = get_runtime()
    return runtime.device_mesh if runtime is not None else DeviceMesh.from_sizes(world_size=_world_size())


def seed_everything(seed: int, *, full_determinism: bool = False) -> None:
    """Seed Python, NumPy and PyTorch; with `full_determinism` PyTorch raises where it has no deterministic algorithm."""
    import numpy as np
    import torch

    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError(f'seed={seed!r} must be an integer from 0 to 2**32 - 1.')
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if full_determinism:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # what cuBLAS needs for it
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _world_size() -> int:
    return int(os.environ.get('WORLD_SIZE', '1'))


def _join_processes(mesh: DeviceMesh, timeout: float) -> bool:
    """Start the default process group, unless there is one. Returns whether it was started here."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        if dist.get_world_size() != mesh.world_size:
            raise MeshError(f'The process group has {dist.get_world_size()} processes, the mesh {mesh.world_size}.')
        return False
    backend = {'cpu': 'gloo', 'cuda': 'cpu:gloo,cuda:nccl', 'npu': 'cpu:gloo,npu:hccl'}[mesh.device_type]
    if mesh.device_type == 'cuda':
        torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', '0')))
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    return True
