"""Which adapter a call means, and where its state lives."""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from twinkle.errors import DuplicateAdapterError, NameNotAllowedError, StateError, UnknownAdapterError
from twinkle.model.state import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ['AdapterTable', 'check_name']

_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_-]*')


def check_name(name: object) -> None:
    """Raise `NameNotAllowedError` for what cannot be an adapter's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise NameNotAllowedError(
            f'Adapter name {name!r} is not allowed: use letters, digits, "_" and "-" (it becomes part of parameter names), '
            'not starting with "-".'
        )


class AdapterTable:
    """The states of a model's adapters, by name. Without adapters there is one state, the base model's, named `''`."""

    def __init__(self, make_state: Callable[[str], TrainState]) -> None:
        self._make_state = make_state
        self._states: dict[str, TrainState] = {'': make_state('')}
        self._enclosing: ContextVar[str | None] = ContextVar('enclosing_adapter', default=None)

    @property
    def names(self) -> list[str]:
        """Names of the adapters, without the base model."""
        return [name for name in self._states if name]

    @property
    def states(self) -> list[TrainState]:
        """Every state, in the order of creation."""
        return list(self._states.values())

    def check_new(self, name: str) -> None:
        """Raise unless an adapter of this name may be added now. Changes nothing."""
        check_name(name)
        if name in self._states:
            raise DuplicateAdapterError(
                f'Adapter {name!r} exists already; there are {self.names}. Choose another name, or load(...) weights into it.'
            )
        base = self._states.get('')
        if base is not None and (base.optimizer is not None or base.window.micro_batches):
            raise StateError(
                f'Adapter {name!r} cannot be added: the base model itself is being trained (it has an optimizer or gradients), and '
                'adapters freeze it. Add adapters before set_optimizer(), or build a second model.'
            )

    def add(self, name: str) -> TrainState:
        """Add a state. The first adapter takes over what was set on the base model (template, processor, loss, metrics)."""
        self.check_new(name)
        state = self._states.pop('', None) or self._make_state(name)
        state.adapter_name = name
        self._states[name] = state
        return state

    def get(self, name: str | None = None) -> TrainState:
        """The state that `name` means.

        Raises:
            UnknownAdapterError: no such adapter, or no name and several adapters.
        """
        if name is None:
            name = self._enclosing.get()
        if name is None:
            if len(self._states) == 1:
                return next(iter(self._states.values()))
            raise UnknownAdapterError(
                f'There are several adapters: {self.names}. Say which one with adapter_name=..., or work within '
                '`with model.adapter(name):`.'
            )
        state = self._states.get(name)
        if state is None:
            there = (
                f'there are {self.names}'
                if self.names
                else 'no adapter was added; leave adapter_name out to use the base model'
            )
            hint = (
                ' To run the base model without adapters use forward_only(..., disable_lora=True).'
                if name == ''
                else ''
            )
            raise UnknownAdapterError(f'Unknown adapter {name!r}: {there}.{hint}')
        return state

    @contextmanager
    def enclosing(self, name: str) -> Iterator[str]:
        """Within the context, a name left out means this one. Nests, and is restored after exceptions."""
        token = self._enclosing.set(self.get(name).adapter_name)
        try:
            yield name
        finally:
            self._enclosing.reset(token)
