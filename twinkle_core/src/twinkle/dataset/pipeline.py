"""What all data sets do with rows: preprocess, filter, encode, with errors that name the row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from twinkle import registry
from twinkle.errors import ConfigError, DataError, TwinkleError

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ['Encode', 'Keep', 'Transform', 'build_filter', 'build_preprocessor', 'build_template', 'fresh']


def fresh(value: Any) -> Any:
    """A copy whose lists and dictionaries are its own, so that a step may change them. What they hold, such as images, is shared."""
    if type(value) is dict:
        return {key: fresh(part) if type(part) in _NESTED else part for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(fresh(part) if type(part) in _NESTED else part for part in value)
    return value


_NESTED = (dict, list, tuple)


class Transform:
    """One row in, one row out."""

    def __init__(self, function: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self.function = function

    def __call__(self, row: dict[str, Any], index: int) -> list[dict[str, Any]]:
        result = _call(self.function, row, index)
        if not isinstance(result, Mapping):
            raise DataError(
                f'Row {index}: the preprocessor {_name(self.function)} returned {type(result).__name__}; it must return a row (to drop '
                'rows use filter()).'
            )
        return [dict(result)]


class Keep:
    """One row in, that row or none out; the function sees a copy."""

    def __init__(self, function: Callable[[Mapping[str, Any]], bool]) -> None:
        self.function = function

    def __call__(self, row: dict[str, Any], index: int) -> list[dict[str, Any]]:
        return [row] if _call(self.function, fresh(row), index) else []


class Encode:
    """One row in, its features out: one, or none or several where the template deletes or splits."""

    def __init__(self, template: Template) -> None:
        self.function = template

    def __call__(self, row: dict[str, Any], index: int) -> list[dict[str, Any]]:
        if not {'messages', 'text', 'input_ids'} & row.keys():
            raise DataError(
                f'Row {index} has neither messages nor text (columns: {sorted(row)}). Bring rows into that shape with '
                "map(preprocessor), such as map('alpaca')."
            )
        return [dict(feature) for feature in _call(self.function.encode, row, index)]


def build_preprocessor(spec: Any, options: Mapping[str, Any]) -> Any:
    """A preprocessor by name, class, instance or function; options go to a class, or are bound to a function."""
    return _with_options(registry.preprocessors, spec, options)


def build_filter(spec: Any, options: Mapping[str, Any]) -> Any:
    """A filter by name, class, instance or function."""
    return _with_options(registry.filters, spec, options)


def build_template(spec: Any, options: Mapping[str, Any]) -> Any:
    """A template by name, class or instance."""
    return registry.templates.build(spec, **options)


def _with_options(parts: registry.Registry, spec: Any, options: Mapping[str, Any]) -> Any:
    part = parts.resolve(spec, trust_remote_code=options.get('trust_remote_code') is True)
    if not options or not inspect.isroutine(part):
        return parts.build(spec, **options)
    names = inspect.signature(part).parameters
    bound = {key: value for key, value in options.items() if key != 'trust_remote_code' or key in names}
    function = partial(part, **bound)
    try:
        inspect.signature(part).bind({}, **bound)
    except TypeError as error:
        raise ConfigError(f'{_name(part)}: {error}. Its options are: {", ".join(list(names)[1:]) or "none"}.') from None
    return function


def _call(function: Callable[..., Any], row: dict[str, Any], index: int) -> Any:
    try:
        return function(row)
    except TwinkleError as error:
        if str(error).startswith('Row '):
            raise
        raise type(error)(f'Row {index}: {error}') from error
    except Exception as error:
        raise DataError(
            f'Row {index}: {_name(function)} raised {type(error).__name__}: {error} (columns: {sorted(row)})'
        ) from error


def _name(function: Any) -> str:
    function = function.func if isinstance(function, partial) else function
    return getattr(function, '__qualname__', None) or type(function).__name__
