"""remote_class, remote_function, and the rules of dispatching and collecting, for any number of workers."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle import DeviceMesh
from twinkle.errors import RemoteError
from twinkle.remote import (
    RemoteFunctionSpec,
    class_spec_of,
    collect_results,
    dispatch_args,
    remote_class,
    remote_function,
    spec_of,
)
from twinkle.runtime import Executor, initialize

ROW = {'input_ids': [1, 2, 3], 'labels': [2, 3, -100]}


@st.composite
def meshes(draw: st.DrawFn) -> DeviceMesh:
    """Any mesh of up to 3 along each dimension, ulysses included."""
    sizes = {f'{dim}_size': draw(st.integers(1, 3)) for dim in ('fsdp', 'pp', 'dp', 'cp', 'tp')}
    data = sizes['fsdp_size'] * sizes['dp_size']
    ulysses = draw(st.sampled_from([d for d in range(1, data + 1) if data % d == 0]))
    return DeviceMesh.from_sizes(**sizes, ulysses_size=ulysses, device_type='cpu')


def _mesh(**sizes: int) -> DeviceMesh:
    return DeviceMesh.from_sizes(**sizes, device_type='cpu')


def _call(spec: RemoteFunctionSpec, mesh: DeviceMesh, function: Any, *args: Any, **kwargs: Any) -> Any:
    """What an executor does, in one process."""
    results = [function(*a, **k) for a, k in dispatch_args(spec, args, kwargs, mesh)]
    return collect_results(spec, results, mesh)


# -- dividing and putting together ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(meshes(), st.lists(st.integers()), st.sampled_from(['slice', 'slice_dp']))
def test_slice_then_flatten_is_the_identity(mesh: DeviceMesh, rows: list[int], rule: str) -> None:
    """However many workers: each row is worked on once (by one data rank), and comes back in its place."""
    spec = RemoteFunctionSpec(dispatch=rule, collect='flatten')
    assert _call(spec, mesh, lambda part: [row + 1 for row in part], rows) == [row + 1 for row in rows]
    assert _call(spec, mesh, lambda *, part: part, part=tuple(rows)) == rows


@settings(deadline=None)
@given(meshes(), st.integers(0, 20), st.sampled_from(['slice', 'slice_dp']))
def test_tensors_are_divided_like_lists(mesh: DeviceMesh, n: int, rule: str) -> None:
    """A list, an array, a tensor and a dictionary of tensors are cut at the same rows; what has none goes to everybody."""
    rows = list(range(n))
    batch = {'input_ids': torch.arange(n)[:, None].expand(n, 2), 'weights': torch.arange(n), 'scale': 2.0}
    calls = dispatch_args(RemoteFunctionSpec(rule), (rows, np.arange(n), batch, 'text', {'lr': 1.0}), {}, mesh)
    for (part, array, tensors, text, options), _ in calls:
        assert part == array.tolist() == tensors['input_ids'][:, 0].tolist() == tensors['weights'].tolist()
        assert (tensors['scale'], text, options) == (2.0, 'text', {'lr': 1.0})


@settings(deadline=None)
@given(meshes(), st.lists(st.integers(), max_size=20))
def test_peers_of_a_data_rank_get_the_same_rows(mesh: DeviceMesh, rows: list[int]) -> None:
    """Under slice_dp, tensor, context, pipeline and ulysses peers work on the same part, the one of the mesh."""
    calls = dispatch_args(RemoteFunctionSpec('slice_dp'), (rows,), {}, mesh)
    assert len(calls) == mesh.world_size
    for rank, ((part,), _) in enumerate(calls):
        assert part == rows[mesh.get_slice(len(rows), rank)]


@settings(deadline=None)
@given(meshes(), st.integers(), st.booleans())
def test_all_gives_everybody_everything(mesh: DeviceMesh, value: int, in_list: bool) -> None:
    """`all` divides nothing; each worker gets argument tuples of its own."""
    arg = [value] if in_list else value
    calls = dispatch_args(RemoteFunctionSpec('all'), (arg,), {'x': arg}, mesh)
    assert calls == [((arg,), {'x': arg})] * mesh.world_size
    assert len({id(kwargs) for _, kwargs in calls}) == mesh.world_size


@settings(deadline=None)
@given(meshes())
def test_one_result_per_data_rank_is_of_the_last_stage(mesh: DeviceMesh) -> None:
    """What is collected from divided rows comes from each data rank once, from its last pipeline stage, in order."""
    results = list(range(mesh.world_size))
    kept = collect_results(RemoteFunctionSpec('slice_dp', collect=list), results, mesh)
    assert [mesh.data_rank(rank) for rank in kept] == list(range(mesh.data_world_size))
    assert {mesh.coordinates(rank)['pp'] for rank in kept} == {mesh.pp_size - 1}
    assert collect_results(RemoteFunctionSpec('all', collect='last_pp'), results, mesh) == kept
    assert collect_results(RemoteFunctionSpec('all', collect='none'), results, mesh) == results
    assert collect_results(RemoteFunctionSpec('slice_dp', collect='first'), results, mesh) == 0


@settings(deadline=None)
@given(meshes(), st.floats(-1e3, 1e3))
def test_sums_and_means_count_peers_once(mesh: DeviceMesh, value: float) -> None:
    """A number that every rank computes is counted once per data rank, not once per tensor or pipeline peer."""
    results = [value] * mesh.world_size
    total = collect_results(RemoteFunctionSpec('all', collect='sum'), results, mesh)
    assert math.isclose(total, value * mesh.data_world_size, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(
        collect_results(RemoteFunctionSpec('slice_dp', collect='mean'), results, mesh), value, rel_tol=1e-9
    )
    by_worker = collect_results(RemoteFunctionSpec('slice', collect='sum'), results, mesh)
    assert math.isclose(by_worker, value * mesh.world_size, rel_tol=1e-9, abs_tol=1e-9)


def test_a_stage_without_results_is_left_out() -> None:
    """Pipeline stages before the last return None, which no mean meets."""
    mesh = _mesh(pp_size=2, dp_size=2)
    assert collect_results(RemoteFunctionSpec('slice_dp', collect='mean'), [None, None, 1.0, 3.0], mesh) == 2.0


def test_sums_of_tensors_and_dictionaries() -> None:
    """Key by key, tensors too; inputs stay as they are."""
    mesh = _mesh(dp_size=2)
    results = [{'loss': 1.0, 'grad': torch.ones(2)}, {'loss': 2.0, 'grad': torch.ones(2)}]
    mean = collect_results(RemoteFunctionSpec('all', collect='mean'), results, mesh)
    assert mean['loss'] == 1.5
    assert torch.equal(mean['grad'], torch.ones(2))
    total = collect_results(RemoteFunctionSpec('all', collect='sum'), results, mesh)
    assert torch.equal(total['grad'], 2 * torch.ones(2))
    assert torch.equal(results[0]['grad'], torch.ones(2))


def test_fewer_rows_than_workers() -> None:
    """The first get one each, the others an empty list: nobody works on a row twice."""
    calls = dispatch_args(RemoteFunctionSpec('slice'), (['a', 'b'],), {}, _mesh(dp_size=3))
    assert [args for args, _ in calls] == [(['a'],), (['b'],), ([],)]


@pytest.mark.parametrize(
    'row', [ROW, {'messages': []}, {'input_ids': torch.tensor([1, 2]), 'labels': torch.tensor([2, -100])}]
)
def test_a_single_row_is_not_cut_along_its_tokens(row: dict[str, Any]) -> None:
    """One InputFeature or trajectory is a batch of one: the first data rank gets it as it is, the others no row."""
    calls = dispatch_args(RemoteFunctionSpec('slice_dp'), (row,), {}, _mesh(dp_size=2))
    assert [args for args, _ in calls] == [(row,), ([],)]
    calls = dispatch_args(RemoteFunctionSpec('slice_dp'), (row,), {}, _mesh(tp_size=2))
    assert all(args[0] is row for args, _ in calls)


def test_inputs_are_not_changed() -> None:
    """Dividing makes new lists and dictionaries."""
    rows, batch = [dict(ROW) for _ in range(4)], {'input_ids': torch.ones(4, 2)}
    before = copy.deepcopy(rows)
    dispatch_args(RemoteFunctionSpec('slice'), (rows, batch), {}, _mesh(dp_size=2))
    assert rows == before
    assert batch['input_ids'].shape == (4, 2)


def test_the_first_worker_alone_gets_everything() -> None:
    """With execute='first' there is one call, undivided, and one result."""
    spec = RemoteFunctionSpec('slice', 'first', 'flatten')
    assert dispatch_args(spec, ([1, 2, 3],), {}, _mesh(dp_size=2)) == [(([1, 2, 3],), {})]
    assert collect_results(spec, [[1, 2, 3]], _mesh(dp_size=2, pp_size=2)) == [1, 2, 3]


def test_callables_decide_by_themselves() -> None:
    """A dispatch function gives each worker its arguments; a collect function gets every worker's result."""

    def reverse(args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh) -> list[Any]:
        return [((args[0][mesh.world_size - 1 - rank],), kwargs) for rank in range(mesh.world_size)]

    spec = RemoteFunctionSpec(reverse, collect=lambda results: '-'.join(results))
    assert _call(spec, _mesh(tp_size=3), lambda x, end: x + end, 'abc', end='!') == 'c!-b!-a!'


def _stream() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ('spec', 'args', 'message'),
    [
        (
            RemoteFunctionSpec('slice'),
            ([1], [1, 2]),
            r"'slice' .*different numbers of them: argument 1 1, argument 2 2",
        ),
        (
            RemoteFunctionSpec('slice_dp'),
            ([1, 2, 3], {'logps': torch.ones(2, 1)}),
            r"argument 1 3, argument 2\['logps'\] 2",
        ),
        (RemoteFunctionSpec('slice'), (_stream(),), 'argument 1 is an iterator. Pass a list'),
        (RemoteFunctionSpec(lambda a, k, m: [(a, k)]), (), r'arguments for 1 worker\(s\); there are 2'),
        (RemoteFunctionSpec(lambda a, k, m: 3), (), r'must return a list of \(args, kwargs\)'),
    ],
)
def test_what_cannot_be_divided_is_named(spec: RemoteFunctionSpec, args: tuple[Any, ...], message: str) -> None:
    """The rule, the arguments and their numbers of rows are in the error."""
    with pytest.raises(RemoteError, match=message):
        dispatch_args(spec, args, {}, _mesh(dp_size=2))


@pytest.mark.parametrize(
    ('rule', 'results', 'message'),
    [
        ('flatten', [[1], None], "'flatten' cannot put together results of type NoneType, list: lists are wanted"),
        ('flatten', [{'a': 1}, {'a': 1}], 'lists are wanted'),
        ('mean', ['a', 'b'], 'numbers, tensors or dictionaries'),
        ('sum', [[1], [2]], 'numbers, tensors or dictionaries'),
        ('mean', [{'a': 1}, {'b': 1}], 'the same keys'),
        ('none', [1], r'1 result\(s\) came back from 2 worker'),
    ],
)
def test_what_cannot_be_put_together_is_named(rule: str, results: list[Any], message: str) -> None:
    """The rule and the types that came back are in the error."""
    with pytest.raises(RemoteError, match=message):
        collect_results(RemoteFunctionSpec(collect=rule), results, _mesh(dp_size=2))


# -- declaring --------------------------------------------------------------------------------------------------------------


def test_a_declared_function_is_the_same_object() -> None:
    """Nothing is wrapped: in local mode a call costs what it cost before."""

    def step(self: Any) -> int:
        return 1

    assert remote_function(dispatch='slice', collect='mean')(step) is step
    assert step._remote_function == RemoteFunctionSpec('slice', 'all', 'mean')  # type: ignore[attr-defined]


@pytest.mark.parametrize('rules', [{'dispatch': 'slices'}, {'execute': 'second'}, {'execute': len}, {'collect': None}])
def test_unknown_rules_are_refused_where_they_are_declared(rules: dict[str, Any]) -> None:
    """The error lists the rules that there are."""
    with pytest.raises(RemoteError, match='must be one of '):
        remote_function(**rules)
    with pytest.raises(RemoteError, match="execute='some' must be one of 'all', 'first'"):
        remote_class(execute='some')


@remote_class(execute='first')
class Counter:
    """A class with declared methods."""

    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value = start
        self.step = step

    @remote_function(collect='none')
    def up(self) -> int:
        self.value += self.step
        return self.value


class Doubler(Counter):
    """A subclass with a constructor of its own, and an override that repeats no declaration."""

    def __init__(self, factor: int) -> None:
        super().__init__(step=factor)

    def up(self) -> int:
        return super().up() * 2


def test_local_instances_are_ordinary() -> None:
    """Before initialize, instances are made, copied and called as ever, and wrong arguments raise TypeError."""
    assert Counter(3, step=2).up() == 5
    assert Doubler(3).up() == 6
    assert copy.deepcopy(Counter(7)).value == 7
    with pytest.raises(TypeError, match='unexpected keyword'):
        Counter(first=1)  # type: ignore[call-arg]


def test_signatures_are_those_of_the_constructor() -> None:
    """`inspect.signature` and `help` show the arguments, of subclasses too."""
    assert str(inspect.signature(Counter)) == "(start: 'int' = 0, *, step: 'int' = 1) -> 'None'"
    assert str(inspect.signature(Doubler)) == "(factor: 'int') -> 'None'"


def test_declarations_are_inherited() -> None:
    """An override keeps its base's rules; the class its own."""
    assert spec_of(Doubler, 'up') == RemoteFunctionSpec(collect='none')
    assert spec_of(Doubler, '__init__') is None
    own = class_spec_of(Doubler)
    assert own is not None
    assert own.execute == 'first'
    assert class_spec_of(int) is None


def test_the_hook_keeps_other_ways_of_construction() -> None:
    """An own __new__, a mixin's __new__, abstract methods and classes without a constructor behave as without it."""

    @remote_class()
    class Single:
        def __new__(cls, value: int) -> Single:
            made = super().__new__(cls)
            made.value = value  # type: ignore[attr-defined]
            return made

    class Marked:
        def __new__(cls, *args: Any) -> Marked:
            made = super().__new__(cls)
            made.marked = True  # type: ignore[attr-defined]
            return made

    class Both(Counter, Marked):
        pass

    @remote_class()
    class Unfinished(ABC):
        @abstractmethod
        def work(self) -> None: ...

    @remote_class()
    class Bare:
        pass

    assert Single(4).value == 4  # type: ignore[attr-defined]
    assert (Both(5).value, Both(5).marked) == (5, True)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match='abstract'):
        Unfinished()  # type: ignore[abstract]
    assert isinstance(Bare(), Bare)
    with pytest.raises(TypeError, match='takes no arguments'):
        Bare(1)  # type: ignore[call-arg]


class Proxy:
    """What stands for an instance: calls every worker, in this process."""

    def __init__(self, cls: type, workers: list[Any], mesh: DeviceMesh) -> None:
        self._cls, self._workers, self._mesh = cls, workers, mesh

    def __getattr__(self, name: str) -> Any:
        spec = spec_of(self._cls, name)
        assert spec is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            calls = dispatch_args(spec, args, kwargs, self._mesh)
            called = zip(self._workers, calls, strict=False)
            return collect_results(spec, [getattr(worker, name)(*a, **k) for worker, (a, k) in called], self._mesh)

        return call


class InProcess(Executor):
    """A remote executor whose workers are objects of this process."""

    def start(self, mesh: DeviceMesh, groups: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.mesh = mesh

    def create(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        workers = []
        for _ in range(self.mesh.world_size):
            worker = object.__new__(cls)
            worker.__init__(*args, **kwargs)  # type: ignore[misc]
            workers.append(worker)
        return Proxy(cls, workers, self.mesh)

    def shutdown(self) -> None:
        return None


def test_a_remote_executor_makes_what_stands_for_an_instance() -> None:
    """Under it, construction gives a proxy, of subclasses too; afterwards it gives instances again."""
    with initialize(InProcess, global_device_mesh=_mesh(dp_size=3)):
        counter = Counter(1, step=2)
        assert isinstance(counter, Proxy)
        assert counter.up() == [3, 3, 3]
        assert isinstance(Doubler(2), Proxy)
    assert isinstance(Counter(), Counter)
