"""From a name to entries, and what is said where a name means none, several, or something that is no part of the kind."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinkle import runtime_parts
from twinkle.errors import AmbiguousNameError, MissingPartError, UnknownNameError
from twinkle.known_packages import package_of
from twinkle.parts import PartEntry, fold

if TYPE_CHECKING:
    from twinkle.registry import Registry

__all__ = ['ambiguous', 'explain_invalid', 'select', 'unknown']

Table = Mapping[str, list[PartEntry]]
LISTED = 40


def select(
    by_key: Table,
    by_class: Table,
    *,
    key: str,
    qualifier: str | None = None,
    qualified_only: bool = False,
    distribution: str | None = None,
    spelling: str = '',
) -> list[PartEntry]:
    """The entries that a folded name means: none if it is unknown, one if it is clear, several if it is ambiguous.

    The qualified key comes before the bare one, and any key before a class name.
    """
    if not key:
        return []
    wanted = [f'{qualifier}.{key}', key] if qualifier else [key]
    if qualified_only:
        wanted = [candidate for candidate in wanted if candidate.startswith(f'{qualifier}.')]
    for candidate in wanted:
        found = _of(distribution, by_key.get(candidate, []))
        if found:
            return _settle(found, spelling)
    found = _of(distribution, by_class.get(key, []))
    own = [entry for entry in found if qualifier and fold(entry.name).startswith(f'{qualifier}.')]
    found = own if own or qualified_only else [entry for entry in found if '.' not in entry.name] or found
    # The same class under several keys is one part, whoever declares it.
    return found[:1] if len({entry.target for entry in found}) == 1 else _settle(found, spelling)


def _of(distribution: str | None, entries: list[PartEntry]) -> list[PartEntry]:
    if distribution is not None:
        return [entry for entry in entries if entry.source == 'plugin' and entry.distribution == distribution]
    # A distribution that is kept out claims nothing; alone, it is found, to say why it cannot be used.
    return entries if len(entries) < 2 else [entry for entry in entries if not entry.is_disabled] or entries


def _settle(found: list[PartEntry], spelling: str) -> list[PartEntry]:
    runtime = [entry for entry in found if entry.source == 'runtime']
    if runtime:
        found = runtime
    if len(found) < 2:
        return found
    if len({entry.distribution for entry in found}) == 1:
        # Within a distribution keys that differ in spelling only are told apart by it.
        exact = [entry for entry in found if entry.name == spelling]
        found = exact if len(exact) == 1 else found
        if len({entry.target for entry in found}) == 1:
            return found[:1]
    return found


def unknown(registry: Registry, name: str, qualifier: str | None = None) -> UnknownNameError:
    """The error for a name that means nothing here, with what is near it and what there is."""
    kind, (bare, _, distribution) = registry.kind, name.partition('@')
    key = fold(bare)
    entries = registry.entries()
    package = package_of(kind, key)
    if package is not None and not distribution:
        upgrade = '--upgrade ' if any(entry.distribution == package for entry in entries) else ''
        return MissingPartError(f'{name!r} of {kind} comes with another package: pip install {upgrade}{package}')
    if distribution:
        claims = sorted({entry.describe() for entry in entries if key in (fold(entry.name), fold(entry.class_name))})
        if claims:
            return UnknownNameError(
                f'{name!r}: no distribution {distribution!r} brings {bare!r} of {kind}. It is: {"; ".join(claims)}.'
            )
    names = registry.names()
    accepted = ''
    if qualifier:
        names = [other for other in names if fold(other).startswith(f'{fold(qualifier)}.')]
        accepted = f' Only parts made for {qualifier} work here.'
    spellings = {fold(entry.class_name): entry.name for entry in entries if entry.name in names}
    spellings.update({fold(other).rpartition('.')[2] if qualifier else fold(other): other for other in names})
    near = dict.fromkeys(spellings[match] for match in difflib.get_close_matches(key, spellings, n=3, cutoff=0.6))
    hint = f' Did you mean {" or ".join(map(repr, near))}?' if near else ''
    word = runtime_parts.explain_missing(kind, key)
    return UnknownNameError(
        f'Unknown name {name!r} in {kind}.{hint}{accepted} There are: {_shortened(names, kind)}.{" " if word else ""}{word}'
    )


def ambiguous(kind: str, name: str, found: list[PartEntry]) -> AmbiguousNameError:
    """The error for a name that several parts claim, with every way to say which."""
    claims = ' and '.join(sorted(f'{entry.distribution} {entry.version} ({entry.target})' for entry in found))
    if len({entry.distribution for entry in found}) == 1:
        spellings = sorted({entry.name for entry in found})
        fixes = ' or '.join(map(repr, spellings if len(spellings) > 1 else sorted(entry.target for entry in found)))
        return AmbiguousNameError(f'{name!r} in {kind} is claimed by {claims}. Say which one, exactly so: {fixes}.')
    fixes = ' or '.join(sorted(f'{entry.name}@{entry.distribution}' for entry in found))
    return AmbiguousNameError(
        f'{name!r} in {kind} is claimed by {claims}. Say which one: {fixes}; or keep one out with '
        'TWINKLE_DISABLE_PLUGINS=<distribution>.'
    )


def explain_invalid(registry: Registry, part: Any, name: str | None, entry: PartEntry | None, problem: str) -> str:
    """What is wrong with something that is no part of the kind."""
    whose = f' ({entry.describe()})' if entry is not None else ''
    shown = name or (part.__qualname__ if hasattr(part, '__qualname__') else _short_repr(part))
    if registry.methods:
        rule = f'a class or instance with {", ".join(registry.methods)}'
    else:
        rule = f'a subclass or instance of {registry.base}' if registry.base else 'a class'
    function = ', or a function' if registry.functions else ''
    return (
        f'{shown!r}{whose} is no part of {registry.kind}{": " if problem else ""}{problem}. A part is {rule}{function}; or pass the '
        f'name of one: {_shortened(registry.names(), registry.kind)}.'
    )


def _shortened(names: list[str], kind: str) -> str:
    rest = f', and {len(names) - LISTED} more (twinkle plugins list {kind})' if len(names) > LISTED else ''
    return (', '.join(names[:LISTED]) or 'none') + rest


def _short_repr(part: Any) -> str:
    text = f'{type(part).__name__} {part!r}'
    return text if len(text) <= 80 else f'{text[:77]}...'
