"""DeviceMesh: rank arithmetic against numpy, for any shape; sizes that do not fit; groups and their drawing."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle import DeviceGroup, DeviceMesh, get_device_placement
from twinkle.device_mesh import default_device_mesh
from twinkle.errors import MeshError

DIMS = ('fsdp', 'pp', 'dp', 'cp', 'tp')
EXPERT_DIMS = ('ep_fsdp', 'ep', 'etp')
EVERY_VIEW = (*DIMS, 'ulysses', 'data', 'model', *EXPERT_DIMS)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def meshes(draw: st.DrawFn) -> DeviceMesh:
    """Any mesh of up to 3 along two dimensions and 2 along the others, with ulysses and expert sizes that fit it."""
    sizes = {f'{dim}_size': draw(st.integers(1, 3 if dim in ('dp', 'fsdp') else 2)) for dim in DIMS}
    data = sizes['fsdp_size'] * sizes['dp_size']
    stage = math.prod(sizes.values()) // sizes['pp_size']
    ep = draw(st.sampled_from(_divisors(stage)))
    etp = draw(st.sampled_from(_divisors(stage // ep)))
    ulysses = draw(st.sampled_from(_divisors(data)))
    return DeviceMesh.from_sizes(**sizes, ulysses_size=ulysses, ep_size=ep, etp_size=etp, device_type='cpu')


def _grid(mesh: DeviceMesh) -> np.ndarray:
    return np.arange(mesh.world_size).reshape([getattr(mesh, f'{dim}_size') for dim in DIMS])


def _rows(grid: np.ndarray, axis: int) -> set[tuple[int, ...]]:
    return {tuple(row) for row in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()}


def _as_set(groups: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(group) for group in groups}


@settings(deadline=None)
@given(meshes())
def test_the_five_dimensions_are_those_of_a_reshaped_arange(mesh: DeviceMesh) -> None:
    """Groups and coordinates are numpy's, ranks laid out fsdp, pp, dp, cp, tp from outer to inner."""
    grid = _grid(mesh)
    for axis, dim in enumerate(DIMS):
        assert _as_set(mesh.groups(dim)) == _rows(grid, axis)
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        assert grid[tuple(place[dim] for dim in DIMS)] == rank


@settings(deadline=None)
@given(meshes())
def test_experts_regroup_the_ranks_of_a_pipeline_stage(mesh: DeviceMesh) -> None:
    """Within a stage, ranks in order are reshaped to (ep_fsdp, ep, etp); no group crosses a stage."""
    shape = [getattr(mesh, f'{dim}_size') for dim in EXPERT_DIMS]
    stages = [_grid(mesh)[:, stage].reshape(shape) for stage in range(mesh.pp_size)]
    for axis, dim in enumerate(EXPERT_DIMS):
        assert _as_set(mesh.groups(dim)) == set().union(*(_rows(stage, axis) for stage in stages))


@settings(deadline=None)
@given(meshes())
def test_ulysses_is_taken_out_of_the_data_ranks(mesh: DeviceMesh) -> None:
    """The (fsdp, dp) ranks in order are reshaped to (data, ulysses), for each place in the model."""
    by_model = np.moveaxis(_grid(mesh), 2, 1)  # fsdp, dp, pp, cp, tp
    split = by_model.reshape(mesh.data_world_size, mesh.ulysses_size, -1)
    assert _as_set(mesh.groups('data')) == _rows(split, 0)
    assert _as_set(mesh.groups('ulysses')) == _rows(split, 1)
    for data in range(mesh.data_world_size):
        assert {mesh.data_rank(int(rank)) for rank in split[data].ravel()} == {data}


@settings(deadline=None)
@given(meshes())
def test_every_view_holds_each_rank_once(mesh: DeviceMesh) -> None:
    """The groups of any dimension are a partition of all ranks into groups of its size."""
    sizes = {dim: getattr(mesh, f'{dim}_size', None) for dim in EVERY_VIEW}
    sizes |= {'data': mesh.data_world_size, 'model': mesh.world_size // mesh.data_world_size}
    for dim in EVERY_VIEW:
        groups = mesh.groups(dim)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {sizes[dim]}


@settings(deadline=None)
@given(meshes())
def test_peers_are_symmetrical(mesh: DeviceMesh) -> None:
    """Each rank is its own peer, and peers have the same peers, in the same order, at its coordinate."""
    for dim in EVERY_VIEW:
        for rank in range(mesh.world_size):
            peers = mesh.peers(dim, rank)
            assert rank in peers
            assert all(mesh.peers(dim, peer) == peers for peer in peers)
            if dim != 'model':
                assert peers[mesh.coordinates(rank)[dim]] == rank


@settings(deadline=None)
@given(meshes())
def test_model_peers_read_the_same_rows(mesh: DeviceMesh) -> None:
    """Tensor, context, pipeline and ulysses peers have one data rank; `data` peers have one of each."""
    for rank in range(mesh.world_size):
        for dim in ('tp', 'cp', 'pp', 'ulysses', 'model'):
            assert {mesh.data_rank(peer) for peer in mesh.peers(dim, rank)} == {mesh.data_rank(rank)}
        assert [mesh.data_rank(peer) for peer in mesh.peers('data', rank)] == list(range(mesh.data_world_size))


@settings(deadline=None)
@given(meshes(), st.integers(0, 100))
def test_slices_cover_all_rows_exactly(mesh: DeviceMesh, total: int) -> None:
    """In the order of data ranks the slices join to all rows; the first ones are longer, by one row at most."""
    rows = list(range(total))
    parts = {mesh.data_rank(rank): rows[mesh.get_slice(total, rank)] for rank in range(mesh.world_size)}
    assert [row for data in sorted(parts) for row in parts[data]] == rows
    lengths = [len(parts[data]) for data in sorted(parts)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@settings(deadline=None)
@given(meshes())
def test_repr_is_the_call_that_makes_the_mesh(mesh: DeviceMesh) -> None:
    """What is printed can be pasted back; equal meshes are equal and hash alike."""
    again = eval(repr(mesh), {'DeviceMesh': DeviceMesh})
    assert again == mesh
    assert hash(again) == hash(mesh)


@settings(deadline=None)
@given(meshes())
def test_world_or_dp_can_be_left_out(mesh: DeviceMesh) -> None:
    """`dp_size` takes what `world_size` leaves, and `world_size` is the product."""
    others = {f'{dim}_size': getattr(mesh, f'{dim}_size') for dim in ('fsdp', 'pp', 'cp', 'tp')}
    by_world = DeviceMesh.from_sizes(world_size=mesh.world_size, **others, device_type='cpu')
    by_dp = DeviceMesh.from_sizes(dp_size=mesh.dp_size, **others, device_type='cpu')
    assert by_world == by_dp
    assert (by_world.dp_size, by_dp.world_size) == (mesh.dp_size, mesh.world_size)


def test_a_mesh_written_out() -> None:
    """16 ranks by hand: the table of DESIGN's order, data ranks counted over fsdp and dp."""
    mesh = DeviceMesh.from_sizes(fsdp_size=2, pp_size=2, dp_size=2, tp_size=2, device_type='cpu')
    assert mesh.peers('fsdp', 5) == [5, 13]
    assert mesh.peers('pp', 5) == [1, 5]
    assert mesh.peers('dp', 5) == [5, 7]
    assert mesh.peers('tp', 5) == [4, 5]
    assert mesh.peers('data', 5) == [5, 7, 13, 15]
    assert mesh.peers('model', 5) == [0, 1, 4, 5]
    assert [mesh.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2
    assert mesh.get_slice(10, 15) == slice(8, 10)


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ({'dp_size': 0}, r'dp_size=0 must be an integer of at least 1'),
        ({'fsdp_size': -2}, r'fsdp_size=-2 '),
        ({'tp_size': 2.0}, r'tp_size=2\.0 '),
        ({'pp_size': '2'}, r"pp_size='2' "),
        ({'cp_size': True}, r'cp_size=True '),
        ({'world_size': 0}, r'world_size=0 '),
        (
            {'world_size': 8, 'tp_size': 3},
            r'world_size=8 is not divisible by fsdp_size=1 x pp_size=1 x cp_size=1 x tp_size=3 = 3',
        ),
        ({'world_size': 8, 'dp_size': 3}, r'dp_size=3 .* = 3, and world_size=8'),
        ({'dp_size': 3, 'ulysses_size': 2}, r'ulysses_size=2 must divide .*fsdp_size=1 x dp_size=3 = 3'),
        ({'dp_size': 4, 'ep_size': 3}, r'ep_size=3 x etp_size=1 = 3 must divide the 4 rank'),
        ({'dp_size': 2, 'pp_size': 2, 'ep_size': 4}, r'must divide the 2 rank.*world_size=4 x pp_size=2'),
        (
            {'dp_size': 4, 'ep_size': 2, 'ep_fsdp_size': 4},
            r'ep_fsdp_size=4 x ep_size=2 x etp_size=1 = 8, and .* 4 rank',
        ),
        ({'vpp_size': 2}, r'vpp_size=2 .*pp_size=1'),
        ({'sequence_parallel': 1}, r'sequence_parallel=1 '),
        ({'device_type': 'tpu'}, r"device_type='tpu' must be one of 'cpu', 'cuda', 'npu'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, object], message: str) -> None:
    """The error names the sizes at fault, and is a ValueError too."""
    with pytest.raises(MeshError, match=message):
        DeviceMesh.from_sizes(**{'device_type': 'cpu', **sizes})  # type: ignore[arg-type]
    assert issubclass(MeshError, ValueError)


def test_a_mesh_is_checked_however_it_is_made() -> None:
    """The class itself and `dataclasses.replace` refuse what does not fit, and a mesh cannot be changed."""
    mesh = DeviceMesh.from_sizes(dp_size=2, device_type='cpu')
    with pytest.raises(MeshError, match=r'dp_size=2 .* = 2, and world_size=1.*from_sizes'):
        DeviceMesh(dp_size=2)
    with pytest.raises(MeshError, match=r'tp_size=2 = 4, and world_size=2'):
        dataclasses.replace(mesh, tp_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh.dp_size = 4  # type: ignore[misc]


def test_wrong_questions_are_named() -> None:
    """A rank outside, an unknown dimension, a negative number of rows."""
    mesh = DeviceMesh.from_sizes(dp_size=2, device_type='cpu')
    with pytest.raises(MeshError, match=r'Rank 2 is outside of this mesh of 2 \(dp 2 on cpu\)'):
        mesh.data_rank(2)
    with pytest.raises(MeshError, match=r"Unknown dimension 'xp': there are fsdp, pp, dp, cp, tp, ulysses"):
        mesh.peers('xp', 0)
    with pytest.raises(MeshError, match='total=-1 '):
        mesh.get_slice(-1, 0)


def test_left_out_rank_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's RANK says which; without a launcher it is 0."""
    mesh = DeviceMesh.from_sizes(dp_size=4, device_type='cpu')
    monkeypatch.delenv('RANK', raising=False)
    assert mesh.data_rank() == 0
    monkeypatch.setenv('RANK', '3')
    assert mesh.data_rank() == 3
    assert mesh.get_slice(5) == slice(4, 5)


def test_a_world_of_another_size_is_refused() -> None:
    """Both numbers, the sizes and the way out are in the message."""
    mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=2, device_type='cpu')
    mesh.check_world(4)
    with pytest.raises(MeshError, match=r'for 4 process.*fsdp 2, dp 2 on cpu.* and 2 are running.*nproc-per-node 4'):
        mesh.check_world(2)


def test_the_default_mesh_has_all_ranks_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a runtime it is as large as the launcher's world."""
    monkeypatch.setenv('WORLD_SIZE', '3')
    mesh = default_device_mesh()
    assert (mesh.world_size, mesh.dp_size, mesh.data_world_size) == (3, 3, 3)


def test_device_groups() -> None:
    """Ranks are given one by one or as a number; what cannot be is refused by name."""
    assert DeviceGroup('train', 2) == DeviceGroup('train', [0, 1])
    assert DeviceGroup('sample', (4, 6)).ranks == (4, 6)
    assert DeviceGroup('sample', range(3)).size == 3
    for ranks in ([], [1, 1], [-1], 0, -1, [0.5], True):
        with pytest.raises(MeshError, match=r'DeviceGroup .train.: ranks='):
            DeviceGroup('train', ranks)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match='needs a name'):
        DeviceGroup('', 1)
    with pytest.raises(MeshError, match="device_type='gpu'"):
        DeviceGroup('train', 1, 'gpu')


def test_placement_is_drawn_one_line_per_rank() -> None:
    """Only dimensions that are not 1 have a column; `data` and the groups are always told."""
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, device_type='cpu')
    drawing = get_device_placement(mesh, [DeviceGroup('train', [0, 1]), DeviceGroup('sample', [1, 2])])
    assert drawing.splitlines() == [
        'DeviceMesh of 4: dp 2, tp 2 on cpu',
        'rank  dp  tp  data         group',
        '   0   0   0     0         train',
        '   1   0   1     0  train+sample',
        '   2   1   0     1        sample',
        '   3   1   1     1             -',
    ]
    alone = get_device_placement(DeviceMesh.from_sizes(device_type='cpu'))
    assert alone.splitlines() == ['DeviceMesh of 1: one of each on cpu', 'rank  data', '   0     0']


def test_a_mesh_needs_neither_torch_nor_numpy() -> None:
    """With its device type given, a mesh is made, asked and drawn in pure Python."""
    code = (
        'import sys; from twinkle import DeviceMesh, get_device_placement; '
        "get_device_placement(DeviceMesh.from_sizes(dp_size=2, device_type='cpu')); "
        "assert not {'torch', 'numpy', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, '-c', code], check=True)
