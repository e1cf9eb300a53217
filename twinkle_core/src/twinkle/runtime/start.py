"""`initialize`: from arguments to a run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.current import get_runtime, set_runtime
from twinkle.device_mesh import DeviceGroup, DeviceMesh
from twinkle.errors import ConfigError, MeshError
from twinkle.launcher import rank, world_size
from twinkle.logging import get_logger
from twinkle.runtime.processes import claim_device, join_processes
from twinkle.runtime.run import Runtime
from twinkle.runtime.seeds import check_seed, seed_everything
from twinkle.tracker import MetricsLog, Tracker

if TYPE_CHECKING:
    from twinkle.runtime.executor import Executor

__all__ = ['initialize', 'shutdown']

logger = get_logger('twinkle.runtime')

_TIMEOUT = datetime.timedelta(minutes=30)
_LONGEST = datetime.timedelta(days=365).total_seconds()


def initialize(
    mode: str | Executor | type[Executor] = 'local',
    groups: Sequence[DeviceGroup] | None = None,
    global_device_mesh: DeviceMesh | None = None,
    *,
    seed: int | None = None,
    full_determinism: bool = False,
    output_dir: str | Path | None = None,
    trackers: Sequence[str | Tracker | type[Tracker]] | None = None,
    timeout: float | datetime.timedelta | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Runtime:
    """Start a run. Optional for one process; under torchrun it joins the processes.

    Args:
        mode: a name in the registry `executors`: `local`, or what an installed package brings.
        groups: named device groups, for executors that place models.
        global_device_mesh: the mesh of models that are given none. By default all ranks are data-parallel: those that are running,
            or, for an executor that starts workers, those of `groups`.
        seed: seeds Python, NumPy and PyTorch, on every rank alike.
        full_determinism: have PyTorch use deterministic algorithms only, and raise where there is none. The seed is then 0 by default.
        output_dir: the run's folder; `metrics.jsonl` is written there.
        trackers: names or instances of the registry `trackers`.
        timeout: seconds (or a timedelta) after which a collective call that is stuck raises; 30 minutes by default.
        config: what trackers show as the run's configuration.
        **options: go to the executor.

    Raises:
        MeshError: the mesh is not for as many processes as are running, or has devices that this machine has not.
        UnknownNameError, MissingPackageError: an unknown mode or tracker, or one whose package is not installed.
        StateError: called a second time without `shutdown()`.
        ConfigError: any other argument that cannot work. Nothing has been started then.
    """
    from twinkle import registry

    set_runtime(get_runtime())  # raises where there is one
    executor: Executor = registry.executors.build(mode)
    named = _check_groups(groups or ())
    built = _build_trackers(trackers or (), output_dir)
    limit = _as_timedelta(timeout)
    mesh = _check_mesh(global_device_mesh, executor, named)
    if full_determinism and seed is None:
        seed = 0
    if seed is not None:
        check_seed(seed)
    folder = _make_folder(output_dir)

    with ExitStack() as ending:  # what was started is let go if a later part fails, or when the run ends
        executor.start(mesh, named, options)
        ending.callback(executor.shutdown)
        device = 'cpu' if executor.is_remote else claim_device(mesh.device_type)
        leave = None if executor.is_remote else join_processes(mesh.device_type, limit)
        if leave is not None:
            ending.push(leave)
        if seed is not None:
            seed_everything(seed, full_determinism=full_determinism)
        if folder is not None and rank() == 0:
            for tracker in built:
                tracker.start(folder, dict(config or {}))
                ending.callback(_finish, tracker)
        return Runtime(
            mode if isinstance(mode, str) else type(executor).__name__,
            executor,
            mesh,
            groups=named,
            device=device,
            seed=seed,
            output_dir=folder,
            trackers=built,
            ending=ending.pop_all(),
        )


def shutdown() -> None:
    """End the run that `initialize` started, if there is one."""
    runtime = get_runtime()
    if runtime is not None:
        runtime.shutdown()


def _finish(tracker: Tracker) -> None:
    try:
        tracker.finish()
    except Exception:
        logger.exception('%s failed to finish; what it had not sent yet may be missing.', type(tracker).__name__)


def _check_groups(groups: Sequence[DeviceGroup]) -> tuple[DeviceGroup, ...]:
    for group in groups:
        if not isinstance(group, DeviceGroup):
            raise ConfigError(f'groups={groups!r} must be a list of DeviceGroup.')
    names = [group.name for group in groups]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f'groups names {", ".join(map(repr, twice))} more than once. Give each DeviceGroup a name of its own.'
        )
    return tuple(groups)


def _build_trackers(trackers: Sequence[Any], output_dir: str | Path | None) -> list[Tracker]:
    from twinkle import registry

    if isinstance(trackers, str):
        raise ConfigError(f'trackers={trackers!r} must be a list: [{trackers!r}].')
    built = [registry.trackers.build(tracker) for tracker in trackers]
    if output_dir is None:
        if built:
            raise ConfigError('trackers need a folder for the run: pass output_dir=...')
        return []
    return [MetricsLog(), *built]


def _as_timedelta(timeout: Any) -> datetime.timedelta:
    if timeout is None:
        return _TIMEOUT
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout < _LONGEST:
        limit = datetime.timedelta(seconds=timeout)
    else:
        limit = timeout
    if not isinstance(limit, datetime.timedelta) or limit <= datetime.timedelta(0):
        raise ConfigError(f'timeout={timeout!r} must be a number of seconds above 0, or a timedelta.')
    return limit


def _check_mesh(mesh: DeviceMesh | None, executor: Executor, groups: Sequence[DeviceGroup]) -> DeviceMesh:
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f'global_device_mesh={mesh!r} must be a DeviceMesh: DeviceMesh.from_sizes(...).')
    if executor.is_remote:
        if mesh is not None or not groups:
            return mesh or DeviceMesh.from_sizes()
        types = {group.device_type for group in groups}
        if len(types) > 1:
            raise MeshError(
                f'groups are of several device types ({", ".join(sorted(types))}): pass global_device_mesh.'
            )
        return DeviceMesh.from_sizes(
            world_size=len({r for group in groups for r in group.ranks}), device_type=types.pop()
        )
    running = world_size()
    if mesh is None:
        return DeviceMesh.from_sizes(world_size=running)
    mesh.check_world(running)
    return mesh


def _make_folder(output_dir: str | Path | None) -> Path | None:
    if output_dir is None:
        return None
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'output_dir={str(output_dir)!r} cannot be made a folder: {error}') from error
    return folder
