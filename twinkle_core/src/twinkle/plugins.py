"""What is installed: entry points of the groups `twinkle.*`, read once per process, and hooks.

Discovery reads metadata and imports nothing. A distribution's version and needs are read only when they matter (a listing, a load):
for a thousand distributions that costs most of a second.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from twinkle.errors import ConfigError, PluginLoadError
from twinkle.logging import get_logger

if TYPE_CHECKING:
    import pluggy

__all__ = [
    'OLDEST_PLUGIN_API',
    'PLUGIN_API',
    'FoundPart',
    'InstalledDistribution',
    'PluginCache',
    'call_hook',
    'check_hooks',
    'get_hooks',
    'plugin_cache',
    'refresh',
]

PLUGIN_API = 1
"""The version of what core offers to plugins. `docs/plugins.md` tells how it changes."""
OLDEST_PLUGIN_API = 1
"""The oldest version that plugins may have been written for and still work."""

OWN_DISTRIBUTIONS = frozenset(
    ('twinkle-core', 'twinkle-hf', 'twinkle-megatron', 'twinkle-ray', 'twinkle-smollm2', 'twinkle-trackers')
)
ALLOW, DENY = 'TWINKLE_PLUGINS', 'TWINKLE_DISABLE_PLUGINS'
HOOKS, API = 'twinkle.hooks', 'twinkle.plugin_api'

logger = get_logger('twinkle.plugins')


class _LockOwner(Protocol):
    def renew_lock(self) -> None: ...


_lock_owners: WeakSet[_LockOwner] = WeakSet()


def renew_after_fork(owner: _LockOwner) -> None:
    """Give `owner` a new lock in forked workers: another thread may hold it at that moment, and the copy would never be released."""
    _lock_owners.add(owner)


def _renew_locks() -> None:
    for owner in list(_lock_owners):
        owner.renew_lock()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_renew_locks)


def normalise(name: str) -> str:
    """A distribution's name as packaging compares it (PEP 503)."""
    return re.sub(r'[-_.]+', '-', name).lower()


class InstalledDistribution:
    """A distribution that declares parts. What needs its METADATA file is read when asked.

    Attributes:
        name: normalised, as in `twinkle-core`.
        plugin_apis: the plugin APIs that it says it was written for, from its entry-point group `twinkle.plugin_api`, whose names
            are `v1`, `v2`, ...; empty if it does not say.
    """

    def __init__(self, name: str, dist: importlib.metadata.Distribution, plugin_apis: tuple[str, ...] = ()) -> None:
        self.name = name
        self.plugin_apis = plugin_apis
        self._dist = dist

    @cached_property
    def version(self) -> str:
        """Its version; empty if its metadata cannot be read."""
        return str(self._metadata.get('Version') or '')

    @cached_property
    def location(self) -> str:
        """The folder that it was installed to."""
        return str(self._dist.locate_file(''))

    @cached_property
    def requires(self) -> tuple[str, ...]:
        """What it needs, one requirement each."""
        return tuple(self._metadata.get_all('Requires-Dist') or ())

    @cached_property
    def _metadata(self) -> Any:
        from email.message import Message

        try:
            metadata: Any = self._dist.metadata
        except Exception as error:  # a broken METADATA file makes one plugin anonymous; it must not stop a listing
            logger.warning('The metadata of %s cannot be read: %s: %s', self.name, type(error).__name__, error)
            metadata = None
        return Message() if metadata is None else metadata

    @property
    def is_disabled(self) -> bool:
        """Whether the allow-list or the deny-list keeps this distribution out."""
        allow, deny = _names_in(ALLOW), _names_in(DENY)
        if self.name in (deny or ()):
            return True
        return allow is not None and self.name not in allow and self.name not in OWN_DISTRIBUTIONS

    @cached_property
    def unmet_need(self) -> str | None:
        """Why this distribution cannot work with this core, or None."""
        from packaging.requirements import InvalidRequirement, Requirement

        from twinkle import __version__

        for text in self.requires:
            try:
                need = Requirement(text)
            except InvalidRequirement:
                continue  # pip is the judge of other people's requirements
            if normalise(need.name) != 'twinkle-core' or (need.marker and not need.marker.evaluate({'extra': ''})):
                continue
            if not need.specifier.contains(__version__, prereleases=True):
                return f'it needs twinkle-core{need.specifier}, and {__version__} is installed'
        offered = range(OLDEST_PLUGIN_API, PLUGIN_API + 1)
        if self.plugin_apis and not any(api == str(number) for api in self.plugin_apis for number in offered):
            wrote_for = ' or '.join(self.plugin_apis)
            return (
                f'it was written for plugin API {wrote_for}, and this twinkle-core offers {" to ".join(_ends(offered))}'
            )
        return None


@dataclass(frozen=True)
class FoundPart:
    """One entry point: `name = target` in `group`, of a distribution."""

    group: str
    name: str
    target: str
    dist: InstalledDistribution = field(repr=False, compare=False)
    entry_point: importlib.metadata.EntryPoint = field(repr=False, compare=False)

    def load(self) -> Any:
        """Import the target.

        Raises:
            PluginLoadError: it is disabled, its needs are unmet, or its import fails; the cause is chained.
        """
        dist = self.dist
        who = f'{self.name!r} of {dist.name} {dist.version} ({self.target})'
        if dist.is_disabled:
            raise PluginLoadError(f'{who} is disabled by {ALLOW} or {DENY}. Change these variables to use it.')
        if dist.unmet_need is not None:
            raise PluginLoadError(
                f'{who} cannot be used: {dist.unmet_need}. Install a version that fits: pip install --upgrade {dist.name}'
            )
        try:
            return self.entry_point.load()
        except (Exception, SystemExit) as error:  # a module that exits at import is broken, too
            raise PluginLoadError(
                f'{who} cannot be loaded: {type(error).__name__}: {error}. Repair or upgrade it (pip install --upgrade '
                f'{dist.name}), remove it (pip uninstall {dist.name}), or keep it out with {DENY}={dist.name}.'
            ) from error


class PluginCache:
    """All entry points of this process, read at first use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: dict[str, list[FoundPart]] | None = None
        self._broken: dict[str, str] = {}
        self._hooks: _Hooks | None = None
        self.generation = 0
        renew_after_fork(self)

    def parts(self, group: str) -> list[FoundPart]:
        """The entry points of a group; identical duplicates (an editable install seen twice) are one."""
        return self._read().get(group, [])

    def broken(self) -> dict[str, str]:
        """Distributions whose entry points cannot be read, and why."""
        self._read()
        return dict(self._broken)

    def refresh(self) -> None:
        """Read metadata again at next use."""
        importlib.invalidate_caches()
        with self._lock:
            self._groups = None
            self._hooks = None
            self.generation += 1

    def hooks(self) -> pluggy.PluginManager:
        """The plugin manager, with every plugin of `twinkle.hooks` registered; those that fail to load are reported."""
        found = self.parts(HOOKS)
        with self._lock:
            hooks = self._hooks = self._hooks or _Hooks()
        hooks.load(found)
        return hooks.manager

    def _read(self) -> dict[str, list[FoundPart]]:
        groups = self._groups
        if groups is not None:
            return groups
        with self._lock:
            if self._groups is not None:
                return self._groups
            self._broken = {}
            groups = self._groups = _read_groups(self._broken)
        for name, reason in self._broken.items():
            logger.warning('The entry points of %s cannot be read, so nothing of it is found: %s', name, reason)
        _warn_unmatched(groups)
        return groups

    def renew_lock(self) -> None:
        """For a process that was forked."""
        self._lock = threading.RLock()


def _read_groups(broken: dict[str, str]) -> dict[str, list[FoundPart]]:
    """Every distribution by itself, so that an unreadable one hides only its own parts. The first on the path hides its namesakes."""
    groups: dict[str, list[FoundPart]] = {}
    seen: set[str] = set()
    for dist in importlib.metadata.distributions():
        name = ''
        try:
            # The file's name says what METADATA would, at a hundredth of the cost.
            name = normalise(getattr(dist, '_normalized_name', None) or dist.metadata['Name'])
            if name in seen:
                continue
            seen.add(name)
            text = dist.read_text('entry_points.txt')
            points = dist.entry_points if text and 'twinkle.' in text else ()
            ours = dict.fromkeys((point.group, point.name, point.value) for point in points)
            by_key = {(point.group, point.name, point.value): point for point in points}
        except Exception as error:
            broken[name or repr(dist)] = f'{type(error).__name__}: {error}'
            continue
        apis = tuple(sorted(key[1].lower().removeprefix('v') for key in ours if key[0] == API))
        installed = InstalledDistribution(name, dist, apis)
        for group, key, target in ours:
            if group.startswith('twinkle.') and group != API:
                groups.setdefault(group, []).append(
                    FoundPart(group, key, target, installed, by_key[group, key, target])
                )
    return groups


def _ends(numbers: range) -> list[str]:
    return sorted({str(numbers[0]), str(numbers[-1])}, key=int)


def _names_in(variable: str) -> frozenset[str] | None:
    """The distributions listed in an environment variable; None if it is not set."""
    text = os.environ.get(variable)
    return None if text is None else frozenset(normalise(name) for name in text.replace(',', ' ').split())


def _warn_unmatched(groups: Mapping[str, list[FoundPart]]) -> None:
    for variable in (ALLOW, DENY):
        listed = _names_in(variable)
        there = {part.dist.name for parts in groups.values() for part in parts} if listed else set()
        for name in sorted((listed or frozenset()) - there):
            warnings.warn(
                f'{variable} names {name!r}, and no installed plugin is called that. It lists distributions, separated by commas; '
                '`twinkle plugins list` shows them.',
                stacklevel=4,
            )


plugin_cache = PluginCache()


def refresh() -> None:
    """Forget what was read of installed distributions; it is read again at next use."""
    plugin_cache.refresh()


class _Hooks:
    """The plugin manager, filled once."""

    def __init__(self) -> None:
        import pluggy

        from twinkle import hookspecs

        self.manager = pluggy.PluginManager('twinkle')
        self.manager.add_hookspecs(hookspecs)
        self._done: set[str] = set()
        self._loading = threading.local()
        self._lock = threading.RLock()
        renew_after_fork(self)

    def load(self, found: list[FoundPart]) -> None:
        """Register what is not yet.

        No lock is held during an import, whose module may itself call a hook: each thread that comes early loads for itself, which
        costs no second import, and the first one registers.
        """
        loading: set[str] = self._loading.__dict__.setdefault('names', set())
        for part in found:
            name = f'{part.name} ({part.dist.name})'
            if name in self._done or name in loading or part.dist.is_disabled:
                continue
            loading.add(name)
            try:
                plugin = _observer(part)
                with self._lock:
                    if name not in self._done:
                        self.manager.register(plugin, name=name)
            except Exception as error:
                logger.warning('Hooks of plugin %s are left out: %s', name, error)
            finally:
                self._done.add(name)
                loading.discard(name)

    def renew_lock(self) -> None:
        """For a process that was forked."""
        self._lock = threading.RLock()


def check_hooks(found: FoundPart) -> None:
    """Load a plugin's hooks, for themselves.

    Raises:
        PluginLoadError: they cannot be loaded, or implement something that is no hook.
    """
    import pluggy

    hooks = _Hooks()
    try:
        hooks.manager.register(_observer(found), name=found.name)
        hooks.manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginLoadError(f'{found.name!r} of {found.dist.name} {found.dist.version}: {error}') from error


def _observer(found: FoundPart) -> Any:
    plugin = found.load()
    return plugin() if isinstance(plugin, type) else plugin


def get_hooks() -> pluggy.PluginManager:
    """The hook manager, for registering an observer at run time: `get_hooks().register(my_object)`."""
    return plugin_cache.hooks()


def _implementations(name: str) -> Iterator[pluggy.HookImpl]:
    yield from reversed(getattr(get_hooks().hook, name).get_hookimpls())


def call_hook(name: str, **arguments: Any) -> None:
    """Tell every plugin. One that raises is reported by name, and ends neither the others nor the run."""
    for implementation in _implementations(name):
        try:
            if implementation.hookwrapper or implementation.wrapper:
                raise ConfigError(f'{name} is a wrapper; hooks of Twinkle only observe or add, so write a plain one.')
            implementation.function(*(arguments[arg] for arg in implementation.argnames))
        except (Exception, SystemExit):
            logger.exception('Plugin %s raised in its hook %s; the run goes on.', implementation.plugin_name, name)
