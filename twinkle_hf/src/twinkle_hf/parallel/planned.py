"""Tensor and expert parallelism as Transformers plans them for each model, with FSDP2 on top: its `DistributedConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from twinkle.errors import ConfigError, MeshError, NotSupportedError
from twinkle_hf.parallel.gradients import broadcast_from_first, sum_gradients
from twinkle_hf.parallel.layout import Load
from twinkle_hf.parallel.sharded import SyncedByBackward

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn import Parameter

    from twinkle import DeviceMesh

__all__ = ['PlanOptions', 'Planned']


@dataclass(frozen=True)
class PlanOptions:
    """Keys of `fsdp_config` on a mesh with `tp_size` or `ep_size`; see `transformers.distributed.DistributedConfig`.

    Attributes:
        tp_plan, ep_plan, fsdp_plan: rules that override the model's own.
        fsdp_cpu_offload, fsdp_mixed_precision: as there.
        ep_implementation: how tokens reach their experts.
        sync_each_micro_batch: as in `ShardOptions`.
    """

    tp_plan: Mapping[str, str] | None = None
    ep_plan: Mapping[str, str] | None = None
    fsdp_plan: Mapping[str, str] | None = None
    fsdp_cpu_offload: bool = False
    fsdp_mixed_precision: bool = False
    ep_implementation: str = 'all_to_all'
    sync_each_micro_batch: bool = False


class Planned(SyncedByBackward):
    """Each rank reads its own part of the weights from the model's files. With `ep_size`, all data ranks shard the other weights."""

    def __init__(self, *args: Any, fsdp_config: Mapping[str, Any]) -> None:
        super().__init__(*args)
        known = [field.name for field in fields(PlanOptions)]
        unknown = sorted(fsdp_config.keys() - set(known))
        if unknown:
            raise ConfigError(
                f'fsdp_config has no {unknown} on a mesh with tp_size or ep_size; its keys are {", ".join(known)}.'
            )
        self._options = PlanOptions(**fsdp_config)
        self.sync_each_micro_batch = self._options.sync_each_micro_batch
        self._styles: dict[nn.Module, str] = {}
        self._partial: set[Parameter] = set()
        self._summed_by_hooks: list[Parameter] = []
        self._stash: dict[Parameter, Tensor] = {}
        self._fully_sharded = False

    def load(self, load: Load, prepare: Callable[[Any], None]) -> tuple[Any, Path | None]:
        from transformers.distributed.configuration_utils import DistributedConfig

        options = {field.name: getattr(self._options, field.name) for field in fields(self._options)}
        del options['sync_each_micro_batch']
        plans = {key: dict(value) for key, value in options.items() if isinstance(value, Mapping)}
        sizes = _sizes(self.mesh)
        try:
            module, folder = load(distributed_config=DistributedConfig(**{**options, **plans, **sizes}))
        except ValueError as error:
            raise MeshError(f'Transformers cannot spread this model as {self.mesh} asks: {error}') from error
        prepare(module)
        if self.mesh.tp_size > 1:
            planned = module._expand_parallel_plan(module.tp_plan)
            self._styles = {
                part: planned[name] if name in planned else planned[f'{name}.weight']
                for name, part in module.named_modules()
                if name in planned or f'{name}.weight' in planned
            }
            self._summed_by_hooks = [
                parameter
                for part, style in self._styles.items()
                if style == 'replicated_with_grad_allreduce'
                for parameter in part.parameters()
            ]
        self._fully_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
        if self._fully_sharded and self._summed_by_hooks:
            # Their hooks sum a whole gradient in every backward; what earlier ones left in it would be summed again.
            self.sync_each_micro_batch = True
        return module, folder

    def begin(self, module: nn.Module, *, first: bool, last: bool, has_adapter: bool, apart: bool) -> None:
        if not first:
            self._unstash()
        self._stash = {p: p.grad for p in self._summed_by_hooks if p.grad is not None}
        for parameter in self._stash:
            parameter.grad = None
        if self._fully_sharded:
            super().begin(module, first=first, last=last, has_adapter=has_adapter, apart=apart)

    def reduce(self, module: nn.Module, parameters: Sequence[Parameter], *, has_adapter: bool) -> float:
        self._unstash()
        if has_adapter:
            sum_gradients([p for p in parameters if p in self._partial], self.groups.tensor)
        if has_adapter or self._fully_sharded:
            return super().reduce(module, parameters, has_adapter=has_adapter)
        return 1.0  # one data rank, whose tensor peers each hold the whole gradients of their parts

    def _unstash(self) -> None:
        """Transformers sums what a parameter has accumulated in every backward: earlier micro-batches are kept away from that."""
        for parameter, grad in self._stash.items():
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self._stash = {}

    def adapter_added(self, module: nn.Module, parameters: Iterable[Tensor], name: str) -> None:
        broadcast_from_first(parameters, dist.group.WORLD)
        if self.mesh.tp_size == 1:
            return
        from peft.tuners.lora import Linear
        from peft.tuners.tuners_utils import BaseTunerLayer

        for place, layer in module.named_modules():
            if not isinstance(layer, BaseTunerLayer) or not _has_adapter(layer, name):
                continue
            style = self._styles.get(layer.get_base_layer())
            if style is None or style in _WHOLE:
                continue
            if not isinstance(layer, Linear) or style not in _SPLIT:
                raise NotSupportedError(
                    f'Adapter {name!r} on {place} ({type(layer).__name__}, {style}): only LoRA on linear layers that are split by '
                    'columns or rows is trained under tensor parallelism. Leave it out of target_modules.'
                )
            self._split(layer, name, style)

    def _split(self, layer: Any, name: str, style: str) -> None:
        """Have a LoRA, whose weights are whole on every rank, compute with the part that belongs to the rank's part of the layer."""
        down, up = layer.lora_A[name], layer.lora_B[name]
        group, size = self.groups.tensor, self.mesh.tp_size
        index = self.mesh.coordinates()['tp']
        if style == 'colwise':
            part = _part(up.weight.shape[0], index, size)
            down.forward = lambda x: F.linear(_SumInBackward.apply(x, group), down.weight, down.bias)
            up.forward = lambda h: F.linear(h, up.weight[part], None if up.bias is None else up.bias[part])
            self._partial |= set(down.parameters()) | set(up.parameters())
        else:
            part = _part(down.weight.shape[1], index, size)
            down.forward = lambda x: _SumInForward.apply(F.linear(x, down.weight[:, part]), group)
            self._partial |= set(down.parameters())


_SPLIT = ('colwise', 'rowwise')
# Styles whose layers take and give whole activations, so that a whole LoRA beside them is right.
_WHOLE = ('colwise_gather_output', 'colwise_rep', 'rowwise_rep', 'rowwise_split_input', 'replicate')


class _SumInBackward(torch.autograd.Function):
    """Whole activations into split layers: each rank's gradient is of its part only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = d_x.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumInForward(torch.autograd.Function):
    """Split activations out of a split product: each rank has a term of the sum."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, group: Any) -> Tensor:
        total = term.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return d_total, None


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Sizes in Transformers' words. Experts are spread over ranks that shard the other weights."""
    fsdp, replicas = mesh.fsdp_size, mesh.dp_size
    if mesh.ep_size > 1 and (fsdp * mesh.tp_size) % mesh.ep_size:
        fsdp, replicas = fsdp * replicas, 1
    return {'tp_size': mesh.tp_size, 'fsdp_size': fsdp, 'dp_replicate_size': replicas, 'ep_size': mesh.ep_size}


def _part(total: int, index: int, size: int) -> slice:
    """What torch's `Shard` gives a rank: equal parts, the last ones shorter."""
    each = -(-total // size)
    return slice(min(index * each, total), min((index + 1) * each, total))


def _has_adapter(layer: Any, name: str) -> bool:
    return any(name in getattr(layer, attribute, {}) for attribute in layer.adapter_layer_names)
