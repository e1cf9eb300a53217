"""The rules of remote calls, as pure functions: who gets which arguments, and what the caller gets of the results.

Nothing here knows of processes. Tensors are told by their `shape`, so that NumPy's and PyTorch's are divided alike and neither is
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any

from twinkle.device_mesh.mesh import even_slice
from twinkle.errors import RemoteError

if TYPE_CHECKING:
    from twinkle.device_mesh import DeviceMesh

__all__ = ['COLLECT', 'DISPATCH', 'RemoteFunctionSpec', 'collect_results', 'dispatch_args']

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

DISPATCH = ('all', 'slice', 'slice_dp')
COLLECT = ('none', 'flatten', 'mean', 'sum', 'first', 'last_pp')


@dataclass(frozen=True)
class RemoteFunctionSpec:
    """How one method is called on many workers.

    Attributes:
        dispatch: `all` gives every worker the same arguments. `slice` divides whatever has rows among the workers, `slice_dp` among
            the data ranks (peers of one data rank get the same). Rows are the items of a list or tuple, the first dimension of a
            tensor, alone or in a dictionary of tensors, and an `InputFeature` or trajectory is one row; all else goes to
            everybody. A callable `f(args, kwargs, mesh) -> [(args, kwargs), ...]` decides by itself, one pair per worker.
        execute: on `all` workers, or on the `first` only, which then gets everything.
        collect: what the caller gets. `none`: the list of every worker's result. `first`: the first worker's. `last_pp`: a list of
            one result per data rank, of its last pipeline stage, where losses and outputs are. `flatten` (one list of their
            items), `mean`, `sum` (of numbers, tensors, or dictionaries of them), or a callable on the list: of the same results as
            `last_pp`, or of all workers' where `dispatch` gave each its own. A mean is of workers, not weighted by rows.
    """

    dispatch: str | Callable[..., Any] = 'all'
    execute: str = 'all'
    collect: str | Callable[..., Any] = 'first'


def dispatch_args(
    spec: RemoteFunctionSpec, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh
) -> list[Arguments]:
    """The arguments of each worker, by rank; of the first only where `execute='first'`.

    Raises:
        RemoteError: values with different numbers of rows, which cannot be divided alike, or a callable that gave something else
            than a pair for each worker.
    """
    workers = 1 if spec.execute == 'first' else mesh.world_size
    if callable(spec.dispatch):
        return _dispatched_by(spec.dispatch, args, kwargs, mesh, workers)
    if spec.dispatch == 'all' or workers == 1:
        return [(tuple(args), dict(kwargs)) for _ in range(workers)]
    total = _count_rows(spec.dispatch, {**{f'argument {i}': value for i, value in enumerate(args, 1)}, **kwargs})
    by_data = spec.dispatch == 'slice_dp'
    calls: list[Arguments] = []
    for rank in range(workers):
        where = mesh.get_slice(total, rank) if by_data else even_slice(total, rank, workers)
        if where == slice(0, total):
            calls.append((tuple(args), dict(kwargs)))
        else:
            calls.append((tuple(_part(v, where) for v in args), {name: _part(v, where) for name, v in kwargs.items()}))
    return calls


def collect_results(spec: RemoteFunctionSpec, results: Sequence[Any], mesh: DeviceMesh) -> Any:
    """What the caller gets of the workers' results, which are given by rank.

    Raises:
        RemoteError: a wrong number of results, or results that the rule cannot put together.
    """
    workers = 1 if spec.execute == 'first' else mesh.world_size
    if len(results) != workers:
        raise RemoteError(f'{len(results)} result(s) came back from {workers} worker(s).')
    rule = spec.collect
    if rule == 'none':
        return list(results)
    if rule == 'first':
        return results[0]
    each_its_own = spec.dispatch == 'slice' or callable(spec.dispatch)
    if workers > 1 and (rule == 'last_pp' or not each_its_own):
        results = _one_per_data_rank(results, mesh)
    if callable(rule):
        return rule(list(results))
    if rule == 'last_pp':
        return list(results)
    if rule == 'flatten':
        if not all(isinstance(result, (list, tuple)) for result in results):
            raise _cannot(rule, results, 'lists are wanted')
        return [item for result in results for item in result]
    total = _sum(str(rule), results)
    return total if rule == 'sum' else _divided(total, len(results))


# -- dividing ----------------------------------------------------------------------------------------------------------


def _dispatched_by(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh, workers: int
) -> list[Arguments]:
    given = function(args, kwargs, mesh)
    name = getattr(function, '__name__', repr(function))
    try:
        calls = [(tuple(its_args), dict(its_kwargs)) for its_args, its_kwargs in given]
    except (TypeError, ValueError) as error:
        raise RemoteError(
            f'The dispatch function {name} must return a list of (args, kwargs), one per worker: {error}'
        ) from error
    if len(calls) != workers:
        raise RemoteError(
            f'The dispatch function {name} gave arguments for {len(calls)} worker(s); there are {workers}.'
        )
    return calls


def _count_rows(rule: str, values: Mapping[str, Any]) -> int:
    """The number of rows that all values that have rows agree on; 0 if none has."""
    counts: dict[str, int] = {}
    for name, value in values.items():
        if isinstance(value, Iterator):
            raise RemoteError(f'dispatch={rule!r} divides rows among workers, and {name} is an iterator. Pass a list.')
        if _is_batch(value):
            counts.update({f'{name}[{key!r}]': len(v) for key, v in value.items() if _has_rows(v)})
        elif _is_row(value):
            counts[name] = 1
        elif _has_rows(value):
            counts[name] = len(value)
    if len(set(counts.values())) > 1:
        raise RemoteError(
            f'dispatch={rule!r} divides rows among workers, and these have different numbers of them: '
            f'{", ".join(f"{name} {count}" for name, count in counts.items())}. Pass lists with one item per row.'
        )
    return next(iter(counts.values()), 0)


def _part(value: Any, where: slice) -> Any:
    if _is_batch(value):
        return {key: v[where] if _has_rows(v) else v for key, v in value.items()}
    if _is_row(value):
        return [value][where]
    return value[where] if _has_rows(value) else value


def _has_rows(value: object) -> bool:
    return isinstance(value, (list, tuple)) or len(getattr(value, 'shape', ())) > 0


def _is_row(value: object) -> bool:
    """One sample: a trajectory, or an `InputFeature`, whose ids have one dimension."""
    if not isinstance(value, Mapping):
        return False
    return 'messages' in value or ('input_ids' in value and len(getattr(value['input_ids'], 'shape', (0,))) == 1)


def _is_batch(value: object) -> bool:
    """Samples in tensors, by name."""
    return (
        isinstance(value, Mapping)
        and not _is_row(value)
        and any(len(getattr(v, 'shape', ())) > 0 for v in value.values())
    )


# -- putting together --------------------------------------------------------------------------------------------------


def _one_per_data_rank(results: Sequence[Any], mesh: DeviceMesh) -> list[Any]:
    """The result of each data rank, from the first rank of its last pipeline stage."""
    chosen: dict[int, Any] = {}
    for rank, result in enumerate(results):
        place = mesh.coordinates(rank)
        if place['pp'] == mesh.pp_size - 1:
            chosen.setdefault(place['data'], result)
    return [chosen[index] for index in sorted(chosen)]


def _sum(rule: str, results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, Mapping):
        if not all(isinstance(result, Mapping) and result.keys() == first.keys() for result in results):
            raise _cannot(rule, results, 'the dictionaries must have the same keys')
        return {key: _sum(rule, [result[key] for result in results]) for key in first}
    if not all(isinstance(result, Number) or hasattr(result, 'shape') for result in results):
        raise _cannot(rule, results, 'numbers, tensors or dictionaries of them are wanted')
    return sum(results[1:], start=first)


def _divided(total: Any, n: int) -> Any:
    return {key: _divided(value, n) for key, value in total.items()} if isinstance(total, dict) else total / n


def _cannot(rule: str, results: Sequence[Any], why: str) -> RemoteError:
    kinds = ', '.join(sorted({type(result).__name__ for result in results}))
    return RemoteError(f'collect={rule!r} cannot put together results of type {kinds}: {why}.')
