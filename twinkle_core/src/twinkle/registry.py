"""Registries: named parts of a kind. A part gets its name from an entry point of the group `twinkle.<kind>`, or at run time.

Names match the registered key, or the class's name where no key matches, ignoring case, `_` and `-`. A built-in has no privilege:
core's own parts are declared in its `pyproject.toml` like everybody's.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from twinkle import runtime_parts
from twinkle.errors import (
    AlreadyRegisteredError,
    AmbiguousNameError,
    ConfigError,
    InvalidPartError,
    MissingPackageError,
    PluginLoadError,
    UnknownNameError,
)
from twinkle.known_packages import package_of
from twinkle.parts import PartEntry, fold
from twinkle.plugins import normalise, plugin_cache

__all__ = [
    'Registry',
    'advantages',
    'executors',
    'filters',
    'input_processors',
    'losses',
    'lr_schedulers',
    'metrics',
    'models',
    'optimizers',
    'patches',
    'preprocessors',
    'registries',
    'rewards',
    'sources',
    'templates',
    'trackers',
]


class Registry:
    """The named parts of one kind.

    Args:
        kind: what the parts are, in the plural; entry points are of the group `twinkle.<kind>`.
        base: `module:Class` that parts derive from; imported when the first part is checked.
        functions: whether a plain function is a part too.
    """

    def __init__(self, kind: str, *, base: str | None = None, functions: bool = False) -> None:
        self.kind = kind
        self._base = base
        self._functions = functions
        self._lock = threading.Lock()
        self._runtime: dict[str, PartEntry] = {}
        self._index: tuple[int, dict[str, list[PartEntry]], dict[str, list[PartEntry]]] | None = None
        self._resolved: dict[tuple[str, str | None], Any] = {}

    # -- asking ----------------------------------------------------------------------------------------------------------------

    def resolve(
        self,
        spec: Any,
        *,
        backend: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> Any:
        """The part that `spec` means: a class, an instance, or a function where the kind allows it.

        Args:
            spec: a part itself, a name, `name@distribution`, `package.module:Name`, or plugin code at `hf://`, `ms://` or a folder.
            backend: prefer `<backend>.<name>` over `<name>`.
            trust_remote_code, revision: for code from a hub or a folder.

        Raises:
            UnknownNameError, AmbiguousNameError, PluginLoadError, InvalidPartError, MissingPackageError, UntrustedCodeError.
        """
        if not isinstance(spec, (str, PurePath)):
            return self.check(spec)
        if isinstance(spec, str):
            generation = self._index[0] if self._index is not None else -1
            if generation == plugin_cache.generation and (spec, backend) in self._resolved:
                return self._resolved[spec, backend]
        text = str(spec)
        if isinstance(spec, PurePath) or '://' in text or text.startswith(('./', '../', '/', '~')):
            from twinkle.remote_code import load_part

            return self.check(load_part(self.kind, text, trust_remote_code=trust_remote_code, revision=revision))
        if ':' in text:
            return self.check(_import_path(text), name=text)
        entry = self.find(text, backend=backend)
        part = self.check(entry.load(), name=entry.name, entry=entry)
        self._resolved[text, backend] = part
        return part

    def build(self, spec: Any, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        """Resolve `spec` and, if it is a class, make an instance with the arguments. Instances and functions come as they are.

        Raises:
            ConfigError: arguments that the class does not take, or any for a part that is built already.
        """
        part = self.resolve(spec, backend=backend)
        if not isinstance(part, type):
            if kwargs:
                raise ConfigError(
                    f'{spec!r} is built already and takes no options, got {sorted(kwargs)}. Pass a class or a name to give options.'
                )
            return part
        try:
            inspect.signature(part).bind(*args, **kwargs)
        except TypeError as error:
            options = [name for name in inspect.signature(part).parameters if name not in ('args', 'kwargs')]
            raise ConfigError(f'{part.__name__}: {error}. Its options are: {", ".join(options) or "none"}.') from None
        return part(*args, **kwargs)

    def find(self, name: str, *, backend: str | None = None) -> PartEntry:
        """The entry that a name means; nothing is imported."""
        bare, _, distribution = name.partition('@')
        key = fold(bare)
        wanted = [f'{fold(backend)}.{key}', key] if backend else [key]
        by_key, by_class = self._tables()
        for table in (by_key, by_class):
            for candidate in wanted:
                found = table.get(candidate, [])
                if distribution:
                    found = [entry for entry in found if entry.distribution == normalise(distribution)]
                elif len(found) > 1:
                    found = [entry for entry in found if entry.state != 'disabled'] or found
                if len({entry.target for entry in found}) > 1 or len({entry.distribution for entry in found[:2]}) > 1:
                    raise self._ambiguous(name, found)
                if found:
                    return found[0]
        raise self._unknown(name, key)

    def names(self) -> list[str]:
        """The registered keys, sorted."""
        return sorted({entry.name for entry in self.entries() if entry.state != 'disabled'})

    def name_of(self, name: str) -> str:
        """The registered key that a spelling means."""
        return name if ':' in name else self.find(name).name

    def is_registered(self, name: str) -> bool:
        """Whether a name means something (also if it is ambiguous)."""
        try:
            self.find(name)
        except AmbiguousNameError:
            return True
        except (UnknownNameError, MissingPackageError):
            return False
        return True

    def entries(self) -> list[PartEntry]:
        """Every entry, installed and registered at run time, sorted by name."""
        by_key, _ = self._tables()
        return sorted((entry for entries in by_key.values() for entry in entries), key=lambda entry: entry.name)

    # -- registering at run time ---------------------------------------------------------------------------------------------------

    def register(self, name: str | None = None, part: Any = None, *, override: bool = False) -> Any:
        """Give a part a name in this process: `losses.register('focal', FocalLoss)`, or as a decorator.

        Raises:
            AlreadyRegisteredError: the name is taken and `override` is not set. Nothing has changed.
            InvalidPartError: it is no part of this kind.
        """
        if part is None:
            return lambda decorated: self.register(name, decorated, override=override) or decorated
        name = name or getattr(part, '__name__', None)
        if not name or not fold(name).replace('.', ''):
            raise ConfigError(f'A part of {self.kind} needs a name of letters or digits, got {name!r}.')
        self.check(part)
        entry = PartEntry.of_part(self.kind, name, part)
        with self._lock:
            key = fold(name)
            taken = self._runtime.get(key) or next(iter(self._tables()[0].get(key, [])), None)
            if taken is not None and not override:
                raise AlreadyRegisteredError(
                    f'{name!r} is already one of {self.kind} ({taken.describe()}). Choose another name, or pass override=True to '
                    'replace it in this process.'
                )
            self._runtime[key] = entry
            self._forget()
        runtime_parts.publish(entry)
        return None

    def unregister(self, name: str) -> None:
        """Take a name back that was registered at run time.

        Raises:
            UnknownNameError: it was not.
        """
        with self._lock:
            entry = self._runtime.pop(fold(name), None)
            self._forget()
        if entry is None:
            raise UnknownNameError(
                f'{name!r} was not registered at run time in {self.kind}, so it cannot be unregistered.'
            )
        runtime_parts.withdraw(entry)

    @contextmanager
    def temporary(self, name: str, part: Any) -> Iterator[None]:
        """A registration for the length of a context; it may shadow, and what it shadowed is back afterwards."""
        before = self._runtime.get(fold(name))
        self.register(name, part, override=True)
        try:
            yield
        finally:
            self.unregister(name)
            if before is not None:
                self.register(before.name, before.load(), override=True)

    def refresh(self) -> None:
        """Read installed metadata again at next use."""
        plugin_cache.refresh()

    # -- checking --------------------------------------------------------------------------------------------------------------

    def check(self, part: Any, *, name: str | None = None, entry: PartEntry | None = None) -> Any:
        """`part` if it is one of this kind.

        Raises:
            InvalidPartError: it is not; what is missing is listed.
        """
        if self._functions and callable(part) and not isinstance(part, type):
            return part
        base = _import_path(self._base) if self._base else None
        if base is None:
            if callable(part):
                return part
        elif isinstance(part, base) or (isinstance(part, type) and issubclass(part, base)):
            missing = sorted(getattr(part, '__abstractmethods__', ())) if isinstance(part, type) else []
            if not missing:
                return part
            raise InvalidPartError(
                f'{part.__name__} is no complete part of {self.kind}: it does not implement {", ".join(missing)}.'
            )
        whose = f' ({entry.describe()})' if entry is not None else ''
        allowed = f'a subclass or instance of {self._base}' if self._base else 'a class'
        raise InvalidPartError(
            f'{name or part!r}{whose} is no part of {self.kind}: it must be {allowed}{", or a function" if self._functions else ""}, '
            f'or the name of one ({", ".join(self.names()[:8])}, ...).'
        )

    # -- tables ----------------------------------------------------------------------------------------------------------------

    def _tables(self) -> tuple[dict[str, list[PartEntry]], dict[str, list[PartEntry]]]:
        """Entries by folded key and by folded class name. Rebuilt when metadata was refreshed or a registration changed."""
        index = self._index
        if index is None or index[0] != plugin_cache.generation:
            by_key: dict[str, list[PartEntry]] = {}
            by_class: dict[str, list[PartEntry]] = {}
            for found in plugin_cache.parts(f'twinkle.{self.kind}'):
                entry = PartEntry.of_plugin(self.kind, found)
                by_key.setdefault(fold(entry.name), []).append(entry)
            for entry in [*runtime_parts.inherited(self.kind), *self._runtime.values()]:
                by_key[fold(entry.name)] = [entry]
            for entry in (entry for entries in by_key.values() for entry in entries):
                same = by_class.setdefault(fold(entry.class_name), [])
                if all(other.target != entry.target or other.found != entry.found for other in same):
                    same.append(entry)
            self._resolved.clear()
            self._index = index = (plugin_cache.generation, by_key, by_class)
        return index[1], index[2]

    def _forget(self) -> None:
        self._index = None
        self._resolved.clear()

    # -- messages --------------------------------------------------------------------------------------------------------------

    def _unknown(self, name: str, key: str) -> Exception:
        package = package_of(self.kind, key)
        if package is not None:
            return MissingPackageError(f'{name!r} of {self.kind} comes with another package: pip install {package}')
        names = self.names()
        folded = {fold(other): other for other in names}
        close = [folded[match] for match in difflib.get_close_matches(key, folded, n=3, cutoff=0.6)]
        hint = f' Did you mean {" or ".join(map(repr, close))}?' if close else ''
        return UnknownNameError(
            f'Unknown name {name!r} in {self.kind}.{hint} There are: {", ".join(names) or "none"}. '
            f'{runtime_parts.explain_missing(self.kind, key)}'.rstrip()
        )

    def _ambiguous(self, name: str, found: list[PartEntry]) -> AmbiguousNameError:
        claims = ' and '.join(sorted(f'{entry.distribution} ({entry.target})' for entry in found))
        fixes = ' or '.join(sorted(f'{entry.name}@{entry.distribution}' for entry in found))
        return AmbiguousNameError(
            f'{name!r} in {self.kind} is claimed by {claims}. Say which one: {fixes}; or keep one out with '
            'TWINKLE_DISABLE_PLUGINS=<distribution>.'
        )


def _import_path(path: str) -> Any:
    module_name, _, attribute = path.partition(':')
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split('.'):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise PluginLoadError(
            f'{path!r} cannot be loaded: {type(error).__name__}: {error}. It is read as package.module:Name.'
        ) from error
    return found


models = Registry('models', base='twinkle.model.protocol:TwinkleModel')
losses = Registry('losses', base='twinkle.loss.base:Loss', functions=True)
optimizers = Registry('optimizers', base='torch.optim:Optimizer')
lr_schedulers = Registry('lr_schedulers', base='torch.optim.lr_scheduler:LRScheduler')
metrics = Registry('metrics', base='twinkle.metric.base:Metric')
patches = Registry('patches', base='twinkle.patch.base:Patch', functions=True)
templates = Registry('templates', base='twinkle.template.base:Template')
input_processors = Registry('input_processors', base='twinkle.processor.base:InputProcessor', functions=True)
preprocessors = Registry('preprocessors', base='twinkle.preprocessor.base:Preprocessor', functions=True)
filters = Registry('filters', base='twinkle.preprocessor.base:Filter', functions=True)
rewards = Registry('rewards', functions=True)
advantages = Registry('advantages', functions=True)
executors = Registry('executors', base='twinkle.runtime.executor:Executor')
sources = Registry('sources', base='twinkle.hub.source:Source')
trackers = Registry('trackers', base='twinkle.tracker:Tracker')

registries: dict[str, Registry] = {
    registry.kind: registry
    for registry in (
        models, losses, optimizers, lr_schedulers, metrics, patches, templates, input_processors, preprocessors, filters, rewards,
        advantages, executors, sources, trackers,
    )
}  # fmt: skip
"""Every registry by its kind."""

Function = Callable[..., Any]
