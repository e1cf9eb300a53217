"""FSDP2: weights sharded over ranks by PyTorch's `fully_shard`, layer by layer; HSDP where the mesh also has replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from twinkle.errors import ConfigError
from twinkle.launcher import rank
from twinkle_hf.parallel.gradients import broadcast_from_first, sum_gradients
from twinkle_hf.parallel.layout import Load, Replicated

if TYPE_CHECKING:
    from torch import nn
    from torch.nn import Parameter

__all__ = ['ShardOptions', 'Sharded', 'SyncedByBackward']


@dataclass(frozen=True)
class ShardOptions:
    """Keys of `fsdp_config` under `strategy='native_fsdp'`.

    Attributes:
        reshard_after_forward: free a layer's whole weights after its forward and gather them again in backward (True), keep them
            (False), or reshard to groups of so many ranks (an integer). See `torch.distributed.fsdp.fully_shard`.
        cpu_offload: keep shards in the CPU's memory.
        param_dtype, reduce_dtype: dtypes (or their names) in which weights are gathered and computed with, and gradients reduced.
            Left out, as the parameters are; autocast by `mixed_precision` is apart from it.
        wrap: names of the classes whose instances are sharded one by one; by default the model's `_no_split_modules`.
        sync_each_micro_batch: reduce gradients in every backward rather than at the boundary of the accumulation window: less
            memory (whole gradients are never kept), more communication.
    """

    reshard_after_forward: bool | int | None = None
    cpu_offload: bool = False
    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    wrap: Sequence[str] | None = None
    sync_each_micro_batch: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ShardOptions:
        """Check the keys.

        Raises:
            ConfigError: an unknown one.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise ConfigError(
                f"fsdp_config has no {unknown} with strategy='native_fsdp'; its keys are {', '.join(known)}."
            )
        return cls(**given)

    def keywords(self, mesh: Any) -> dict[str, Any]:
        """For `fully_shard`."""
        policy = MixedPrecisionPolicy(param_dtype=_dtype(self.param_dtype), reduce_dtype=_dtype(self.reduce_dtype))
        offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        found = {'mesh': mesh, 'mp_policy': policy, 'offload_policy': offload}
        if self.reshard_after_forward is not None:
            found['reshard_after_forward'] = self.reshard_after_forward
        return found


class SyncedByBackward(Replicated):
    """Weights whose gradients FSDP2 reduces while backward runs; adapters stay whole, and are summed at the boundary."""

    sharded = True
    sync_each_micro_batch = False
    _pending = False

    def begin(self, module: nn.Module, *, first: bool, last: bool, has_adapter: bool, apart: bool) -> None:
        if has_adapter:
            return
        sync = last or apart or self.sync_each_micro_batch
        _fsdp(module).set_requires_gradient_sync(sync)
        self._pending = not sync

    def prepare_backward(self, module: nn.Module, *, of_aux_loss: bool) -> None:
        # Layers gather their weights again when a gradient reaches their outputs. The routers' logits are no output of the last
        # layer, and log-probabilities, which are made of the head's weights, none of the head: these have to be gathered here.
        parts = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
        if of_aux_loss:
            layers = [part for part in parts if any(part.children())]
            inside = {id(inner) for layer in layers for inner in layer.modules() if inner is not layer}
            last = [layer for layer in layers if id(layer) not in inside][-1:]
            chosen = [part for layer in last for part in layer.modules() if isinstance(part, FSDPModule)]
        else:
            chosen = [_fsdp(module), *(part for part in parts if not any(part.children()))]
        for part in chosen:
            part.unshard()

    def reduce(self, module: nn.Module, parameters: Sequence[Parameter], *, has_adapter: bool) -> float:
        if has_adapter:
            return super().reduce(module, parameters, has_adapter=has_adapter)
        if self._pending:
            self._reduce_pending(module)
        whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        count = float(self.groups.replica_count)  # FSDP2 averages
        if whole:
            sum_gradients(whole, self.groups.replicas)
            for parameter in whole:
                if parameter.grad is not None:
                    parameter.grad.div_(count)
        return count

    def _reduce_pending(self, module: nn.Module) -> None:
        """A window was closed early, and its last backward kept gradients to itself: a backward of zeros has them reduced."""
        _fsdp(module).set_requires_gradient_sync(True)
        tokens = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        was_training = module.training
        module.eval()  # dropout would draw random numbers
        try:
            output = module(input_ids=tokens, return_dict=True)
            value = output.logits if getattr(output, 'logits', None) is not None else output.last_hidden_state
            (value.float().sum() * 0.0).backward()
        finally:
            module.train(was_training)
        self._pending = False


class Sharded(SyncedByBackward):
    """`strategy='native_fsdp'`."""

    def __init__(self, *args: Any, fsdp_config: Mapping[str, Any], memory_efficient_init: bool) -> None:
        super().__init__(*args)
        self._options = ShardOptions.of(fsdp_config)
        self.sync_each_micro_batch = self._options.sync_each_micro_batch
        self._efficient = memory_efficient_init

    def load(self, load: Load, prepare: Callable[[Any], None]) -> tuple[Any, Path | None]:
        if self._efficient:
            return load_from_first(load, prepare, self._shard, self.device, self.groups)
        module, folder = super().load(load, prepare)
        self._shard(module)
        return module, folder

    def _shard(self, module: Any) -> None:
        keywords = self._options.keywords(self._mesh())
        names = set(self._options.wrap or getattr(module, '_no_split_modules', None) or ())
        layers = [part for part in module.modules() if type(part).__name__ in names]
        if not layers:
            raise ConfigError(
                f"{type(module).__name__} has no module of the classes {sorted(names)} to shard one by one. Name its layers' class: "
                "fsdp_config={'wrap': ['LlamaDecoderLayer']}, say."
            )
        for layer in layers:
            fully_shard(layer, **keywords)
        fully_shard(module, **{key: value for key, value in keywords.items() if key != 'reshard_after_forward'})

    def _mesh(self) -> Any:
        mesh = self.groups.mesh
        if mesh.dp_size == 1:
            return self.groups.torch_mesh((mesh.fsdp_size,), ('shard',))
        return self.groups.torch_mesh((mesh.dp_size, mesh.fsdp_size), ('replicate', 'shard'))


def load_from_first(
    load: Load, prepare: Callable[[Any], None], shard: Callable[[Any], None], device: torch.device, groups: Any
) -> tuple[Any, Path | None]:
    """Rank 0 loads; the others make room for their shards only, and are given them tensor by tensor."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    source, folder = load(on_meta=rank() != 0)
    twin, _ = load(on_meta=True)
    for name in ('generation_config',):
        if hasattr(source, name):
            setattr(twin, name, getattr(source, name))
    prepare(twin)
    shard(twin)
    twin.to_empty(device=device)
    twin.tie_weights()
    state = source.state_dict() if rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(twin, state, options=options)
    buffers = dict(twin.named_buffers())
    if rank() == 0:
        for name, value in source.named_buffers():
            buffers[name].copy_(value)
    broadcast_from_first(list(buffers.values()), groups.replicas)
    return twin, folder


def _fsdp(module: nn.Module) -> Any:
    """The sharded module below whatever PEFT wrapped around it."""
    return next(part for part in module.modules() if isinstance(part, FSDPModule))


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    found = getattr(torch, str(given).removeprefix('torch.'), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f'fsdp_config: {given!r} is no torch dtype.')
    return found
