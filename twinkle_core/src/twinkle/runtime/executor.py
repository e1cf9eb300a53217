"""Who carries out what `remote_class` and `remote_function` declare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from twinkle.device_mesh import DeviceGroup, DeviceMesh

__all__ = ['Executor', 'LocalExecutor']


class Executor(ABC):
    """Runs classes where its mode says: in this process, or in workers behind proxies."""

    is_remote: ClassVar[bool] = True

    @abstractmethod
    def start(self, mesh: DeviceMesh, groups: Sequence[DeviceGroup], options: Mapping[str, Any]) -> None:
        """Get ready: connect, or start workers. Options that it does not know are refused."""

    @abstractmethod
    def create(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make an instance of a remote class, and return what stands for it here."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of everything that `start` and `create` took."""


class LocalExecutor(Executor):
    """Everything in this process: a plain call. Under torchrun each process runs the whole script."""

    is_remote: ClassVar[bool] = False

    def start(self, mesh: DeviceMesh, groups: Sequence[DeviceGroup], options: Mapping[str, Any]) -> None:
        from twinkle.errors import ConfigError

        if options:
            raise ConfigError(f"initialize(mode='local') takes no {sorted(options)}.")

    def create(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return cls(*args, **kwargs)

    def shutdown(self) -> None:
        return None
