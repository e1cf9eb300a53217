"""Named groups of devices, and a drawing of which rank stands where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinkle.current import get_runtime
from twinkle.device_mesh.mesh import DeviceMesh, default_device_mesh
from twinkle.device_mesh.sizes import DIMS, EXPERT_DIMS, check_device_type
from twinkle.errors import MeshError

__all__ = ['DeviceGroup', 'get_device_placement']


@dataclass(frozen=True, init=False)
class DeviceGroup:
    """A named set of ranks, for placing models on a cluster.

    Args:
        name: what `remote_group=` of a model says.
        ranks: which devices of the cluster, or how many from 0 on.
        device_type: `cpu`, `cuda`, `npu`.

    Raises:
        MeshError: no name, no ranks, or ranks that are negative or named twice.
    """

    name: str
    ranks: tuple[int, ...]
    device_type: str

    def __init__(self, name: str, ranks: int | Iterable[int], device_type: str = 'cpu') -> None:
        if not isinstance(name, str) or not name:
            raise MeshError(f'A DeviceGroup needs a name, got {name!r}.')
        numbers = (
            tuple(range(ranks)) if isinstance(ranks, int) and not isinstance(ranks, bool) else _as_tuple(name, ranks)
        )
        wrong = [rank for rank in numbers if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0]
        if not numbers or wrong or len(set(numbers)) != len(numbers):
            raise MeshError(f'DeviceGroup {name!r}: ranks={ranks!r} must be one or more different integers from 0 on.')
        check_device_type(device_type)
        object.__setattr__(self, 'name', name)
        object.__setattr__(self, 'ranks', numbers)
        object.__setattr__(self, 'device_type', device_type)

    @property
    def size(self) -> int:
        """How many devices it has."""
        return len(self.ranks)


def get_device_placement(mesh: DeviceMesh | None = None, groups: Sequence[DeviceGroup] | None = None) -> str:
    """A drawing of which rank stands where: one line per rank, with its place along each dimension that is not 1.

    `data` is the data rank: lines with the same one read the same rows. What is left out is taken from `initialize`.
    """
    runtime = get_runtime()
    if groups is None:
        groups = runtime.groups if runtime is not None and mesh is None else ()
    mesh = default_device_mesh() if mesh is None else mesh
    dims = [dim for dim in (*DIMS, 'ulysses', *_expert_dims(mesh)) if getattr(mesh, f'{dim}_size') > 1]
    table = [['rank', *dims, 'data', *(['group'] if groups else [])]]
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        owners = '+'.join(group.name for group in groups if rank in group.ranks) or '-'
        table.append([str(rank), *(str(place[dim]) for dim in (*dims, 'data')), *([owners] if groups else [])])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ['  '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return '\n'.join([str(mesh), *lines])


def _expert_dims(mesh: DeviceMesh) -> tuple[str, ...]:
    return EXPERT_DIMS if mesh.ep_size * mesh.etp_size > 1 else ()


def _as_tuple(name: str, ranks: object) -> tuple[int, ...]:
    try:
        return tuple(ranks)  # type: ignore[arg-type]
    except TypeError:
        raise MeshError(f'DeviceGroup {name!r}: ranks={ranks!r} must be a list of integers, or how many.') from None
