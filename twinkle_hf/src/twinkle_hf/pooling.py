"""One embedding per sample out of one hidden state per token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from twinkle.errors import ConfigError
from twinkle.loss.sequences import sample_starts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

__all__ = ['POOLINGS', 'Pooling']

POOLINGS = ('mean', 'cls', 'last')

# The file in which Sentence Transformers models say how they pool, and its keys.
_FILE = '1_Pooling/config.json'
_KEYS = {'pooling_mode_mean_tokens': 'mean', 'pooling_mode_cls_token': 'cls', 'pooling_mode_lasttoken': 'last'}


@dataclass(frozen=True)
class Pooling:
    """How hidden states become an embedding: their `mean` over a sample's tokens, the first (`cls`), or the `last`."""

    how: str

    @classmethod
    def choose(cls, given: str | None, folder: Path | None, module: nn.Module) -> Pooling:
        """What was asked for, else what the model's folder says, else `last` for causal models and `mean` for others.

        Raises:
            ConfigError: an unknown way of pooling.
        """
        if given is None:
            given = _of_folder(folder) or ('last' if is_causal(module) else 'mean')
        if given not in POOLINGS:
            raise ConfigError(f'pooling={given!r} must be one of {", ".join(map(repr, POOLINGS))}.')
        return cls(given)

    def __call__(self, hidden_BTH: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Embeddings [S, H] of the S samples of a batch, padded or packed, in fp32."""
        shape = hidden_BTH.shape[:2]
        real, starts = sample_starts(batch, shape)
        hidden_NH, real_N, starts_N = hidden_BTH.flatten(0, 1).float(), real.flatten(), starts.flatten()
        if self.how == 'cls':
            return hidden_NH[starts_N]
        count = int(starts_N.sum())
        index_N = (starts_N.cumsum(0) - 1)[real_N]
        if self.how == 'last':
            places = real_N.nonzero().squeeze(1)
            last = places.new_zeros(count).scatter_reduce(0, index_N, places, 'amax', include_self=False)
            return hidden_NH[last]
        sums = hidden_NH.new_zeros(count, hidden_NH.shape[1]).index_add(0, index_N, hidden_NH[real_N])
        lengths = torch.bincount(index_N, minlength=count).to(hidden_NH.dtype)
        return sums / lengths.unsqueeze(1)


def is_causal(module: nn.Module) -> bool:
    """Whether each token sees only what comes before it. Attention layers of Transformers say so of themselves."""
    said = [part.is_causal for part in module.modules() if isinstance(getattr(part, 'is_causal', None), bool)]
    return all(said)


def _of_folder(folder: Path | None) -> str | None:
    if folder is None or not (folder / _FILE).is_file():
        return None
    try:
        options = json.loads((folder / _FILE).read_text(encoding='utf-8'))
    except ValueError as error:
        raise ConfigError(f'{folder / _FILE} is no JSON: {error}. Mend it, or pass pooling=... .') from error
    chosen = [how for key, how in _KEYS.items() if options.get(key)]
    if len(chosen) != 1:
        raise ConfigError(
            f'{folder / _FILE} asks for a pooling that is not known here; pass pooling=... ({", ".join(POOLINGS)}).'
        )
    return chosen[0]
