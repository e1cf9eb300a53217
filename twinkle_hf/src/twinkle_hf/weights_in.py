"""Weights of a model folder into a module that exists, whole or sharded."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from twinkle.errors import CheckpointError
from twinkle_hf.parallel.weights import copy_into, plain_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

__all__ = ['load_weights']


def load_weights(module: Any, module_class: Any, folder: Path) -> None:
    """Copy the weights of `folder` into `module`. Keys and shapes are checked before anything is changed.

    Raises:
        CheckpointError: no safetensors there, or weights of another model.
    """
    weights = _read_safetensors(folder)
    here = module.state_dict()
    if not weights.keys() & here.keys() or weights.keys() - here.keys():
        # Some models (with fused experts) are saved under other names than they have: Transformers knows how to read them.
        weights = _read_by_transformers(module, module_class, folder)
    _check_keys(module, weights, folder)
    copy_into(module, weights.__getitem__, set(weights))
    module.tie_weights()


def _read_safetensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a model folder, sharded or not."""
    files = sorted(folder.glob('model*.safetensors'))
    if not files:
        raise CheckpointError(
            f'{folder} holds no model.safetensors (nor shards of one). Pickled weights are never loaded.'
        )
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(load_file(str(file), device='cpu'))
    return weights


def _read_by_transformers(module: Any, module_class: Any, folder: Path) -> dict[str, Tensor]:
    config = plain_config(copy.deepcopy(module.config))
    try:
        found, info = module_class.from_pretrained(
            folder, config=config, dtype=module.dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f'{folder} does not fit {module_class.__name__}: {error}') from error
    missing, unexpected = sorted(info['missing_keys']), sorted(info['unexpected_keys'])
    if missing or unexpected:
        raise CheckpointError(
            f'{folder} does not fit {module_class.__name__}: missing {missing[:3] or "none"}, unexpected {unexpected[:3] or "none"} '
            '(the first three of each).'
        )
    return dict(found.state_dict())


def _check_keys(module: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Every parameter has its weights (or is tied to one that has), and every weight its parameter."""
    here = module.state_dict(keep_vars=True)
    tied: dict[int, set[str]] = {}
    for key, value in here.items():
        tied.setdefault(id(value), set()).add(key)
    missing = [key for key, value in here.items() if key not in weights and not tied[id(value)] & weights.keys()]
    unexpected = [key for key in weights if key not in here]
    wrong = [key for key, value in weights.items() if key in here and here[key].shape != value.shape]
    if missing or unexpected or wrong:
        raise CheckpointError(
            f'{folder} does not fit {type(module).__name__}: missing {missing[:3] or "none"}, unexpected {unexpected[:3] or "none"}, '
            f'other shapes {wrong[:3] or "none"} (the first three of each).'
        )
