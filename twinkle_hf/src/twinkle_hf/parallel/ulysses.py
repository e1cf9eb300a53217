"""Ulysses: sequences split over ranks everywhere but in attention, which sees whole sequences of a part of the heads.

Before attention, an all-to-all trades parts of sequences for parts of heads, and after it back. Everything else (rotary positions,
normalisation, MLPs, the head) works token by token, on the rank's own part. What the loss needs is brought together again, so that
losses and metrics see whole sequences; each rank then computes the same loss, and its backward is of its own part.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import MeshError, NotSupportedError
from twinkle_hf.packed import attention_of
from twinkle_hf.pooling import is_causal

if TYPE_CHECKING:
    from torch import nn

    from twinkle.data_format import ModelOutput
    from twinkle_hf.parallel.groups import Groups

__all__ = ['SequenceSplit']

_PREFIX = 'twinkle_ulysses_'
_WHOLE = 'twinkle_whole_sequences'
_IMPLEMENTATIONS = ('eager', 'sdpa', 'flash_attention_2', 'flash_attention_3')
# Transformers renamed the argument; it has no default.
_CACHE = 'cache' if 'cache' in inspect.signature(create_causal_mask).parameters else 'past_key_values'
_FILL = {'labels': IGNORE_INDEX}
_IMAGES = ('pixel_values', 'pixel_values_videos', 'input_features')


@dataclass(frozen=True)
class Whole:
    """What attention must know of whole sequences. It goes along with the call, so that a recomputed forward has its own."""

    mask: Any
    sliding_mask: Any
    position_ids: Tensor
    attention_mask: Tensor | None
    shape: torch.Size

    @property
    def keywords(self) -> dict[str, Any]:
        """For the module's forward, which hands what it does not know to attention."""
        return {_WHOLE: self}


class SequenceSplit:
    """Splits one module's sequences over the ranks of a group.

    Raises:
        MeshError: attention heads that do not go into equal parts.
        NotSupportedError: attention of a kind that this is not for.
    """

    def __init__(self, module: Any, groups: Groups) -> None:
        self.group, self.size, self.index = groups.sequence, groups.sequence_size, groups.sequence_rank
        config = module.config.get_text_config()
        heads = int(config.num_attention_heads)
        if heads % self.size:
            raise MeshError(
                f'ulysses_size={self.size} must divide the {heads} attention heads of {type(module).__name__}: each rank attends with an '
                'equal part of them. MegatronModel splits sequences for any number of heads (cp_size).'
            )
        self._inner = attention_of(module)
        kinds = set(getattr(config, 'layer_types', None) or ['full_attention']) - {
            'full_attention',
            'sliding_attention',
        }
        if kinds or not is_causal(module) or self._inner not in _IMPLEMENTATIONS:
            told = ', '.join(sorted(kinds)) or (self._inner if is_causal(module) else 'attention in both directions')
            raise NotSupportedError(
                f'{type(module).__name__} has {told}: ulysses_size is for causal attention, full or sliding, by '
                f'{", ".join(_IMPLEMENTATIONS)}.'
            )
        self._config = copy.copy(config)
        self._config._attn_implementation = self._inner
        module.set_attn_implementation(_PREFIX + self._inner)
        for part in module.modules():
            if isinstance(getattr(part, 'is_causal', None), bool):
                part._twinkle_sequence = self

    def __deepcopy__(self, memo: Any) -> SequenceSplit:
        return self  # of the process, like its group

    def part_of(self, batch: Mapping[str, Any], *, packed: bool, dtype: torch.dtype) -> tuple[dict[str, Any], Whole]:
        """This rank's part of a batch, and what attention is to know of the whole one.

        Raises:
            NotSupportedError: images and their like, which belong to places in the sequence.
        """
        if any(batch.get(key) is not None for key in _IMAGES):
            raise NotSupportedError(
                'ulysses_size with images, videos or sounds is not possible: train such models without it.'
            )
        whole = self._padded(batch)
        ids = whole['input_ids']
        like = torch.empty(*ids.shape, 0, dtype=dtype, device=ids.device)
        arguments: dict[str, Any] = {
            'config': self._config, 'inputs_embeds': like, _CACHE: None, 'position_ids': whole['position_ids'],
            'attention_mask': None if packed else whole['attention_mask'],
        }  # fmt: skip
        mask = create_causal_mask(**arguments)
        sliding = (
            create_sliding_window_causal_mask(**arguments) if getattr(self._config, 'sliding_window', None) else None
        )
        length = ids.shape[1] // self.size
        mine = slice(self.index * length, (self.index + 1) * length)
        part = {key: value[:, mine] if _is_per_token(value, ids.shape) else value for key, value in whole.items()}
        return part, Whole(
            mask, sliding, whole['position_ids'], None if packed else batch['attention_mask'], batch['input_ids'].shape
        )

    def gather(self, outputs: ModelOutput, length: int) -> ModelOutput:
        """Whole sequences of what was computed by token, and the sum of what was summed over tokens."""
        found: dict[str, Any] = {}
        for key, value in outputs.items():
            if key in ('logits', 'logps', 'entropies', 'values', 'hidden_states'):
                found[key] = _Gather.apply(value, self.group, self.size, self.index)[:, :length]
            elif key == 'nll':
                found[key] = _Sum.apply(value, self.group)
            else:
                found[key] = value
        return found  # type: ignore[return-value]

    def aux_loss(self, module: nn.Module, output: Any, whole: Whole) -> Tensor | None:
        """The routers' loss over whole sequences: it is no sum over tokens, so it is computed again, from all ranks' routers."""
        logits = getattr(output, 'router_logits', None)
        function = _of_models_file(module, 'load_balancing_loss_func')
        if not logits or getattr(output, 'aux_loss', None) is None or function is None:
            return getattr(output, 'aux_loss', None)
        rows, length = whole.shape
        together = tuple(
            _Gather.apply(layer.view(rows, -1, layer.shape[-1]), self.group, self.size, self.index)[:, :length].flatten(
                0, 1
            )
            for layer in logits
        )
        config: Any = self._config
        experts = getattr(config, 'num_experts', None) or config.num_local_experts
        loss: Tensor = function(together, experts, config.num_experts_per_tok, whole.attention_mask)
        return loss

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
        """Attention of whole sequences with this rank's heads. query [B, heads, T / size, D]; returns [B, T / size, heads, D]."""
        whole: Whole | None = options.pop(_WHOLE, None)
        inner = _inner(module, self._inner)
        if whole is None:  # a call of the module itself, with whole sequences
            return inner(module, query, key, value, None, **options)
        key, value, groups = self._divisible(key, value, query.shape[1])
        query, key, value = (_Exchange.apply(x, self.group, self.size, 1, 2) for x in (query, key, value))
        if 'position_ids' in options:
            options['position_ids'] = whole.position_ids
        mask = whole.sliding_mask if options.get('sliding_window') else whole.mask
        with _attribute(module, 'num_key_value_groups', groups):
            output, _ = inner(module, query, key, value, mask, **options)
        return _Exchange.apply(output, self.group, self.size, 1, 2), None

    def _divisible(self, key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor, int]:
        """Keys and values in a number of heads that the ranks divide: repeated as often as needed."""
        have = key.shape[1]
        times = next(n for n in range(1, heads // have + 1) if have * n % self.size == 0 and heads % (have * n) == 0)
        if times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        return key, value, heads // (have * times)

    def _padded(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        shape = batch['input_ids'].shape
        extra = -shape[1] % self.size
        if not extra:
            return dict(batch)
        return {
            key: torch.cat([value, value.new_full((shape[0], extra, *value.shape[2:]), _FILL.get(key, 0))], 1)
            if _is_per_token(value, shape)
            else value
            for key, value in batch.items()
        }


@contextmanager
def _attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute that a module has is another one for a while."""
    before = getattr(module, name, None)
    if before is not None:
        setattr(module, name, value)
    try:
        yield
    finally:
        if before is not None:
            setattr(module, name, before)


def _is_per_token(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _inner(module: nn.Module, name: str) -> Any:
    """The attention function that is asked for; the eager one is of the model's own file."""
    if name == 'eager':
        return _of_models_file(module, 'eager_attention_forward')
    return AttentionInterface()[name]


def _of_models_file(module: nn.Module, name: str) -> Any:
    """What the file of the model's class holds under a name, also where FSDP2 put a class of its own in its place."""
    files = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return next((getattr(file, name) for file in files if file is not None and hasattr(file, name)), None)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    return module._twinkle_sequence.attend(module, query, key, value, options)


for _name in _IMPLEMENTATIONS:
    AttentionInterface.register(_PREFIX + _name, _attention)
    AttentionMaskInterface.register(_PREFIX + _name, lambda *args, **kwargs: None)  # attention has the whole one


class _Exchange(torch.autograd.Function):
    """All-to-all: split along one dimension, joined along the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, size: int, scatter: int, gather: int) -> Tensor:
        ctx.arguments = group, size, gather, scatter
        return _all_to_all(x, group, size, scatter, gather)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # type: ignore[override]
        return _all_to_all(d_out, *ctx.arguments), None, None, None, None


def _all_to_all(x: Tensor, group: Any, size: int, scatter: int, gather: int) -> Tensor:
    parts = torch.stack([part.contiguous() for part in x.chunk(size, scatter)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(list(received), gather)


class _Gather(torch.autograd.Function):
    """Parts of sequences [B, T / size, ...] to whole ones. Every rank computes the same of them, so each takes back its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, size: int, index: int) -> Tensor:
        ctx.length, ctx.index = part.shape[1], index
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> Any:  # type: ignore[override]
        return d_whole[:, ctx.index * ctx.length : (ctx.index + 1) * ctx.length], None, None, None


class _Sum(torch.autograd.Function):
    """A sum over ranks that every rank uses alike."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, group: Any) -> Tensor:
        total = term.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> Any:  # type: ignore[override]
        return d_total, None
