"""Registries: named parts of a kind. A part gets its name from an entry point of the group `twinkle.<kind>`, or at run time.

Names match the registered key, or the class's name where no key matches, ignoring case, `_` and `-`. A built-in has no privilege:
core's own parts are declared in its `pyproject.toml` like everybody's.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from twinkle import runtime_parts
from twinkle.errors import AlreadyRegisteredError, AmbiguousNameError, ConfigError, InvalidPartError, UnknownNameError
from twinkle.naming import ambiguous, explain_invalid, select, unknown
from twinkle.parts import PartEntry, fold, import_target
from twinkle.plugins import normalise, plugin_cache, renew_after_fork

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

_NAME = re.compile(r'[\w.-]*[^\W_][\w.-]*')


@dataclass
class _View:
    """What a registry holds at one moment. It is never changed but replaced, so that no thread sees half a change.

    Only `resolved` grows: what was resolved in this view, so that a part found in an older one never hides a later registration.
    """

    generation: int
    by_key: dict[str, list[PartEntry]] = field(default_factory=dict)
    by_class: dict[str, list[PartEntry]] = field(default_factory=dict)
    resolved: dict[tuple[str, str | None, bool], Any] = field(default_factory=dict)


class Registry:
    """The named parts of one kind.

    Args:
        kind: what the parts are, in the plural; entry points are of the group `twinkle.<kind>`.
        base: `module:Class` that parts derive from; imported when the first part is checked.
        methods: what parts must have instead, where no one base class exists.
        functions: whether a plain function is a part too.
    """

    def __init__(
        self, kind: str, *, base: str | None = None, methods: tuple[str, ...] = (), functions: bool = False
    ) -> None:
        self.kind = kind
        self.base = base
        self.methods = methods
        self.functions = functions
        self._base_class: Any = None
        self.renew_lock()
        self._runtime: dict[str, PartEntry] = {}
        self._plugins: tuple[int, list[PartEntry]] = (-1, [])
        self._view: _View | None = None
        renew_after_fork(self)

    def __repr__(self) -> str:
        return f'Registry({self.kind!r})'

    # -- asking ----------------------------------------------------------------------------------------------------------------

    def resolve(
        self,
        spec: Any,
        *,
        backend: str | None = None,
        qualified_only: bool = False,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> Any:
        """The part that `spec` means: a class, an instance, or a function where the kind allows it.

        Args:
            spec: a part itself, a name, `name@distribution`, `package.module:Name`, or plugin code: `hf://org/repo`, `ms://org/repo`,
                `./folder` or `./file.py`, with `:Name` behind it where it holds several parts.
            backend: prefer `<backend>.<name>` over `<name>`.
            qualified_only: accept only names that are qualified by the backend.
            trust_remote_code, revision: for code from a hub or a folder: whether it may run, and which commit of it.

        Raises:
            UnknownNameError: no part of this kind has the name (`MissingPartError` where a package is known to bring it).
            AmbiguousNameError: several distributions claim it.
            PluginLoadError: it is installed, and broken, disabled or made for another version.
            InvalidPartError: it is no part of this kind.
            UntrustedCodeError: code from a hub or folder, without opting in.
        """
        if not isinstance(spec, (str, PurePath)):
            return self.check(spec)
        view = self._view
        if revision is None and view is not None and view.generation == plugin_cache.generation:
            try:
                return view.resolved[spec, backend, qualified_only]  # type: ignore[index]  # a path is never there
            except KeyError:
                pass
        if _is_code(spec):
            from twinkle.remote_code import load_part

            return load_part(self, str(spec), trust_remote_code=trust_remote_code, revision=revision)
        if revision is not None:
            raise ConfigError(f'revision={revision!r} is for code from a hub; {spec!r} is installed and has none.')
        spec = str(spec)
        if ':' in spec:
            return self.check(import_target(spec), name=spec)
        view = self._current_view()
        entry = self._find(view, spec, backend, qualified_only)
        try:
            part = self.check(entry.load(), name=entry.name, entry=entry)
        except InvalidPartError as error:
            entry.error = error
            raise
        view.resolved[spec, backend, qualified_only] = part
        return part

    def build(self, spec: Any, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        """Resolve `spec` and, if it is a class, make an instance with the arguments. Instances and functions come as they are.

        For code from a hub or a folder `trust_remote_code` is the opt-in; it goes to the class, too, if that takes it. The code's
        revision is written behind its address (`hf://org/repo@commit`), since `revision` may be an option of the class.

        Raises:
            ConfigError: arguments that the class does not take, or any for a part that is built already.
        """
        trust = bool(kwargs.get('trust_remote_code', False)) if _is_code(spec) else False
        part = self.resolve(spec, backend=backend, trust_remote_code=trust)
        is_class = isinstance(part, type)
        if trust and not (is_class and 'trust_remote_code' in _options(part)):
            del kwargs['trust_remote_code']
        if not is_class:
            if kwargs or args:
                given = sorted(kwargs) or list(args)
                raise ConfigError(
                    f'{spec!r} is built already and takes no options, got {given}. Pass a class or a name to give options.'
                )
            return part
        try:
            inspect.signature(part).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f'{part.__name__}: {error}. Its options are: {", ".join(_options(part)) or "none"}.'
            ) from None
        return part(*args, **kwargs)

    def find(self, name: str, *, backend: str | None = None, qualified_only: bool = False) -> PartEntry:
        """The entry that a name means; nothing is imported.

        Raises:
            UnknownNameError, AmbiguousNameError: as `resolve` does.
        """
        return self._find(self._current_view(), name, backend, qualified_only)

    def names(self) -> list[str]:
        """The registered keys, sorted."""
        return sorted({entry.name for entry in self.entries() if not entry.is_disabled})

    def name_of(self, name: str) -> str:
        """The registered key that a spelling means; anything that is no name comes as it is."""
        return name if ':' in name or _is_code(name) else self.find(name).name

    def is_registered(self, name: str) -> bool:
        """Whether a name means something (also if it is ambiguous, broken or disabled)."""
        try:
            self.find(name)
        except AmbiguousNameError:
            return True
        except UnknownNameError:
            return False
        return True

    def entries(self) -> list[PartEntry]:
        """Every entry, installed and registered at run time, sorted by name. What a runtime one shadows comes after it."""
        found = [entry for entries in self._current_view().by_key.values() for entry in entries]
        return sorted(found, key=lambda entry: (entry.name, entry.source != 'runtime', entry.distribution))

    def conflicts(self) -> dict[str, AmbiguousNameError]:
        """The keys that are ambiguous, and the error that asking for each would raise."""
        view = self._current_view()
        errors = {}
        for entries in view.by_key.values():
            try:
                self._find(view, entries[0].name, None, False)
            except AmbiguousNameError as error:
                errors[entries[0].name] = error
        return errors

    # -- registering at run time ---------------------------------------------------------------------------------------------------

    def register(self, name: str | None = None, part: Any = None, *, override: bool = False) -> Any:
        """Give a part a name in this process: `losses.register('focal', FocalLoss)`, or as a decorator.

        Workers that are started later know the name, too, if they can import the part; otherwise they say so when it is asked for.

        Raises:
            AlreadyRegisteredError: the name is taken and `override` is not set. Nothing has changed.
            InvalidPartError: it is no part of this kind. Nothing has changed.
            ConfigError: the name is none.
        """
        if part is None:

            def decorate(decorated: Any) -> Any:
                self.register(name, decorated, override=override)
                return decorated

            return decorate
        name = name if name is not None else getattr(part, '__name__', None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f'A part of {self.kind} needs a name of letters, digits, "_", "-" and "."; {name!r} is none.'
            )
        self.check(part)
        key, entry = fold(name), PartEntry.of_part(self.kind, name, part)
        with self._lock:
            taken = None if override else self._taken(key, entry)
            if taken is not None:
                raise AlreadyRegisteredError(
                    f'{name!r} is already one of {self.kind}: {taken.name!r} ({taken.describe()}). Choose another name, or pass '
                    'override=True to replace it in this process.'
                )
            self._put(key, entry)
        return part

    def unregister(self, name: str) -> None:
        """Take a name back that was registered at run time; what it shadowed is back.

        Raises:
            UnknownNameError: it was not.
        """
        with self._lock:
            if fold(name) not in self._runtime:
                known = ', '.join(sorted(entry.name for entry in self._runtime.values())) or 'none'
                raise UnknownNameError(
                    f'{name!r} was not registered at run time in {self.kind}, so it cannot be unregistered. Registered so: {known}.'
                )
            self._put(fold(name), None)

    @contextmanager
    def temporary(self, name: str, part: Any) -> Iterator[Any]:
        """A registration for the length of a context; it may shadow, and what it shadowed is back afterwards."""
        before = self._runtime.get(fold(name))
        self.register(name, part, override=True)
        try:
            yield part
        finally:
            with self._lock:
                self._put(fold(name), before)

    def refresh(self) -> None:
        """Read installed metadata again at next use (of all kinds)."""
        plugin_cache.refresh()

    def _taken(self, key: str, entry: PartEntry) -> PartEntry | None:
        """Who would be shadowed: an own registration, a plugin's key, or a class of another part that is asked for by this name."""
        view = self._current_view()
        # A worker that runs its parent's registration again is not in its own way.
        rivals = [other for other in view.by_key.get(key, []) if other.source == 'plugin' or key in self._runtime]
        others = [other for other in view.by_class.get(key, []) if not other.is_part(entry.part)]
        rivals += [other for other in others if other.source == 'plugin' or fold(other.name) in self._runtime]
        return rivals[0] if rivals else None

    def _put(self, key: str, entry: PartEntry | None) -> None:
        old = self._runtime.get(key)
        if old is not None:
            runtime_parts.withdraw(old)
        if entry is None:
            self._runtime.pop(key, None)
        else:
            runtime_parts.publish(entry)
            self._runtime[key] = entry
        self._view = None

    # -- checking --------------------------------------------------------------------------------------------------------------

    def check(self, part: Any, *, name: str | None = None, entry: PartEntry | None = None) -> Any:
        """`part` if it is one of this kind.

        Raises:
            InvalidPartError: it is not; what is missing is listed.
        """
        problem = self._problem(part)
        if problem is None:
            return part
        raise InvalidPartError(explain_invalid(self, part, name, entry, problem))

    def fits(self, part: Any) -> bool:
        """Whether `part` is one of this kind."""
        return self._problem(part) is None

    def _problem(self, part: Any) -> str | None:
        """What is missing; empty where it is something else altogether."""
        is_class = isinstance(part, type)
        if self.functions and callable(part) and not is_class:
            return None
        if self.methods:
            missing = [method for method in self.methods if not callable(getattr(part, method, None))]
            return f'it has no {", ".join(missing)}' if missing else None
        if self.base is None:
            return None if callable(part) else ''
        if self._base_class is None:
            self._base_class = import_target(self.base)
        if not (issubclass(part, self._base_class) if is_class else isinstance(part, self._base_class)):
            return ''
        abstract = sorted(getattr(part, '__abstractmethods__', ())) if is_class else []
        return f'it does not implement {", ".join(abstract)}' if abstract else None

    # -- tables ----------------------------------------------------------------------------------------------------------------

    def _find(self, view: _View, name: str, backend: str | None, qualified_only: bool) -> PartEntry:
        bare, _, distribution = name.partition('@')
        found = select(
            view.by_key,
            view.by_class,
            key=fold(bare),
            qualifier=fold(backend) if backend else None,
            qualified_only=qualified_only,
            distribution=normalise(distribution) if distribution else None,
            spelling=bare,
        )
        if len(found) == 1:
            return found[0]
        if found:
            raise ambiguous(self.kind, name, found)
        raise unknown(self, name, backend if qualified_only else None)

    def _current_view(self) -> _View:
        """The view of now; rebuilt when metadata was refreshed or a registration changed."""
        view = self._view
        if view is not None and view.generation == plugin_cache.generation:
            return view
        with self._lock:
            generation = plugin_cache.generation
            if self._plugins[0] != generation:
                found = plugin_cache.parts(f'twinkle.{self.kind}')
                self._plugins = (generation, [PartEntry.of_plugin(self.kind, part) for part in found])
            view = _View(generation)
            runtime = {fold(entry.name): entry for entry in runtime_parts.inherited(self.kind)} | self._runtime
            for entry in [*runtime.values(), *self._plugins[1]]:
                view.by_key.setdefault(fold(entry.name), []).append(entry)
                if entry.class_name:
                    view.by_class.setdefault(fold(entry.class_name), []).append(entry)
            self._view = view
        return view

    def renew_lock(self) -> None:
        """For a process that was forked: another thread of its parent may have held the lock."""
        self._lock = threading.RLock()


def _is_code(spec: Any) -> bool:
    """Whether a spec is the address of plugin code, rather than a name."""
    if isinstance(spec, PurePath):
        return True
    return isinstance(spec, str) and (
        '://' in spec or spec in ('.', '..') or spec.startswith(('./', '../', '/', '~', '.\\', '..\\'))
    )


def _options(part: Any) -> list[str]:
    return [name for name in inspect.signature(part).parameters if name not in ('args', 'kwargs')]


models = Registry('models', base='twinkle.model.protocol:TwinkleModel')
losses = Registry('losses', base='twinkle.loss.base:Loss', functions=True)
optimizers = Registry('optimizers', methods=('step', 'zero_grad', 'state_dict', 'load_state_dict'))
lr_schedulers = Registry('lr_schedulers', methods=('step', 'get_last_lr', 'state_dict', 'load_state_dict'))
metrics = Registry('metrics', base='twinkle.metric.base:Metric')
patches = Registry('patches', base='twinkle.patch.base:Patch', functions=True)
templates = Registry('templates', base='twinkle.template.base:Template')
input_processors = Registry('input_processors', base='twinkle.processor.base:InputProcessor', functions=True)
preprocessors = Registry('preprocessors', base='twinkle.preprocessor.base:Preprocessor', functions=True)
filters = Registry('filters', base='twinkle.preprocessor.base:Filter', functions=True)
rewards = Registry('rewards', base='twinkle.reward.base:Reward', functions=True)
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
