"""What `mixed_precision` means: the dtype of parameters, the autocast around forward, the loss scaler."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from twinkle.errors import ConfigError
from twinkle.logging import get_logger
from twinkle_hf.fp8 import check_fp8

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

__all__ = ['Precision', 'has_bf16']

logger = get_logger('twinkle_hf')

# What is not computed in fp8 under fp8 is in bf16, as Accelerate does it.
_AUTOCAST = {'no': None, 'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp8': torch.bfloat16}


def has_bf16(device_type: str) -> bool:
    """Whether this machine's processor computes in bfloat16, rather than emulating it many times slower."""
    if device_type == 'cuda':
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type == 'cpu':
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, 'get_capabilities') else {}
        return any(capabilities.get(unit) for unit in ('avx512_bf16', 'amx_bf16', 'bf16', 'sve_bf16'))
    return True


@dataclass(frozen=True)
class Precision:
    """One precision on one device type. Parameters stay in fp32 under `bf16`, `fp16` and `fp8` unless a dtype was asked for.

    Attributes:
        name: `no` (fp32), `bf16`, `fp16` or `fp8`.
        device_type: `cpu`, `cuda`, ...
        parameter_dtype: what the weights are loaded as.
        scaler_options: keywords of `torch.amp.GradScaler`, fp16 only.
    """

    name: str
    device_type: str
    parameter_dtype: torch.dtype
    scaler_options: Mapping[str, Any]

    @classmethod
    def choose(
        cls,
        mixed_precision: str | None,
        device_type: str,
        dtype: torch.dtype | str | None = None,
        scaler_options: Mapping[str, Any] | None = None,
    ) -> Precision:
        """Check what was asked for and fill in what was not.

        Raises:
            ConfigError: an unknown name, or a dtype that contradicts it.
            NotSupportedError: a precision that this device does not have.
        """
        if mixed_precision is None:
            mixed_precision = 'bf16' if has_bf16(device_type) else 'no'
            if mixed_precision == 'no':
                logger.info(
                    'This %s has no bf16 units: mixed_precision is "no" (fp32). Ask for "bf16" to emulate it.',
                    device_type,
                )
        if mixed_precision == 'fp8':
            check_fp8(device_type)
        if mixed_precision not in _AUTOCAST:
            raise ConfigError(f"mixed_precision={mixed_precision!r} must be one of 'no', 'bf16', 'fp16', 'fp8'.")
        parameter_dtype = _dtype(dtype)
        if mixed_precision == 'no' and parameter_dtype is not torch.float32 and dtype is not None:
            raise ConfigError(
                f"mixed_precision='no' is fp32, and dtype={dtype!r} was asked for. Use mixed_precision='bf16' with "
                'dtype=torch.bfloat16 for parameters in bf16.'
            )
        if mixed_precision == 'fp16' and parameter_dtype is torch.float16:
            raise ConfigError(
                "mixed_precision='fp16' needs parameters in fp32: gradients of fp16 parameters cannot be unscaled. Leave dtype out."
            )
        if scaler_options and mixed_precision != 'fp16':
            raise ConfigError(f"grad_scaler_config is for mixed_precision='fp16'; it is {mixed_precision!r} here.")
        return cls(mixed_precision, device_type, parameter_dtype, dict(scaler_options or {}))

    def autocast(self) -> AbstractContextManager[Any]:
        """The context that forward runs in."""
        dtype = _AUTOCAST[self.name]
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device_type, dtype=dtype)

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """A loss scaler of its own for each adapter under fp16; nothing otherwise."""
        if self.name != 'fp16':
            return None
        try:
            return torch.amp.GradScaler(self.device_type, **self.scaler_options)
        except TypeError as error:
            raise ConfigError(
                f'grad_scaler_config={dict(self.scaler_options)!r}: {error}. Its keys are those of torch.amp.GradScaler: init_scale, '
                'growth_factor, backoff_factor, growth_interval, enabled.'
            ) from error

    def __str__(self) -> str:
        name = 'fp32' if self.name == 'no' else f'{self.name} autocast'
        return f'{name}, parameters in {str(self.parameter_dtype).removeprefix("torch.")}'


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    if dtype is None:
        return torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix('torch.'), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} is no torch dtype; use torch.bfloat16 or 'bfloat16', say.")
    return found
