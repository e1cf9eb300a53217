"""How a class that was written for one process is called on many: the declarations.

`remote_class` and `remote_function` declare it; an executor (registry `executors`) carries it out. In local mode both cost nothing:
the function stays the very same object, the class only looks at the runtime when an instance is made.

The rules themselves, how arguments are divided and results put together, are the pure functions `dispatch_args` and
`collect_results`, for any number of workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from twinkle.current import remote_executor
from twinkle.dispatch import COLLECT, DISPATCH, RemoteFunctionSpec, collect_results, dispatch_args
from twinkle.errors import RemoteError

__all__ = [
    'RemoteClassSpec',
    'RemoteFunctionSpec',
    'class_spec_of',
    'collect_results',
    'dispatch_args',
    'remote_class',
    'remote_function',
    'spec_of',
]

F = TypeVar('F', bound=Callable[..., Any])
C = TypeVar('C', bound=type)

_EXECUTE = ('all', 'first')


@dataclass(frozen=True)
class RemoteClassSpec:
    """Where instances of a class live: on `all` workers of a group, or on the `first`."""

    execute: str = 'all'


def remote_function(
    *, dispatch: str | Callable[..., Any] = 'all', execute: str = 'all', collect: str | Callable[..., Any] = 'first'
) -> Callable[[F], F]:
    """Declare how a method is called remotely; `RemoteFunctionSpec` tells the rules. The function itself is returned.

    Raises:
        RemoteError: an unknown rule.
    """
    _check_rule('dispatch', dispatch, DISPATCH)
    _check_rule('execute', execute, _EXECUTE)
    _check_rule('collect', collect, COLLECT)
    spec = RemoteFunctionSpec(dispatch, execute, collect)

    def declare(function: F) -> F:
        function._remote_function = spec  # type: ignore[attr-defined]
        return function

    return declare


def remote_class(*, execute: str = 'all') -> Callable[[C], C]:
    """Declare that instances of a class may live in workers. Under a remote executor, making one gives what stands for it here.

    Subclasses inherit it. Where the executor is local, an instance is made as ever, and its calls are plain calls.

    Raises:
        RemoteError: an unknown rule.
    """
    _check_rule('execute', execute, _EXECUTE)
    spec = RemoteClassSpec(execute)

    def declare(cls: C) -> C:
        own_new: staticmethod[..., Any] | None = cls.__dict__.get('__new__')

        def __new__(subclass: type, *args: Any, **kwargs: Any) -> Any:
            executor = remote_executor()
            if executor is not None:
                return executor.create(subclass, args, kwargs)
            new = own_new.__func__ if own_new is not None else super(cls, subclass).__new__  # type: ignore[misc, arg-type]
            if new is not object.__new__:
                return new(subclass, *args, **kwargs)
            if (args or kwargs) and subclass.__init__ is object.__init__:  # type: ignore[misc]
                raise TypeError(
                    f'{subclass.__name__}() takes no arguments'
                )  # Python stops checking where __new__ is overridden
            return object.__new__(subclass)

        cls.__new__ = __new__  # type: ignore[assignment]
        cls._remote_class = spec  # type: ignore[attr-defined]
        if own_new is None:
            cls.__signature__ = _InitSignature()  # type: ignore[attr-defined]
        return cls

    return declare


def spec_of(cls: type, method: str) -> RemoteFunctionSpec | None:
    """The declaration of a method, found along the class's bases where an override does not repeat it."""
    for base in cls.__mro__:
        spec = getattr(base.__dict__.get(method), '_remote_function', None)
        if isinstance(spec, RemoteFunctionSpec):
            return spec
    return None


def class_spec_of(cls: type) -> RemoteClassSpec | None:
    """The declaration of a class, its own or inherited."""
    spec = getattr(cls, '_remote_class', None)
    return spec if isinstance(spec, RemoteClassSpec) else None


class _InitSignature:
    """What `inspect.signature` and `help` show of a remote class: the arguments of its `__init__`, not those of the hook."""

    def __get__(self, instance: object | None, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError('__signature__')
        if owner.__init__ is object.__init__:  # type: ignore[misc]
            return inspect.Signature()
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _check_rule(what: str, rule: object, names: tuple[str, ...]) -> None:
    if (isinstance(rule, str) and rule in names) or (callable(rule) and what != 'execute'):
        return
    also = '' if what == 'execute' else ', or a callable'
    raise RemoteError(f'{what}={rule!r} must be one of {", ".join(map(repr, names))}{also}.')
