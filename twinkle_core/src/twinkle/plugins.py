"""What is installed: entry points of the groups `twinkle.*`, read once per process, and hooks.

Discovery reads metadata and imports nothing. Which distribution an entry comes from is read only when it matters (a conflict, an
allow-list, a listing): for a thousand distributions that costs most of a second.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from twinkle.errors import PluginLoadError
from twinkle.logging import get_logger

if TYPE_CHECKING:
    import pluggy

__all__ = ['PLUGIN_API', 'FoundPart', 'PluginCache', 'call_hook', 'get_hooks', 'plugin_cache', 'refresh']

PLUGIN_API = 1
"""The version of what core offers to plugins. `docs/plugin_api.md` tells how it changes."""

OWN_DISTRIBUTIONS = ('twinkle-core', 'twinkle-hf', 'twinkle-megatron', 'twinkle-ray')
ALLOW, DENY = 'TWINKLE_PLUGINS', 'TWINKLE_DISABLE_PLUGINS'
HOOKS, API = 'twinkle.hooks', 'twinkle.plugin_api'

logger = get_logger('twinkle.plugins')


class _Distribution(Protocol):
    metadata: Any
    version: str
    requires: list[str] | None


def normalise(name: str) -> str:
    """A distribution's name as packaging compares it (PEP 503)."""
    import re

    return re.sub(r'[-_.]+', '-', name).lower()


@dataclass(frozen=True)
class FoundPart:
    """One entry point, with its distribution read when asked."""

    group: str
    name: str
    target: str
    entry_point: Any = field(repr=False, compare=False)

    @cached_property
    def distribution(self) -> str:
        """The name of the distribution that declares it."""
        dist = self.entry_point.dist
        return normalise(dist.metadata['Name']) if dist is not None else 'unknown'

    @cached_property
    def version(self) -> str:
        """That distribution's version."""
        dist = self.entry_point.dist
        return str(dist.version) if dist is not None else ''

    @property
    def is_disabled(self) -> bool:
        """Whether the allow-list or the deny-list keeps this distribution out."""
        allow, deny = _names_in(ALLOW), _names_in(DENY)
        if allow is None and not deny:
            return False
        name = self.distribution
        return name in (deny or ()) or (allow is not None and name not in allow and name not in OWN_DISTRIBUTIONS)

    def unmet_need(self, api_of: Mapping[str, str]) -> str | None:
        """Why this distribution cannot work with this core, or None."""
        from packaging.requirements import Requirement

        from twinkle import __version__

        dist = self.entry_point.dist
        for text in (dist.requires or ()) if dist is not None else ():
            need = Requirement(text)
            if normalise(need.name) == 'twinkle-core' and (need.marker is None or need.marker.evaluate({'extra': ''})):
                if not need.specifier.contains(__version__, prereleases=True):
                    return f'it needs twinkle-core{need.specifier}, and {__version__} is installed'
        wrote_for = api_of.get(self.distribution)
        if wrote_for is not None and wrote_for != str(PLUGIN_API):
            return f'it was written for plugin API {wrote_for}, and this twinkle-core offers {PLUGIN_API}'
        return None

    def load(self, api_of: Mapping[str, str]) -> Any:
        """Import the target.

        Raises:
            PluginLoadError: it is disabled, its needs are unmet, or its import fails; the cause is chained.
        """
        who = f'{self.name!r} of {self.distribution} {self.version} ({self.target})'
        if self.is_disabled:
            raise PluginLoadError(f'{who} is disabled by {ALLOW} or {DENY}. Change these variables to use it.')
        reason = self.unmet_need(api_of)
        if reason is not None:
            raise PluginLoadError(
                f'{who} cannot be used: {reason}. Install a version that fits: pip install --upgrade {self.distribution}'
            )
        try:
            return self.entry_point.load()
        except Exception as error:
            raise PluginLoadError(
                f'{who} cannot be loaded: {type(error).__name__}: {error}. Repair or upgrade it (pip install --upgrade '
                f'{self.distribution}), remove it (pip uninstall {self.distribution}), or keep it out with '
                f'{DENY}={self.distribution}.'
            ) from error


class PluginCache:
    """All entry points of this process, read at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, list[FoundPart]] | None = None
        self._hooks: pluggy.PluginManager | None = None
        self.generation = 0

    def parts(self, group: str) -> list[FoundPart]:
        """The entry points of a group; identical duplicates (an editable install seen twice) are one."""
        return self._read().get(group, [])

    @property
    def api_of(self) -> dict[str, str]:
        """The plugin API that each distribution says it was written for (group `twinkle.plugin_api`, names `v1`, `v2`, ...)."""
        return {part.distribution: part.name.removeprefix('v') for part in self.parts(API)}

    def refresh(self) -> None:
        """Read metadata again at next use."""
        with self._lock:
            self._groups = None
            self._hooks = None
            self.generation += 1

    def _read(self) -> dict[str, list[FoundPart]]:
        groups = self._groups
        if groups is None:
            with self._lock:
                if self._groups is None:
                    self._groups = _read_groups()
                groups = self._groups
            _warn_unmatched(groups)
        return groups

    def hooks(self) -> pluggy.PluginManager:
        """The plugin manager, with every plugin of `twinkle.hooks` registered; those that fail to load are reported."""
        if self._hooks is None:
            import pluggy

            from twinkle import hookspecs

            manager = pluggy.PluginManager('twinkle')
            manager.add_hookspecs(hookspecs)
            for part in self.parts(HOOKS):
                if part.is_disabled:
                    continue
                try:
                    manager.register(part.load(self.api_of), name=f'{part.name} ({part.distribution})')
                except Exception as error:
                    logger.warning('Hooks of plugin %s (%s) are left out: %s', part.name, part.distribution, error)
            with self._lock:
                self._hooks = self._hooks or manager
        return self._hooks


def _read_groups() -> dict[str, list[FoundPart]]:
    from importlib_metadata import entry_points

    groups: dict[str, list[FoundPart]] = {}
    seen: dict[tuple[str, str, str], FoundPart] = {}
    for point in entry_points():
        if not point.group.startswith('twinkle.'):
            continue
        part = FoundPart(point.group, point.name, point.value, point)
        twin = seen.setdefault((part.group, part.name, part.target), part)
        if twin is part or twin.distribution != part.distribution:
            groups.setdefault(point.group, []).append(part)
    return groups


def _names_in(variable: str) -> frozenset[str] | None:
    """The distributions listed in an environment variable; None if it is not set."""
    text = os.environ.get(variable)
    return None if text is None else frozenset(normalise(name) for name in text.replace(',', ' ').split())


def _warn_unmatched(groups: Mapping[str, list[FoundPart]]) -> None:
    listed = (_names_in(ALLOW) or frozenset()) | (_names_in(DENY) or frozenset())
    if not listed:
        return
    there = {part.distribution for parts in groups.values() for part in parts}
    for name in sorted(listed - there):
        warnings.warn(f'{ALLOW} or {DENY} names {name!r}, and no installed plugin is called that.', stacklevel=4)


plugin_cache = PluginCache()


def refresh() -> None:
    """Forget what was read of installed distributions; it is read again at next use."""
    plugin_cache.refresh()


def get_hooks() -> pluggy.PluginManager:
    """The hook manager, for registering an observer at run time: `get_hooks().register(my_object)`."""
    return plugin_cache.hooks()


def _implementations(name: str) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    caller = getattr(get_hooks().hook, name)
    for implementation in reversed(caller.get_hookimpls()):
        yield implementation.plugin_name, implementation.function, implementation.argnames


def call_hook(name: str, **arguments: Any) -> None:
    """Tell every plugin. One that raises is reported by name, and ends neither the others nor the run."""
    for plugin, function, argnames in _implementations(name):
        try:
            function(*(arguments[arg] for arg in argnames))
        except Exception:
            logger.exception('Plugin %s raised in its hook %s; the run goes on.', plugin, name)
