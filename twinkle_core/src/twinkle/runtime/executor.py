"""Who carries out what `remote_class` and `remote_function` declare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle.errors import ConfigError

if TYPE_CHECKING:
    from twinkle.device_mesh import DeviceGroup, DeviceMesh

__all__ = ['Executor', 'LocalExecutor']


class Executor(ABC):
    """Runs classes where its mode says: in this process, or in workers behind proxies.

    A remote executor finds the rules of a class with `twinkle.remote.class_spec_of`, those of a method with `spec_of`, and carries
    them out with `dispatch_args` and `collect_results`.
    """

    is_remote: ClassVar[bool] = True

    @abstractmethod
    def start(self, mesh: DeviceMesh, groups: Sequence[DeviceGroup], options: Mapping[str, Any]) -> None:
        """Get ready: connect, or start workers.

        Raises:
            ConfigError: options that it does not know.
        """

    @abstractmethod
    def create(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make an instance of a remote class, and return what stands for it here.

        That must not be an instance of `cls`: Python would call `__init__` on it.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of everything that `start` and `create` took."""


class LocalExecutor(Executor):
    """Everything in this process: a plain call. Under torchrun each process runs the whole script."""

    is_remote: ClassVar[bool] = False

    def start(self, mesh: DeviceMesh, groups: Sequence[DeviceGroup], options: Mapping[str, Any]) -> None:
        if options:
            raise ConfigError(
                f"initialize() has no option {', '.join(map(repr, sorted(options)))}, and mode='local' takes none of its own."
            )

    def create(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return cls(*args, **kwargs)

    def shutdown(self) -> None:
        return None
