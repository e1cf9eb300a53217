"""How a class that was written for one process is called on many.

`remote_class` and `remote_function` declare it; an executor (registry `executors`) carries it out. In local mode both cost nothing:
the function stays the very same object, the class only looks at the runtime when an instance is made.

The rules themselves, how arguments are divided and results put together, are the pure functions `dispatch_args` and
`collect_results`, for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle.errors import RemoteError

if TYPE_CHECKING:
    from twinkle.device_mesh import DeviceMesh

__all__ = [
    'RemoteClassSpec',
    'RemoteFunctionSpec',
    'collect_results',
    'dispatch_args',
    'remote_class',
    'remote_function',
    'spec_of',
]

F = TypeVar('F', bound=Callable[..., Any])
C = TypeVar('C', bound=type)

_DISPATCH = ('all', 'slice', 'slice_dp')
_EXECUTE = ('all', 'first')
_COLLECT = ('none', 'flatten', 'mean', 'sum', 'first', 'last_pp')


@dataclass(frozen=True)
class RemoteFunctionSpec:
    """How one method is called on many workers.

    Attributes:
        dispatch: `all` gives every worker the same arguments; `slice` divides each list among workers, `slice_dp` among data ranks
            (peers of one data rank get the same); a callable `f(args, kwargs, mesh) -> [(args, kwargs), ...]` decides by itself.
        execute: on `all` workers, or the `first` only.
        collect: what the caller gets: `none` the list of results, `flatten` one list of their items, `mean`, `sum`, `first`,
            `last_pp` the results of the last pipeline stage of each data rank, or a callable on the list (of one result per data
            rank where arguments were divided by data ranks).
    """

    dispatch: str | Callable[..., Any] = 'all'
    execute: str = 'all'
    collect: str | Callable[..., Any] = 'first'


@dataclass(frozen=True)
class RemoteClassSpec:
    """Where instances of a class live: on `all` workers of a group, or on the `first`."""

    execute: str = 'all'


def remote_function(
    *, dispatch: str | Callable[..., Any] = 'all', execute: str = 'all', collect: str | Callable[..., Any] = 'first'
) -> Callable[[F], F]:
    """Declare how a method is called remotely. The function itself is returned, with the declaration attached.

    Raises:
        RemoteError: an unknown rule.
    """
    spec = RemoteFunctionSpec(
        _known('dispatch', dispatch, _DISPATCH),
        str(_known('execute', execute, _EXECUTE)),
        _known('collect', collect, _COLLECT),
    )

    def declare(function: F) -> F:
        function._remote_function = spec  # type: ignore[attr-defined]
        return function

    return declare


def remote_class(*, execute: str = 'all') -> Callable[[C], C]:
    """Declare that instances of a class may live in workers. Under a remote executor, making one gives a proxy."""
    spec = RemoteClassSpec(str(_known('execute', execute, _EXECUTE)))

    def declare(cls: C) -> C:
        original_new: Any = cls.__new__

        def __new__(subclass: type, *args: Any, **kwargs: Any) -> Any:
            from twinkle.runtime.state import current_executor

            executor = current_executor()
            if executor is not None and executor.is_remote:
                return executor.create(subclass, args, kwargs)
            return original_new(subclass) if original_new is object.__new__ else original_new(subclass, *args, **kwargs)

        cls.__new__ = __new__  # type: ignore[assignment]
        cls._remote_class = spec  # type: ignore[attr-defined]
        return cls

    return declare


def spec_of(cls: type, method: str) -> RemoteFunctionSpec | None:
    """The declaration of a method, found along the class's bases where an override does not repeat it."""
    for base in cls.__mro__:
        spec = getattr(base.__dict__.get(method), '_remote_function', None)
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None


def dispatch_args(
    spec: RemoteFunctionSpec, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each worker, by rank. Only lists (and tuples) are divided; all else goes to every worker.

    Raises:
        RemoteError: lists of different lengths, which cannot be divided alike, or a callable that gave another number.
    """
    n = mesh.world_size
    if callable(spec.dispatch):
        given = [(tuple(a), dict(k)) for a, k in spec.dispatch(args, kwargs, mesh)]
        if len(given) != n:
            raise RemoteError(f'The dispatch function gave arguments for {len(given)} worker(s); there are {n}.')
        return given
    if spec.dispatch == 'all':
        return [(tuple(args), dict(kwargs)) for _ in range(n)]
    lengths = {len(value) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))}
    if len(lengths) > 1:
        raise RemoteError(
            f'dispatch={spec.dispatch!r} divides lists among workers, and these have different lengths: {sorted(lengths)}. '
            'Pass lists of one length, one item per row.'
        )
    total = next(iter(lengths), 0)
    slices = [
        mesh.get_slice(total, rank) if spec.dispatch == 'slice_dp' else _even_slice(total, rank, n) for rank in range(n)
    ]
    return [
        (tuple(_part(value, where) for value in args), {key: _part(value, where) for key, value in kwargs.items()})
        for where in slices
    ]


def collect_results(spec: RemoteFunctionSpec, results: Sequence[Any], mesh: DeviceMesh) -> Any:
    """What the caller gets of the workers' results, given by rank.

    Raises:
        RemoteError: results that the rule cannot put together.
    """
    if spec.execute == 'first':
        results = results[:1]
    elif len(results) != mesh.world_size:
        raise RemoteError(f'{len(results)} result(s) came back from {mesh.world_size} worker(s).')
    rule = spec.collect
    if (spec.execute == 'all' and spec.dispatch == 'slice_dp' and rule not in ('none', 'first')) or (
        rule == 'last_pp' and spec.execute == 'all'
    ):
        results = _one_per_data_rank(results, mesh)
    if callable(rule):
        return rule(list(results))
    if rule == 'first':
        return results[0]
    if rule in ('none', 'last_pp'):
        return list(results)
    try:
        if rule == 'flatten':
            return [item for result in results for item in result]
        total = sum(results[1:], start=results[0])
        return total if rule == 'sum' else total / len(results)
    except TypeError as error:
        kinds = sorted({type(result).__name__ for result in results})
        raise RemoteError(
            f'collect={rule!r} cannot put together results of type {", ".join(kinds)}: {error}'
        ) from error


def _one_per_data_rank(results: Sequence[Any], mesh: DeviceMesh) -> list[Any]:
    """The result of each data rank, from its last pipeline stage (where losses and outputs are)."""
    chosen: dict[int, Any] = {}
    for rank, result in enumerate(results):
        place = mesh.coordinates(rank)
        if place['pp'] == mesh.pp_size - 1:
            chosen.setdefault(mesh.data_rank(rank), result)
    return [chosen[index] for index in sorted(chosen)]


def _even_slice(total: int, index: int, n: int) -> slice:
    each, extra = divmod(total, n)
    start = index * each + min(index, extra)
    return slice(start, start + each + (index < extra))


def _part(value: Any, where: slice) -> Any:
    return value[where] if isinstance(value, (list, tuple)) else value


def _known(what: str, rule: Any, names: tuple[str, ...]) -> Any:
    if rule in names or (callable(rule) and what != 'execute'):
        return rule
    also = '' if what == 'execute' else ', or a callable'
    raise RemoteError(f'{what}={rule!r} must be one of {", ".join(map(repr, names))}{also}.')
