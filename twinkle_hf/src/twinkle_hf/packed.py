"""Rows that hold several samples: how a module is kept from letting them see each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from twinkle.errors import NotSupportedError
from twinkle_hf.pooling import is_causal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from twinkle.data_format import ModelOutput

__all__ = ['check_attention', 'check_can_pack', 'flatten_rows', 'is_packed', 'takes_one_row', 'unflatten_rows']


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether positions start again within a row: it holds several samples, which must not see each other."""
    positions, mask = batch.get('position_ids'), batch.get('attention_mask')
    if positions is None or mask is None or positions.ndim != 2 or positions.shape != mask.shape:
        return False
    return bool(((positions[:, 1:] == 0) & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)).any())


def check_can_pack(module: nn.Module) -> None:
    """Raise for modules whose samples would see each other whatever their positions say.

    Raises:
        NotSupportedError: layers that carry a state from token to token, or attention in both directions.
    """
    config: Any = module.config
    kinds = set(getattr(config.get_text_config(), 'layer_types', None) or ())
    stateful = sorted(kind for kind in kinds if 'linear' in kind or 'mamba' in kind or 'recurrent' in kind)
    if stateful:
        raise NotSupportedError(
            f'{type(module).__name__} has layers of type {", ".join(stateful)}, which would carry their state across packed samples. '
            'Use a Dataset without packing, and a processor without padding_free, so that each row is one sample.'
        )
    if not is_causal(module):
        raise NotSupportedError(
            f'{type(module).__name__} attends in both directions, and Transformers keeps packed samples apart in causal models only. '
            'Use a Dataset without packing, and a processor without padding_free, so that each row is one sample.'
        )


def check_attention(module: nn.Module, device_type: str) -> None:
    """Refuse to train with an attention that has no backward pass here.

    Raises:
        NotSupportedError: flex attention on a CPU.
    """
    if device_type == 'cpu' and attention_of(module) == 'flex_attention':
        raise NotSupportedError(
            'flex_attention has no backward pass on a CPU in PyTorch; forward_only() works. Train with attn_implementation="sdpa".'
        )


def attention_of(module: nn.Module) -> str:
    """The name of the attention implementation that the module uses."""
    return str(getattr(module.config, '_attn_implementation', '') or '')


def takes_one_row(module: nn.Module) -> bool:
    """Whether the attention knows packed samples in a batch of one row only: flash attention's kernels of variable length."""
    return 'flash' in attention_of(module)


def flatten_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    """[B, T] as one row [1, B*T]; a padded place, whose position is 0, becomes a sample of its own."""
    shape = batch['position_ids'].shape
    flat = dict(batch)
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            flat[key] = value.reshape(1, -1, *value.shape[2:])
    # Padded places behind a row would else go on counting in the next one's samples.
    flat['position_ids'] = (batch['position_ids'] * (batch['attention_mask'] != 0)).reshape(1, -1)
    return flat


def unflatten_rows(outputs: ModelOutput, batch: Mapping[str, Any]) -> ModelOutput:
    """What a forward pass gave for `flatten_rows(batch)`, by row again."""
    shape = batch['position_ids'].shape
    tokens = shape[0] * shape[1]
    return {  # type: ignore[return-value]
        key: value.reshape(*shape, *value.shape[2:])
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == (1, tokens)
        else value
        for key, value in outputs.items()
    }
