"""Slots: room for several tenants' LoRA weights at each linear layer, and which of them a forward pass uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twinkle_hf.multi_lora.product import Rows, lora_product

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ['Lora', 'Selection', 'SlotLayer', 'Slots']


@dataclass(frozen=True)
class Lora:
    """One tenant's LoRA at one layer. `a` [r, I] and `b` [O, r] are parameters whose memory is the slot's."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float
    dropout: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Selection:
    """What a forward pass uses: the slots of its rows' tenants, in the order of the rows, and how many rows each has.

    Attributes:
        slots, counts: of each tenant.
        generators: random numbers for each tenant's dropout; None for PyTorch's own.
    """

    slots: tuple[int, ...]
    counts: tuple[int, ...] = ()
    generators: tuple[torch.Generator | None, ...] = ()


class SlotLayer:
    """The slots of one linear layer, added to its output by a hook. The layer itself stays as it is, weights and names."""

    def __init__(self, slots: Slots, name: str, layer: nn.Linear, max_loras: int, max_r: int) -> None:
        self._slots = slots
        self.name = name
        self.sizes = (layer.in_features, layer.out_features)
        dtype, device = layer.weight.dtype, slots.device
        self.down = torch.zeros(max_loras, max_r, layer.in_features, dtype=dtype, device=device)
        self.up = torch.zeros(max_loras, max_r, layer.out_features, dtype=dtype, device=device)
        self.loras: dict[int, Lora] = {}
        self._rows: dict[Any, Rows] = {}
        self._hook: Any = None
        self._layer = layer

    def __deepcopy__(self, memo: Any) -> SlotLayer:
        return self  # a copy of the module has the base model's weights; tenants are not copied

    def put(self, slot: int, a: Tensor, b: Tensor, scale: float, dropout: float) -> Lora:
        """Fill a slot with A [r, I] and B [O, r]; returns the parameters, whose memory is the slot's."""
        rank = a.shape[0]
        with torch.no_grad():
            self.down[slot, :rank] = a
            self.up[slot, :rank] = b.t()
        lora = Lora(nn.Parameter(self.down[slot, :rank]), nn.Parameter(self.up[slot, :rank].t()), scale, dropout)
        self.loras[slot] = lora
        self._rows.clear()
        if self._hook is None:
            self._hook = self._layer.register_forward_hook(self._add)
        return lora

    def clear(self, slot: int) -> None:
        """Make a slot as new. Without a tenant the layer is called as if there were no slots."""
        if self.loras.pop(slot, None) is not None:
            self.down[slot].zero_()
            self.up[slot].zero_()
        self._rows.clear()
        if not self.loras and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _add(self, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        chosen = self._slots.selection
        if chosen is None:
            return None
        x = arguments[0]
        if len(chosen.slots) == 1:
            lora = self.loras.get(chosen.slots[0])
            return None if lora is None else self._one(lora, x, output, layer.training)
        present = [self.loras.get(slot) for slot in chosen.slots]
        if not any(present):
            return None
        weights = [weight for lora in present if lora is not None for weight in (lora.a, lora.b)]
        if layer.training:
            x = self._dropped(x, chosen, present)
        return lora_product(output, x, self._rows_of(chosen, present), self.down, self.up, *weights)

    @staticmethod
    def _one(lora: Lora, x: Tensor, output: Tensor, training: bool) -> Tensor:
        """One tenant alone: PEFT's own order of operations."""
        x = x.to(lora.a.dtype)
        if lora.dropout and training:
            x = F.dropout(x, lora.dropout)
        return (output + F.linear(F.linear(x, lora.a), lora.b) * lora.scale).to(output.dtype)

    def _rows_of(self, chosen: Selection, present: Sequence[Lora | None]) -> Rows:
        key = (chosen.slots, chosen.counts)
        if key not in self._rows:
            device = self.down.device
            self._rows[key] = Rows(
                chosen.slots,
                chosen.counts,
                tuple(0 if lora is None else lora.rank for lora in present),
                torch.tensor(chosen.slots, device=device),
                torch.tensor([0.0 if lora is None else lora.scale for lora in present], device=device),
            )
        return self._rows[key]

    @staticmethod
    def _dropped(x: Tensor, chosen: Selection, present: Sequence[Lora | None]) -> Tensor:
        """Inputs with each tenant's own dropout, drawn from its own generator."""
        if not any(lora is not None and lora.dropout for lora in present):
            return x
        parts = []
        for part, lora, generator in zip(x.split(list(chosen.counts)), present, chosen.generators, strict=True):
            if lora is None or not lora.dropout:
                parts.append(part)
                continue
            kept = torch.empty_like(part).bernoulli_(1 - lora.dropout, generator=generator)
            parts.append(part * kept.div_(1 - lora.dropout))
        return torch.cat(parts)


class Slots:
    """The slots of all linear layers of a module, and what the pass that is running uses."""

    def __init__(self, device: torch.device, max_loras: int, max_r: int) -> None:
        self.device, self.max_loras, self.max_r = device, max_loras, max_r
        self.layers: dict[str, SlotLayer] = {}
        self.selection: Selection | None = None

    def __deepcopy__(self, memo: Any) -> Slots:
        return self

    def attach(self, layers: Mapping[str, nn.Linear]) -> None:
        """Make room at these layers. Their shapes must be known; their weights may be sharded later."""
        for name, layer in layers.items():
            self.layers[name] = SlotLayer(self, name, layer, self.max_loras, self.max_r)

    @contextmanager
    def using(self, selection: Selection | None) -> Iterator[None]:
        """Within the context a forward pass uses these; after it what was used before."""
        before, self.selection = self.selection, selection
        try:
            yield
        finally:
            self.selection = before

    def clear(self, slot: int) -> None:
        """Make a slot as new everywhere."""
        for layer in self.layers.values():
            layer.clear(slot)
