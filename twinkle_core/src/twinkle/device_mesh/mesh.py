"""`DeviceMesh`: the place of every rank along every dimension.

Ranks are numbered along five dimensions, from outer to inner: fsdp, pp, dp, cp, tp. Two more views divide the same ranks:

* `ulysses` is taken out of the ranks along fsdp and dp, the neighbouring ones first: `ulysses_size` of them share their rows and split
  their sequences, so there are fsdp x dp / ulysses data ranks. It adds no ranks, and weights are sharded over fsdp as before.
* Experts: the ranks of a pipeline stage are regrouped as (ep_fsdp, ep, etp) for the experts' weights. All other weights are as before.

A data rank is one set of ranks that read the same rows: its tensor, context, pipeline and ulysses peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from twinkle.current import get_runtime
from twinkle.device_mesh.sizes import DIMS, EXPERT_DIMS, check_device_type, check_sizes, fill_sizes
from twinkle.errors import MeshError
from twinkle.launcher import rank as this_rank
from twinkle.launcher import world_size as running

__all__ = ['DeviceMesh', 'default_device_mesh', 'even_slice']

_NAMES = ('world', *DIMS, 'ulysses', *EXPERT_DIMS, 'vpp')
_VIEWS = (*DIMS, 'ulysses', 'data', 'model', *EXPERT_DIMS)


@dataclass(frozen=True, repr=False)
class DeviceMesh:
    """Sizes of every dimension. Make one with `from_sizes`, which fills in what is left out.

    Attributes:
        world_size: processes in all: the product of fsdp, pp, dp, cp and tp.
        fsdp_size: ranks that shard the weights among them, and read rows of their own.
        pp_size: pipeline stages.
        dp_size: ranks that hold the same weights, and read rows of their own.
        cp_size: ranks that split sequences among them (context parallel).
        tp_size: ranks that split each layer's weights among them.
        ulysses_size: ranks, of those along fsdp and dp, that split sequences among them.
        ep_size, etp_size, ep_fsdp_size: for experts' weights; their product is a pipeline stage's ranks.
        vpp_size: virtual stages per pipeline rank.
        sequence_parallel: split activations over tp between layers.
        device_type: `cpu`, `cuda`, `npu`.

    Raises:
        MeshError: sizes that are no positive integers, or do not fit the world or each other; the message holds them.
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

    def __post_init__(self) -> None:
        check_sizes({name: self._size(name) for name in _NAMES})
        if not isinstance(self.sequence_parallel, bool):
            raise MeshError(f'sequence_parallel={self.sequence_parallel!r} must be True or False.')
        check_device_type(self.device_type)

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
        """A mesh of these sizes. Those left out are 1, except `dp_size`, which takes what `world_size` leaves, and `ep_fsdp_size`.

        `device_type` left out is what this machine has: `cuda`, `npu`, else `cpu`.

        Raises:
            MeshError: sizes that are no positive integers, or do not fit the world or each other; the message holds them.
        """
        given = {
            'world': world_size, 'fsdp': fsdp_size, 'pp': pp_size, 'dp': dp_size, 'cp': cp_size, 'tp': tp_size,
            'ulysses': ulysses_size, 'ep': ep_size, 'etp': etp_size, 'ep_fsdp': ep_fsdp_size, 'vpp': vpp_size,
        }  # fmt: skip
        sizes = fill_sizes(given)
        return cls(
            **{f'{name}_size': size for name, size in sizes.items()},
            sequence_parallel=sequence_parallel,
            device_type=_available_device_type() if device_type is None else device_type,
        )

    # -- where a rank stands -------------------------------------------------------------------------------------------

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The rank's index along every dimension (ulysses, experts and data included), by name; `rank` left out is this process."""
        left = self._check_rank(rank)
        place = {}
        for dim in reversed(DIMS):
            left, place[dim] = divmod(left, self._size(dim))
        outer = place['fsdp'] * self.dp_size + place['dp']
        place['data'], place['ulysses'] = divmod(outer, self.ulysses_size)
        left = (outer * self.cp_size + place['cp']) * self.tp_size + place['tp']  # the index within the pipeline stage
        for dim in reversed(EXPERT_DIMS):
            left, place[dim] = divmod(left, self._size(dim))
        return place

    def peers(self, dim: str, rank: int | None = None) -> list[int]:
        """The ranks that differ from this one along `dim` only, itself included, in order.

        `dim` is one of fsdp, pp, dp, cp, tp, ulysses, ep_fsdp, ep, etp; `data` (the same place in every data rank: those that read
        other rows); or `model` (all that read the same rows).
        """
        return list(_grouped(self, dim)[self._check_rank(rank)])

    def groups(self, dim: str) -> list[list[int]]:
        """Every group of peers along `dim`; together they hold each rank once."""
        return [list(group) for group in dict.fromkeys(_grouped(self, dim))]

    # -- data ----------------------------------------------------------------------------------------------------------

    @property
    def data_world_size(self) -> int:
        """How many data ranks there are, each with rows of its own."""
        return self.fsdp_size * self.dp_size // self.ulysses_size

    def data_rank(self, rank: int | None = None) -> int:
        """Which data rank this rank belongs to."""
        return self.coordinates(rank)['data']

    def get_slice(self, total: int, rank: int | None = None) -> slice:
        """This rank's part of `total` rows. Parts differ by one row at most (the first ones are longer) and cover all exactly."""
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise MeshError(f'total={total!r} must be an integer of at least 0.')
        return even_slice(total, self.data_rank(rank), self.data_world_size)

    # -- the world -----------------------------------------------------------------------------------------------------

    def check_world(self, world_size: int) -> None:
        """Raise `MeshError`, with the sizes, unless this mesh is for that many processes."""
        if world_size != self.world_size:
            launch = f'torchrun --nproc-per-node {self.world_size} ...' if self.world_size > 1 else 'without torchrun'
            raise MeshError(
                f'The mesh is for {self.world_size} process(es) ({self.describe()}), and {world_size} are running. Launch '
                f'{self.world_size} ({launch}), or change the sizes to a product of {world_size}.'
            )

    def describe(self) -> str:
        """The sizes that are not 1, in words."""
        parts = [f'{name} {size}' for name, size in self._telling_sizes().items()] or ['one of each']
        return f'{", ".join(parts)} on {self.device_type}' + (', sequence parallel' if self.sequence_parallel else '')

    def __str__(self) -> str:
        return f'DeviceMesh of {self.world_size}: {self.describe()}'

    def __repr__(self) -> str:
        sizes = ''.join(f'{name}_size={size}, ' for name, size in self._telling_sizes().items())
        also = 'sequence_parallel=True, ' if self.sequence_parallel else ''
        return f'DeviceMesh.from_sizes(world_size={self.world_size}, {sizes}{also}device_type={self.device_type!r})'

    def _telling_sizes(self) -> dict[str, int]:
        """The sizes that say something. Without experts `ep_fsdp_size` says only how many ranks a stage has."""
        silent = {'world'} if self.ep_size * self.etp_size > 1 else {'world', 'ep_fsdp'}
        return {name: self._size(name) for name in _NAMES if name not in silent and self._size(name) != 1}

    def _size(self, name: str) -> int:
        size: int = getattr(self, f'{name}_size')
        return size

    def _check_rank(self, rank: int | None) -> int:
        rank = this_rank() if rank is None else rank
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise MeshError(f'Rank {rank!r} is outside of this mesh of {self.world_size} ({self.describe()}).')
        return rank


def default_device_mesh() -> DeviceMesh:
    """The mesh of what is given none: the runtime's, else one with all running ranks data-parallel."""
    runtime = get_runtime()
    return runtime.device_mesh if runtime is not None else DeviceMesh.from_sizes(world_size=running())


def even_slice(total: int, index: int, n: int) -> slice:
    """Part `index` of `total` rows in `n` parts; the first `total % n` have one more."""
    each, extra = divmod(total, n)
    start = index * each + min(index, extra)
    return slice(start, start + each + (index < extra))


@lru_cache(maxsize=64)
def _grouped(mesh: DeviceMesh, dim: str) -> tuple[tuple[int, ...], ...]:
    """The peers of every rank, by rank."""
    if dim not in _VIEWS:
        raise MeshError(f'Unknown dimension {dim!r}: there are {", ".join(_VIEWS)}.')
    shared = [_in_common(dim, mesh.coordinates(rank)) for rank in range(mesh.world_size)]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, key in enumerate(shared):
        found.setdefault(key, []).append(rank)
    groups = {key: tuple(group) for key, group in found.items()}
    return tuple(groups[key] for key in shared)


def _in_common(dim: str, place: dict[str, int]) -> tuple[int, ...]:
    """What peers along `dim` have in common."""
    if dim in DIMS:
        return tuple(place[other] for other in DIMS if other != dim)
    if dim in EXPERT_DIMS:
        return (place['pp'], *(place[other] for other in EXPERT_DIMS if other != dim))
    if dim == 'model':
        return (place['data'],)
    same = (place['data'],) if dim == 'ulysses' else (place['ulysses'],)
    return (*same, place['pp'], place['cp'], place['tp'])


def _available_device_type() -> str:
    """`cuda` or `npu` if this machine has one, else `cpu`. Imports torch, which a mesh otherwise does without."""
    import torch

    if torch.cuda.is_available():
        return 'cuda'
    npu = getattr(torch, 'npu', None)
    return 'npu' if npu is not None and npu.is_available() else 'cpu'
