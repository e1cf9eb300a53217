"""One entry of a registry, and how names are compared."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from twinkle.errors import PluginLoadError

if TYPE_CHECKING:
    from twinkle.plugins import FoundPart

__all__ = ['PartEntry', 'State', 'fold', 'import_target']

State = Literal['unloaded', 'loaded', 'failed', 'disabled']


def fold(name: str) -> str:
    """A name as names are compared: without case, `_` and `-`."""
    return name.casefold().replace('_', '').replace('-', '')


def import_target(target: str) -> Any:
    """What `package.module:Name` means.

    Raises:
        PluginLoadError: the module or the name cannot be had; the cause is chained.
    """
    module_name, _, path = target.partition(':')
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split('.'):
            found = getattr(found, name)
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f'{target!r} cannot be loaded: {type(error).__name__}: {error}. It is read as package.module:Name.'
        ) from error
    return found


@dataclass(eq=False)
class PartEntry:
    """A named part: where it comes from, and whether it has been loaded.

    Attributes:
        kind, name: the registry, and the key as it was registered.
        target: `module:Name`.
        source: `plugin` (an entry point) or `runtime`.
        part: the part itself once it is loaded.
        error: why loading failed, if it did.
    """

    kind: str
    name: str
    target: str
    source: Literal['plugin', 'runtime']
    found: FoundPart | None = field(default=None, repr=False)
    part: Any = field(default=None, repr=False)
    error: Exception | None = None

    @classmethod
    def of_plugin(cls, kind: str, found: FoundPart) -> PartEntry:
        """An entry of an installed distribution."""
        return cls(kind, found.name, found.target, 'plugin', found=found)

    @classmethod
    def of_part(cls, kind: str, name: str, part: Any) -> PartEntry:
        """An entry that was registered at run time."""
        owner = part if hasattr(part, '__qualname__') else type(part)
        return cls(kind, name, f'{owner.__module__}:{owner.__qualname__}', 'runtime', part=part)

    @property
    def class_name(self) -> str:
        """The last part of the target: a class's own name."""
        return self.target.partition(':')[2].partition(' ')[0].rpartition('.')[2]

    @property
    def distribution(self) -> str:
        """The distribution that declares it; `(this process)` for a runtime registration."""
        return self.found.dist.name if self.found is not None else '(this process)'

    @property
    def version(self) -> str:
        """That distribution's version; empty for a runtime registration."""
        return self.found.dist.version if self.found is not None else ''

    @property
    def is_disabled(self) -> bool:
        """Whether `TWINKLE_PLUGINS` or `TWINKLE_DISABLE_PLUGINS` keeps it out."""
        return self.found is not None and self.found.dist.is_disabled

    @property
    def state(self) -> State:
        """Whether the part is unloaded, loaded, failed (an unmet need included) or disabled."""
        if self.is_disabled:
            return 'disabled'
        if self.part is not None:
            return 'loaded'
        return 'unloaded' if self.reason is None else 'failed'

    @property
    def reason(self) -> str | None:
        """Why it failed; None if it has not. Needs that are unmet are known without loading."""
        if self.error is not None:
            return str(self.error)
        return self.found.dist.unmet_need if self.found is not None else None

    def load(self) -> Any:
        """The part, imported at first use. Many threads may ask at once: Python's own import lock lets one import run.

        A lock of our own, held during an import, could be waited for by a module that is being imported in another thread.

        Raises:
            PluginLoadError: with the cause chained.
        """
        if self.part is None:
            try:
                self.part = self.found.load() if self.found is not None else import_target(self.target)
            except Exception as error:
                self.error = error
                raise
            self.error = None
        return self.part

    def is_part(self, part: Any) -> bool:
        """Whether this entry means that very object, which is loaded. Nothing is imported to find out."""
        if self.part is not None:
            return bool(self.part is part)
        module_name, _, path = self.target.partition(':')
        found: Any = sys.modules.get(module_name)
        for name in path.split('.'):
            found = getattr(found, name, None)
        return bool(found is part)

    def describe(self) -> str:
        """Who brings it, in a few words."""
        return f'{self.target} of {self.distribution} {self.version}'.rstrip()
