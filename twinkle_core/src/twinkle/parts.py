"""One entry of a registry, and how names are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from twinkle.plugins import plugin_cache

if TYPE_CHECKING:
    from twinkle.plugins import FoundPart

__all__ = ['PartEntry', 'State', 'fold']

State = Literal['unloaded', 'loaded', 'failed', 'disabled']


def fold(name: str) -> str:
    """A name as names are compared: without case, `_` and `-`."""
    return name.casefold().replace('_', '').replace('-', '')


@dataclass
class PartEntry:
    """A named part: where it comes from, and whether it has been loaded.

    Attributes:
        kind, name: the registry, and the key as it was registered.
        target: `module:Name`.
        source: `plugin` (an entry point) or `runtime`.
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
        return self.target.partition(':')[2].rpartition('.')[2].partition(' ')[0]

    @property
    def distribution(self) -> str:
        """The distribution that declares it; `(this process)` for a runtime registration."""
        return self.found.distribution if self.found is not None else '(this process)'

    @property
    def version(self) -> str:
        """That distribution's version."""
        return self.found.version if self.found is not None else ''

    @property
    def state(self) -> State:
        """Whether the part is unloaded, loaded, failed or disabled."""
        if self.part is not None:
            return 'loaded'
        if self.error is not None:
            return 'failed'
        return 'disabled' if self.found is not None and self.found.is_disabled else 'unloaded'

    def load(self) -> Any:
        """The part, imported at first use. Many threads may ask at once: Python's own import lock lets one import run.

        Raises:
            PluginLoadError: with the cause chained.
        """
        if self.part is None:
            assert self.found is not None
            try:
                self.part = self.found.load(plugin_cache.api_of)
            except Exception as error:
                self.error = error
                raise
            self.error = None
        return self.part

    def describe(self) -> str:
        """Who brings it, in a few words."""
        return f'{self.target} of {self.distribution} {self.version}'.rstrip()
