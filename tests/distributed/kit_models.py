"""`TransformersModel` in the layouts of two ranks, as the conformance kit makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from twinkle import DeviceMesh
from twinkle.launcher import world_size
from twinkle.model import TransformersModel
from twinkle.testing.tiny_llama import write_tiny_llama

__all__ = ['AcceleratedData', 'AcceleratedShards', 'NativeData', 'NativeShards', 'Sequences', 'Tensors']


class _Spread(TransformersModel):
    sizes: ClassVar[tuple[str, ...]] = ('dp_size',)
    strategy_name: ClassVar[str] = 'accelerate'

    @classmethod
    def conformance_model(cls, folder: Path) -> Any:
        mesh = DeviceMesh.from_sizes(**dict.fromkeys(cls.sizes, world_size()), device_type='cpu')
        source = write_tiny_llama(folder)
        return cls(str(source), mixed_precision='no', device_mesh=mesh, strategy=cls.strategy_name)


class AcceleratedData(_Spread):
    """DistributedDataParallel by Accelerate."""


class NativeData(_Spread):
    """Whole weights, gradients summed at the boundary."""

    strategy_name = 'native_fsdp'


class AcceleratedShards(_Spread):
    """FSDP2 by Accelerate."""

    sizes = ('fsdp_size',)


class NativeShards(_Spread):
    """FSDP2 by PyTorch."""

    sizes = ('fsdp_size',)
    strategy_name = 'native_fsdp'


class Sequences(_Spread):
    """Ulysses."""

    sizes = ('fsdp_size', 'ulysses_size')
    strategy_name = 'native_fsdp'


class Tensors(_Spread):
    """Tensor parallelism by Transformers."""

    sizes = ('tp_size',)
    strategy_name = 'native_fsdp'
