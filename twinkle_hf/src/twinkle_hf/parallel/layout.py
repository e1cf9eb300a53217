"""How one model is spread over processes. `Layout` is one process; its subclasses are the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from twinkle.errors import NotSupportedError
from twinkle_hf.parallel.gradients import broadcast_from_first, clip_by_global_norm, sum_gradients

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn import Parameter

    from twinkle import DeviceMesh
    from twinkle_hf.parallel.groups import Groups

__all__ = ['Layout', 'Load', 'Replicated', 'build_layout', 'sharded_names']

Load = Callable[..., tuple[Any, Path | None]]
"""Loads the module onto the CPU; keywords go to `from_pretrained`. Returns it and the folder that it came from."""


class Layout:
    """One process: everything is whole and here.

    Attributes:
        sharded: whether parameters of the base model are `DTensor`s.
    """

    sharded = False

    def __init__(self, mesh: DeviceMesh, groups: Groups | None, device: torch.device) -> None:
        self.mesh, self.groups, self.device = mesh, groups, device

    def load(self, load: Load, prepare: Callable[[Any], None]) -> tuple[Any, Path | None]:
        """The module, spread over ranks. `prepare` changes it on its device before it is sharded."""
        module, folder = load()
        torch.nn.Module.to(module, device=self.device)
        prepare(module)
        return module, folder

    def callable(self, module: nn.Module, *, training: bool, has_adapter: bool) -> nn.Module:
        """What is called in a forward pass."""
        return module

    def begin(self, module: nn.Module, *, first: bool, last: bool, has_adapter: bool, apart: bool) -> None:
        """A training micro-batch is about to run: whether it is the window's first, its last, and whether backward has several passes."""

    def prepare_backward(self, module: nn.Module, *, of_aux_loss: bool) -> None:
        """One of two backward passes through the graph of a forward pass is about to run: an auxiliary loss's, or the one after it."""

    def reduce(self, module: nn.Module, parameters: Sequence[Parameter], *, has_adapter: bool) -> float:
        """Bring the window's gradients together; returns what is still to be multiplied for their sum over ranks."""
        return 1.0

    def sum_over_data(self, value: Tensor) -> Tensor:
        """`value` summed over the ranks that read other rows."""
        return value

    def clip(self, parameters: Sequence[Parameter], max_norm: float, norm_type: float) -> float:
        """Clip in place by the global norm; returns the norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))

    def adapter_added(self, module: nn.Module, parameters: Iterable[Tensor], name: str) -> None:
        """An adapter was put into the module, on every rank."""


class Replicated(Layout):
    """Every rank holds all weights. Gradients are summed once per window, at its boundary.

    So accumulation costs no communication, and it does not matter which parameters a rank used, or which adapter was added when.
    """

    groups: Groups

    def load(self, load: Load, prepare: Callable[[Any], None]) -> tuple[Any, Path | None]:
        module, folder = super().load(load, prepare)
        broadcast_from_first([*module.parameters(), *module.buffers()], self.groups.replicas)
        return module, folder

    def reduce(self, module: nn.Module, parameters: Sequence[Parameter], *, has_adapter: bool) -> float:
        sum_gradients(parameters, self.groups.replicas)
        return 1.0

    def sum_over_data(self, value: Tensor) -> Tensor:
        return self.groups.sum(value, self.groups.data)

    def clip(self, parameters: Sequence[Parameter], max_norm: float, norm_type: float) -> float:
        return clip_by_global_norm(parameters, max_norm, norm_type)

    def adapter_added(self, module: nn.Module, parameters: Iterable[Tensor], name: str) -> None:
        # Adapters are small: they stay whole on every rank, also where the base model is sharded, and are as one from here on.
        broadcast_from_first(parameters, self.groups.replicas)


class AcceleratedReplicas(Replicated):
    """Full-parameter training through Accelerate's DistributedDataParallel, which reduces while backward runs. Adapters as above."""

    def __init__(self, *args: Any, ddp_config: Mapping[str, Any]) -> None:
        super().__init__(*args)
        self._ddp_config = ddp_config
        self._wrapped: Any = None
        self._of: nn.Module | None = None
        self._unsynced = ExitStack()
        self._synced = False

    def callable(self, module: nn.Module, *, training: bool, has_adapter: bool) -> nn.Module:
        if not training or has_adapter:
            return module
        return self._wrap(module)

    def begin(self, module: nn.Module, *, first: bool, last: bool, has_adapter: bool, apart: bool) -> None:
        self._unsynced.close()
        self._synced = last and not apart and not has_adapter
        if not has_adapter and not self._synced:
            self._unsynced.enter_context(self._wrap(module).no_sync())

    def reduce(self, module: nn.Module, parameters: Sequence[Parameter], *, has_adapter: bool) -> float:
        self._unsynced.close()
        if has_adapter or not self._synced:
            return super().reduce(module, parameters, has_adapter=has_adapter)
        return float(self.groups.replica_count)  # DistributedDataParallel averages

    def _wrap(self, module: nn.Module) -> Any:
        if self._of is not module:
            from twinkle_hf.parallel.accelerated import data_parallel

            self._of, self._wrapped = module, data_parallel(module, self._ddp_config, self.groups)
        return self._wrapped


def build_layout(
    mesh: DeviceMesh,
    device: torch.device,
    *,
    strategy: str,
    ddp_config: Mapping[str, Any] | None,
    fsdp_config: Mapping[str, Any] | None,
    memory_efficient_init: bool,
) -> Layout:
    """The layout for a mesh.

    Raises:
        StateError: the process group is not started.
        ConfigError: an unknown key in a configuration.
        NotSupportedError: a configuration that this layout has no use for.
    """
    from twinkle_hf.parallel.groups import Groups

    sharded = mesh.fsdp_size > 1
    planned = mesh.tp_size > 1 or mesh.ep_size > 1
    _refuse_unused(mesh, strategy, ddp_config, fsdp_config, memory_efficient_init, sharded or planned)
    if mesh.world_size == 1:
        return Layout(mesh, None, device)
    groups = Groups(mesh)
    if planned:
        from twinkle_hf.parallel.planned import Planned

        return Planned(mesh, groups, device, fsdp_config=fsdp_config or {})
    if sharded and strategy == 'accelerate':
        from twinkle_hf.parallel.accelerated import AcceleratedShards

        return AcceleratedShards(
            mesh, groups, device, fsdp_config=fsdp_config or {}, memory_efficient_init=memory_efficient_init
        )
    if sharded:
        from twinkle_hf.parallel.sharded import Sharded

        return Sharded(mesh, groups, device, fsdp_config=fsdp_config or {}, memory_efficient_init=memory_efficient_init)
    if strategy == 'accelerate':
        return AcceleratedReplicas(mesh, groups, device, ddp_config=ddp_config or {})
    return Replicated(mesh, groups, device)


def _refuse_unused(
    mesh: DeviceMesh,
    strategy: str,
    ddp_config: Mapping[str, Any] | None,
    fsdp_config: Mapping[str, Any] | None,
    memory_efficient_init: bool,
    sharded: bool,
) -> None:
    """Nothing that was asked for is dropped in silence."""
    if ddp_config is not None and (sharded or mesh.world_size == 1 or strategy != 'accelerate'):
        raise NotSupportedError(
            f"ddp_config is for strategy='accelerate' on a mesh of dp_size > 1 only; this is strategy={strategy!r} on {mesh}."
        )
    for name, given in (('fsdp_config', fsdp_config is not None), ('memory_efficient_init', memory_efficient_init)):
        if given and not sharded:
            raise NotSupportedError(
                f'{name} is for a mesh that shards weights (fsdp_size, tp_size or ep_size above 1); this is {mesh}.'
            )


def sharded_names(module: nn.Module) -> set[str]:
    """Names of the parameters that are sharded."""
    return {name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)}
