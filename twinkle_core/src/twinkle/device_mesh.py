"""How processes are laid out: who shares data, who shares a model, who talks to whom. Plain arithmetic, no processes needed.

Ranks are numbered along five dimensions, from outer to inner: fsdp, pp, dp, cp, tp. Two more views divide the same ranks:

* `ulysses`: the innermost part of the data ranks. `ulysses_size` ranks share the rows of one data rank and split their sequences.
* expert parallelism: within a pipeline stage, the ranks are regrouped as (ep_fsdp, ep, etp) for the experts' weights.

A data rank is one set of ranks that read the same rows: its tensor, context, pipeline and ulysses peers.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Any

from twinkle.errors import MeshError

__all__ = ['DeviceGroup', 'DeviceMesh', 'get_device_placement']

_DIMS = ('fsdp', 'pp', 'dp', 'cp', 'tp')
_EXPERT_DIMS = ('ep_fsdp', 'ep', 'etp')


def _this_rank() -> int:
    return int(os.environ.get('RANK', '0'))


@dataclass(frozen=True)
class DeviceMesh:
    """Sizes of every dimension. Make one with `from_sizes`, which checks them and fills in what is left out.

    Attributes:
        world_size: processes in all: the product of fsdp, pp, dp, cp and tp.
        ulysses_size: ranks, of the data ranks, that split sequences among them.
        ep_size, etp_size, ep_fsdp_size: expert, expert tensor and expert sharding sizes; their product is a pipeline stage's ranks.
        vpp_size: virtual stages per pipeline rank.
        sequence_parallel: split activations over tp between layers.
        device_type: `cpu`, `cuda`, `npu`.
    """

    world_size: int = 1
    fsdp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    ulysses_size: int = 1
    ep_size: int = 1
    etp_size: int = 1
    ep_fsdp_size: int = 1
    vpp_size: int = 1
    sequence_parallel: bool = False
    device_type: str = 'cpu'

    @classmethod
    def from_sizes(
        cls,
        *,
        world_size: int | None = None,
        dp_size: int | None = None,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        cp_size: int | None = None,
        ulysses_size: int | None = None,
        ep_size: int | None = None,
        etp_size: int | None = None,
        ep_fsdp_size: int | None = None,
        vpp_size: int | None = None,
        sequence_parallel: bool = False,
        device_type: str | None = None,
    ) -> DeviceMesh:
        """A checked mesh. Sizes left out are 1, except `dp_size`, which takes what `world_size` leaves, and `ep_fsdp_size`.

        Raises:
            MeshError: sizes that are no positive integers, or do not fit the world or each other; the message holds them.
        """
        given = {
            'fsdp': fsdp_size, 'pp': pp_size, 'dp': dp_size, 'cp': cp_size, 'tp': tp_size, 'ulysses': ulysses_size, 'ep': ep_size,
            'etp': etp_size, 'ep_fsdp': ep_fsdp_size, 'vpp': vpp_size, 'world': world_size,
        }  # fmt: skip
        for name, size in given.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise MeshError(f'{name}_size={size!r} must be an integer of at least 1.')
        sizes = {name: size or 1 for name, size in given.items()}
        others = math.prod(sizes[dim] for dim in _DIMS if dim != 'dp')
        if world_size is None:
            sizes['world'] = others * sizes['dp']
        elif dp_size is None:
            if world_size % others:
                raise MeshError(f'world_size={world_size} is not divisible by {_written(sizes, [d for d in _DIMS if d != "dp"])} = {others}.')
            sizes['dp'] = world_size // others
        elif others * dp_size != world_size:
            raise MeshError(f'{_written(sizes, _DIMS)} = {others * dp_size}, and world_size={world_size}.')
        _check_ulysses(sizes)
        _fill_experts(sizes, ep_fsdp_size is not None)
        if sizes['vpp'] > 1 and sizes['pp'] == 1:
            raise MeshError(f'vpp_size={sizes["vpp"]} needs a pipeline: pp_size is 1.')
        if device_type is not None and device_type not in ('cpu', 'cuda', 'npu'):
            raise MeshError(f"device_type={device_type!r} must be 'cpu', 'cuda' or 'npu'.")
        return cls(
            **{f'{name}_size': size for name, size in sizes.items()},
            sequence_parallel=sequence_parallel,
            device_type=device_type or _available_device_type(),
        )

    # -- where a rank stands ---------------------------------------------------------------------------------------------------

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The rank's index along every dimension, by name."""
        rank = self._check_rank(rank)
        place = {}
        for dim in reversed(_DIMS):
            rank, place[dim] = divmod(rank, self._size(dim))
        data = (place['fsdp'] * self.dp_size) + place['dp']
        place['ulysses'] = data % self.ulysses_size
        inner = ((place['fsdp'] * self.dp_size + place['dp']) * self.cp_size + place['cp']) * self.tp_size + place['tp']
        for dim in reversed(_EXPERT_DIMS):
            inner, place[dim] = divmod(inner, self._size(dim))
        return place

    def peers(self, dim: str, rank: int | None = None) -> list[int]:
        """The ranks that differ from this one along `dim` only, itself included, in order.

        `dim` is one of fsdp, pp, dp, cp, tp, ulysses, ep_fsdp, ep, etp, or `data`: the ranks that read other rows, one per data rank.
        """
        rank = self._check_rank(rank)
        return next(group for group in self.groups(dim) if rank in group)

    def groups(self, dim: str) -> list[list[int]]:
        """Every group of peers along `dim`; together they hold each rank once."""
        ranks = range(self.world_size)
        found: dict[tuple[Any, ...], list[int]] = {}
        for rank in ranks:
            found.setdefault(self._others(dim, rank), []).append(rank)
        return list(found.values())

    def _others(self, dim: str, rank: int) -> tuple[Any, ...]:
        """What peers along `dim` have in common."""
        place = self.coordinates(rank)
        if dim in _DIMS:
            return tuple(place[other] for other in _DIMS if other != dim)
        model = (place['pp'], place['cp'], place['tp'])
        data = place['fsdp'] * self.dp_size + place['dp']
        if dim == 'ulysses':
            return (data // self.ulysses_size, *model)
        if dim == 'data':
            return (place['ulysses'], *model)
        if dim in _EXPERT_DIMS:
            return (place['pp'], *(place[other] for other in _EXPERT_DIMS if other != dim))
        raise MeshError(f'Unknown dimension {dim!r}: there are {", ".join((*_DIMS, "ulysses", "data", *_EXPERT_DIMS))}.')

    # -- data ------------------------------------------------------------------------------------------------------------------

    @property
    def data_world_size(self) -> int:
        """How many ranks read rows of their own."""
        return self.fsdp_size * self.dp_size // self.ulysses_size

    def data_rank(self, rank: int | None = None) -> int:
        """Which of them this rank is, or reads the same rows as."""
        place = self.coordinates(rank)
        return (place['fsdp'] * self.dp_size + place['dp']) // self.ulysses_size

    def get_slice(self, total: int, rank: int | None = None) -> slice:
        """This rank's part of `total` rows. Parts differ by one row at most (the first ones are longer) and cover all exactly."""
        if total < 0:
            raise MeshError(f'total={total!r} must be at least 0.')
        each, extra = divmod(total, self.data_world_size)
        index = self.data_rank(rank)
        start = index * each + min(index, extra)
        return slice(start, start + each + (index < extra))

    # -- the world -------------------------------------------------------------------------------------------------------------

    def check_world(self, world_size: int) -> None:
        """Raise `MeshError`, with the sizes, unless this mesh is for that many processes."""
        if world_size != self.world_size:
            raise MeshError(
                f'The mesh is for {self.world_size} process(es) ({self.describe()}), and {world_size} are running. Launch '
                f'{self.world_size} (torchrun --nproc-per-node {self.world_size} ...), or change the sizes.'
            )

    def describe(self) -> str:
        """The sizes that are not 1, in words."""
        sizes = {f.name.removesuffix('_size'): getattr(self, f.name) for f in fields(self) if f.name.endswith('_size')}
        parts = [f'{name} {size}' for name, size in sizes.items() if size != 1 and name != 'world'] or ['one of each']
        return f'{", ".join(parts)} on {self.device_type}' + (', sequence parallel' if self.sequence_parallel else '')

    def __str__(self) -> str:
        return f'DeviceMesh of {self.world_size}: {self.describe()}'

    def _size(self, dim: str) -> int:
        return int(getattr(self, f'{dim}_size'))

    def _check_rank(self, rank: int | None) -> int:
        rank = _this_rank() if rank is None else rank
        if not 0 <= rank < self.world_size:
            raise MeshError(f'Rank {rank} is outside of this mesh of {self.world_size} ({self.describe()}).')
        return rank


@dataclass(frozen=True)
class DeviceGroup:
    """A named set of ranks, for placing models on a cluster.

    Raises:
        MeshError: no name, no ranks, or ranks that are negative or named twice.
    """

    name: str
    ranks: tuple[int, ...] | int
    device_type: str = 'cpu'

    def __post_init__(self) -> None:
        ranks = tuple(range(self.ranks)) if isinstance(self.ranks, int) else tuple(self.ranks)
        object.__setattr__(self, 'ranks', ranks)
        if not self.name:
            raise MeshError('A DeviceGroup needs a name.')
        if not ranks or min(ranks) < 0 or len(set(ranks)) != len(ranks):
            raise MeshError(f'DeviceGroup {self.name!r}: ranks={list(ranks)} must be one or more different numbers from 0 on.')

    @property
    def size(self) -> int:
        """How many devices it has."""
        return len(self.ranks) if isinstance(self.ranks, tuple) else self.ranks


def get_device_placement(mesh: DeviceMesh, groups: list[DeviceGroup] | None = None) -> str:
    """A drawing of which rank stands where: one line per rank, with its place along each dimension that is not 1."""
    dims = [dim for dim in (*_DIMS, 'ulysses', *_EXPERT_DIMS) if mesh._size(dim) > 1]
    owners = {rank: group.name for group in groups or () for rank in (group.ranks if isinstance(group.ranks, tuple) else ())}
    header = ['rank', *dims, 'data', *(['group'] if groups else [])]
    rows = []
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        rows.append([rank, *(place[dim] for dim in dims), mesh.data_rank(rank), *([owners.get(rank, '-')] if groups else [])])
    table = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = ['  '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return '\n'.join([str(mesh), *lines])


def _written(sizes: dict[str, int], dims: Any) -> str:
    return ' x '.join(f'{dim}_size={sizes[dim]}' for dim in dims)


def _check_ulysses(sizes: dict[str, int]) -> None:
    if (sizes['fsdp'] * sizes['dp']) % sizes['ulysses']:
        raise MeshError(
            f'ulysses_size={sizes["ulysses"]} must divide the data ranks it is taken from: {_written(sizes, ("fsdp", "dp"))} = '
            f'{sizes["fsdp"] * sizes["dp"]}.'
        )


def _fill_experts(sizes: dict[str, int], ep_fsdp_given: bool) -> None:
    stage = sizes['world'] // sizes['pp']
    experts = sizes['ep'] * sizes['etp']
    if stage % experts:
        raise MeshError(f'ep_size={sizes["ep"]} x etp_size={sizes["etp"]} must divide the {stage} rank(s) of a pipeline stage.')
    if ep_fsdp_given and experts * sizes['ep_fsdp'] != stage:
        raise MeshError(f'{_written(sizes, _EXPERT_DIMS)} = {experts * sizes["ep_fsdp"]}, and a pipeline stage has {stage} rank(s).')
    sizes['ep_fsdp'] = stage // experts


def _available_device_type() -> str:
    """`cuda` or `npu` if this machine has one, else `cpu`. Imports torch, which a mesh otherwise does without."""
    import torch

    if torch.cuda.is_available():
        return 'cuda'
    npu = getattr(torch, 'npu', None)
    return 'npu' if npu is not None and npu.is_available() else 'cpu'
