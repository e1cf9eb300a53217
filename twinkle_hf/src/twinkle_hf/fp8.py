"""fp8 training by Accelerate's Transformer Engine recipe: the check of what it needs, and the conversion.

It needs a GPU of compute capability 8.9 or later and Transformer Engine. What is here was run against a stand-in for that library
only (see the tests), not on such a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from twinkle.errors import ConfigError, DataError, NotSupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ['check_fp8', 'check_fp8_shape', 'convert_to_fp8']


def check_fp8(device_type: str) -> None:
    """Say what is missing for fp8.

    Raises:
        NotSupportedError: no GPU that has it, or no Transformer Engine.
    """
    if device_type != 'cuda' or not torch.cuda.is_available():
        raise NotSupportedError(
            f"mixed_precision='fp8' needs an NVIDIA GPU of compute capability 8.9 or later; this is {device_type!r}."
        )
    if torch.cuda.get_device_capability() < (8, 9):
        raise NotSupportedError(
            f"mixed_precision='fp8' needs compute capability 8.9 or later; {torch.cuda.get_device_name()} has "
            f'{".".join(map(str, torch.cuda.get_device_capability()))}.'
        )
    if find_spec('transformer_engine') is None:
        raise NotSupportedError(
            "mixed_precision='fp8' needs Transformer Engine: pip install --no-build-isolation transformer-engine[pytorch]"
        )


def convert_to_fp8(module: Any, options: Mapping[str, Any]) -> None:
    """Put Transformer Engine's layers in place of linear ones and layer norms, and run forward under its autocast in training.

    The output head keeps its precision: log-probabilities are computed from it in fp32.

    Args:
        options: of `accelerate.utils.TERecipeKwargs`: `fp8_format`, `amax_history_len`, `amax_compute_algo`, `margin`, ...

    Raises:
        ConfigError: an option that the recipe does not have.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TERecipeKwargs, convert_model
    from accelerate.utils.transformer_engine import apply_fp8_autowrap

    try:
        recipe = TERecipeKwargs(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'fp8_config={dict(options)!r}: {error}. Its keys are those of accelerate.utils.TERecipeKwargs.'
        ) from error
    head = module.get_output_embeddings() if hasattr(module, 'get_output_embeddings') else None
    if '_mixed_precision' not in AcceleratorState._shared_state:
        Accelerator(cpu=not torch.cuda.is_available())  # the conversion asks it whether parameters are sharded
    with torch.no_grad():
        convert_model(module)
    if head is not None:
        module.set_output_embeddings(head)
    apply_fp8_autowrap(module, recipe)


def check_fp8_shape(input_ids: Tensor | None, module: nn.Module) -> None:
    """Raise for a batch that fp8 matrix products do not take, before they fail with the name of a kernel.

    Raises:
        DataError: a number of tokens, padding included, that 8 does not divide.
    """
    if module.training and input_ids is not None and input_ids.numel() % 8:
        raise DataError(
            f'fp8 needs a multiple of 8 tokens per batch, padding included, and this one has {tuple(input_ids.shape)}: call '
            "set_processor('default', pad_to_multiple_of=8)."
        )
