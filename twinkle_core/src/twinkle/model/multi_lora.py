"""Many tenants on one base model: who holds which slot, and what a tenant's name means.

Nothing here knows of modules: a backend fills and clears slots, this table says which. Tenants are called by their own names in every
method; slots have names of their own (`lora_0`, `lora_1`, ...), which are reserved, so that no tenant reaches a slot by accident.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from twinkle.errors import DuplicateAdapterError, NameNotAllowedError, SlotsFullError, UnknownAdapterError
from twinkle.model.adapters import AdapterTable, check_name
from twinkle.model.state import TrainState

__all__ = ['LoraTenant', 'MultiLora', 'SlotOwner', 'SlotTable', 'TenantTable']

_SLOT = re.compile(r'lora_\d+')


@dataclass(frozen=True)
class LoraTenant:
    """One tenant and its slot.

    Attributes:
        index: the slot's number.
        adapter_name: the slot's name.
        config: what the slot was made with: the tenant's config, as it is carried out.
        tenant_adapter_name: the tenant's own name.
        tenant_config: the tenant's config, as it was given.
    """

    index: int
    adapter_name: str
    config: Any
    tenant_adapter_name: str
    tenant_config: Any


class SlotTable:
    """Which tenant holds which slot. Safe for threads; a slot is either free or held by one tenant.

    Args:
        max_loras: slots.
        max_r: the largest rank that fits into one.
    """

    def __init__(self, max_loras: int, max_r: int) -> None:
        self.max_loras, self.max_r = max_loras, max_r
        self._held: dict[str, LoraTenant] = {}
        self._lock = threading.RLock()

    def reserve(self, tenant: str, config: Any, rank: int) -> LoraTenant:
        """Give a tenant the first free slot.

        Raises:
            NameNotAllowedError: a name that is none, or a slot's.
            DuplicateAdapterError: the tenant has a slot.
            SlotsFullError: no slot is free, or the rank does not fit; who holds what is told.
        """
        check_name(tenant)
        if _SLOT.fullmatch(tenant):
            raise NameNotAllowedError(f'Tenant name {tenant!r} is not allowed: lora_<number> are the names of slots.')
        with self._lock:
            if tenant in self._held:
                raise DuplicateAdapterError(
                    f'Tenant {tenant!r} has slot {self._held[tenant].adapter_name} already ({self.describe()}). release_lora it first, '
                    'or take another name.'
                )
            if rank > self.max_r:
                raise SlotsFullError(
                    f'Tenant {tenant!r} asks for rank {rank}, and slots have max_r={self.max_r} ({self.describe()}). Build the model with '
                    f'max_r={rank}.'
                )
            taken = {held.index for held in self._held.values()}
            index = next((i for i in range(self.max_loras) if i not in taken), None)
            if index is None:
                raise SlotsFullError(
                    f'Tenant {tenant!r} finds no slot: all {self.max_loras} are held ({self.describe()}). release_lora one of them, or '
                    'build the model with a larger max_loras.'
                )
            held = LoraTenant(index, f'lora_{index}', config, tenant, config)
            self._held[tenant] = held
            return held

    def settle(self, tenant: str, config: Any) -> LoraTenant:
        """Note the config that a slot was filled with."""
        with self._lock:
            held = self._held[tenant]
            self._held[tenant] = LoraTenant(held.index, held.adapter_name, config, tenant, held.tenant_config)
            return self._held[tenant]

    def free(self, tenant: str) -> LoraTenant:
        """Take a slot back.

        Raises:
            UnknownAdapterError: the tenant has none.
        """
        with self._lock:
            held = self.get(tenant)
            del self._held[tenant]
            return held

    def get(self, tenant: str) -> LoraTenant:
        """A tenant's entry.

        Raises:
            UnknownAdapterError: it has none.
        """
        with self._lock:
            held = self._held.get(tenant)
            if held is None:
                raise UnknownAdapterError(f'Unknown tenant {tenant!r}: {self.describe()}.')
            return held

    @property
    def tenants(self) -> list[LoraTenant]:
        """Who is here, by slot."""
        with self._lock:
            return sorted(self._held.values(), key=lambda held: held.index)

    def describe(self) -> str:
        """Who holds what, in words."""
        with self._lock:
            held = ', '.join(
                f'{t.adapter_name}: {t.tenant_adapter_name!r} r={getattr(t.config, "r", "?")}' for t in self.tenants
            )
            return held or f'none of {self.max_loras} slots is held'


class SlotOwner(Protocol):
    """The backend's part."""

    def fill_slot(self, tenant: LoraTenant, config_or_dir: Any) -> Any:
        """Put a tenant's adapter into its slot, or raise and leave the slot empty. Returns the config that is carried out."""

    def clear_slot(self, tenant: LoraTenant) -> None:
        """Make a slot as new."""

    def read_config(self, config_or_dir: Any) -> tuple[Any, int]:
        """A copy of a config, given or of a saved adapter's folder, and the largest rank in it."""


class MultiLora:
    """`model.multi_lora`: tenants come and go.

    Args:
        table: who holds which slot.
        states: the training states of tenants.
        owner: the backend.
    """

    def __init__(self, table: SlotTable, states: TenantTable, owner: SlotOwner) -> None:
        self._table, self._states, self._owner = table, states, owner
        self._changing = threading.RLock()  # one tenant at a time enters or leaves the module

    def acquire_lora(self, tenant: str, config_or_dir: Any) -> str:
        """Take a slot for a tenant: with a fresh adapter by a `LoraConfig`, or a saved one by its folder. Returns the slot's name.

        Raises:
            RuntimeError: slots are full, or the rank is above max_r; the message says who holds what.
            AdapterError, ConfigError, NotSupportedError, CheckpointError: a name, a config or a folder that cannot be. The slot is free then.
        """
        with self._changing:
            config, rank = self._owner.read_config(config_or_dir)
            held = self._table.reserve(tenant, config, rank)
            try:
                carried_out = self._owner.fill_slot(held, config_or_dir)
                self._table.settle(tenant, carried_out)
                self._states.add(tenant)
            except BaseException:
                self._table.free(tenant)
                self._owner.clear_slot(held)
                raise
            return held.adapter_name

    def release_lora(self, tenant: str) -> None:
        """Give a slot back. It is as new; the tenant's training state is gone.

        Raises:
            UnknownAdapterError: the tenant has none.
        """
        with self._changing:
            held = self._table.get(tenant)
            self._states.remove(tenant)
            self._owner.clear_slot(held)
            self._table.free(tenant)

    @contextmanager
    def adapter(self, tenant: str) -> Iterator[str]:
        """Within the context an omitted `adapter_name` is this tenant, and so is the slot's name that it yields. Nests."""
        held = self._table.get(tenant)
        with self._states.enclosing(tenant), self._states.alias(held.adapter_name, tenant):
            yield held.adapter_name

    @property
    def tenants(self) -> list[LoraTenant]:
        """Who is here, by slot."""
        return self._table.tenants

    def get(self, tenant: str) -> LoraTenant:
        """A tenant's entry; an unknown one raises `UnknownAdapterError`."""
        return self._table.get(tenant)

    def __len__(self) -> int:
        return len(self._table.tenants)

    def __contains__(self, tenant: object) -> bool:
        return any(held.tenant_adapter_name == tenant for held in self._table.tenants)

    def __repr__(self) -> str:
        return f'MultiLora({self._table.describe()})'


class TenantTable(AdapterTable):
    """States by tenant. The base model itself is not trained, so it has none."""

    def __init__(self, make_state: Callable[[str], TrainState]) -> None:
        super().__init__(make_state)
        self._states.clear()
        self._aliases: ContextVar[tuple[tuple[str, str], ...]] = ContextVar('slot_names', default=())

    def add(self, name: str) -> TrainState:
        """A fresh state: nothing is taken over from anybody."""
        self.check_new(name)
        self._states[name] = self._make_state(name)
        return self._states[name]

    def remove(self, name: str) -> None:
        """Drop a tenant's state."""
        self._states.pop(name, None)

    def get(self, name: str | None = None) -> TrainState:
        for alias, tenant in reversed(self._aliases.get()):
            if name == alias:
                name = tenant
        if name is None and not self._states and self._enclosing.get() is None:
            raise UnknownAdapterError(
                'No tenant has a slot: call multi_lora.acquire_lora(name, LoraConfig(...)) first.'
            )
        if name is not None and _SLOT.fullmatch(name):
            raise UnknownAdapterError(
                f'{name!r} is the name of a slot, which means its tenant within `with model.multi_lora.adapter(tenant):` only. Tenants '
                f'are {self.names}.'
            )
        return super().get(name)

    @contextmanager
    def alias(self, alias: str, tenant: str) -> Iterator[None]:
        """Within the context, a slot's name means its tenant."""
        token = self._aliases.set((*self._aliases.get(), (alias, tenant)))
        try:
            yield
        finally:
            self._aliases.reset(token)
