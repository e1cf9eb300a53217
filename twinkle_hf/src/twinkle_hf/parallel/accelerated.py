"""`strategy='accelerate'`: DistributedDataParallel and FSDP2 as Accelerate sets them up, with its configuration keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from twinkle.errors import ConfigError, NotSupportedError
from twinkle_hf.parallel.layout import Load
from twinkle_hf.parallel.sharded import SyncedByBackward, load_from_first

if TYPE_CHECKING:
    from torch import nn

    from twinkle_hf.parallel.groups import Groups

__all__ = ['AcceleratedShards', 'data_parallel']

_DDP_KEYS = (
    'broadcast_buffers', 'bucket_cap_mb', 'find_unused_parameters', 'check_reduction', 'gradient_as_bucket_view', 'static_graph',
    'comm_hook', 'comm_wrapper', 'comm_state_option',
)  # fmt: skip
_FSDP_KEYS = (
    'reshard_after_forward', 'cpu_offload', 'mixed_precision_policy', 'auto_wrap_policy', 'transformer_cls_names_to_wrap',
    'min_num_params', 'ignored_modules', 'activation_checkpointing', 'sync_each_micro_batch',
)  # fmt: skip


def data_parallel(module: nn.Module, config: Mapping[str, Any], groups: Groups) -> Any:
    """The module in Accelerate's DistributedDataParallel.

    Raises:
        ConfigError: an unknown key of `ddp_config`.
    """
    from accelerate.utils import DistributedDataParallelKwargs

    _check_keys('ddp_config', config, _DDP_KEYS)
    handler = DistributedDataParallelKwargs(**config)
    accelerator = _accelerator(groups)
    accelerator.ddp_handler = handler
    return accelerator.prepare_model(module)


class AcceleratedShards(SyncedByBackward):
    """FSDP2 by Accelerate's own preparation.

    `Accelerator.prepare` turns FSDP into DDP on a CPU without a word; here its preparation is called itself, and the result looked at.
    """

    def __init__(self, *args: Any, fsdp_config: Mapping[str, Any], memory_efficient_init: bool) -> None:
        super().__init__(*args)
        _check_keys('fsdp_config', fsdp_config, _FSDP_KEYS)
        options = dict(fsdp_config)
        self.sync_each_micro_batch = bool(options.pop('sync_each_micro_batch', False))
        self._options = options
        self._efficient = memory_efficient_init

    def load(self, load: Load, prepare: Callable[[Any], None]) -> tuple[Any, Path | None]:
        if self._efficient:
            return load_from_first(load, prepare, self._shard, self.device, self.groups)
        module, folder = super().load(load, prepare)
        self._shard(module)
        return module, folder

    def _shard(self, module: Any) -> None:
        from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        mesh = self.groups.mesh
        accelerator = _accelerator(self.groups)
        options = {'auto_wrap_policy': 'transformer_based_wrap', **self._options}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **options)
        state = accelerator.state
        before = (getattr(state, 'fsdp_plugin', None), state.parallelism_config, state.device_mesh)
        state.fsdp_plugin = plugin
        state.parallelism_config = ParallelismConfig(dp_replicate_size=mesh.dp_size, dp_shard_size=mesh.fsdp_size)
        names = ('dp_replicate', 'dp_shard_cp')  # as Accelerate calls them
        state.device_mesh = self.groups.torch_mesh((mesh.dp_size, mesh.fsdp_size), names)
        try:
            fsdp2_prepare_model(accelerator, module)
        finally:
            state.fsdp_plugin, state.parallelism_config, state.device_mesh = before
        whole = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
        if whole:
            raise NotSupportedError(
                f'Accelerate left {len(whole)} parameters whole ({", ".join(whole[:3])}), and fsdp_size={mesh.fsdp_size} asks for shards. '
                "Use strategy='native_fsdp'."
            )


def _accelerator(groups: Groups) -> Any:
    """Accelerate's view of the processes. Precision and accumulation are ours, so it is told of none."""
    from accelerate import Accelerator

    return Accelerator(cpu=groups.mesh.device_type == 'cpu' and not torch.cuda.is_available())


def _check_keys(name: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise ConfigError(f"{name} has no {unknown} with strategy='accelerate'; its keys are {', '.join(known)}.")
