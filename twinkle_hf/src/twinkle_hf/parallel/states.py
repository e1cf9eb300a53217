"""Training state whose tensors are sharded: each rank writes its parts, and reads the parts of whatever layout it has then.

The parts are safetensors files (PyTorch's distributed checkpoint in its Hugging Face layout), so that nothing is pickled; all else goes
to the file that one process writes, with a mark where a sharded tensor belongs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor

from twinkle import checkpoint as store
from twinkle.checkpoint.together import agree
from twinkle.errors import CheckpointError
from twinkle.launcher import rank
from twinkle_hf.parallel.weights import as_placed

if TYPE_CHECKING:
    from torch.nn import Parameter

__all__ = ['load_training_state', 'save_training_state']

_MARK = 'sharded tensor'


def save_training_state(folder: Path, stem: str, kept: dict[str, Any]) -> None:
    """Write a state, of which every rank holds its parts. Every rank takes part."""
    shards: dict[str, Tensor] = {}
    tree = {**kept, 'optimizer': _marked(kept['optimizer'], shards)} if 'optimizer' in kept else kept
    failure = None
    if rank() == 0:
        try:
            store.save_state(folder, stem, tree)
        except Exception as error:
            failure = error
    agree(failure, 'write the training state')
    if shards:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            writer = HuggingFaceStorageWriter(str(_shards_folder(folder, stem)), save_distributed=True)
            try:
                save_sharded(shards, storage_writer=writer)
            except CheckpointException as error:
                raise CheckpointError(
                    f'The parts of the training state cannot be written to {folder}: {error}'
                ) from error


def load_training_state(folder: Path, stem: str, named: Iterable[tuple[str, Parameter]]) -> dict[str, Any]:
    """Read a state that any layout wrote, its tensors laid out as the parameters are here. Every rank takes part.

    Raises:
        CheckpointError: parts are missing, or do not fit.
    """
    kept: dict[str, Any] = store.load_state(folder, stem)
    parameters = dict(named)
    optimizer = kept.get('optimizer')
    if optimizer is None:
        return kept
    wanted: dict[str, Tensor] = {}
    for name, key, value in _leaves(optimizer['state']):
        like = parameters.get(name)
        if isinstance(value, Mapping) and _MARK in value:
            wanted[value[_MARK]] = optimizer['state'][name][key] = _room(value, like)
        elif isinstance(value, Tensor) and isinstance(like, DTensor) and value.shape == like.shape:
            optimizer['state'][name][key] = as_placed(value, like.detach().to(value.dtype))
    if wanted:
        _read_shards(_shards_folder(folder, stem), wanted)
    return kept


def _marked(optimizer: Mapping[str, Any], shards: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, values in optimizer['state'].items():
        state[name] = dict(values)
        for key, value in values.items():
            if isinstance(value, DTensor):
                shards[f'{name}.{key}'] = value.detach()
                dtype = str(value.dtype).removeprefix('torch.')
                state[name][key] = {_MARK: f'{name}.{key}', 'dtype': dtype, 'shape': list(value.shape)}
    return {**optimizer, 'state': state}


def _leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for name, values in state.items():
        for key, value in list(values.items()):
            yield name, key, value


def _room(mark: Mapping[str, Any], like: Tensor | None) -> Tensor:
    """An empty tensor for a marked one, laid out like its parameter."""
    dtype = getattr(torch, mark['dtype'])
    if isinstance(like, DTensor) and list(like.shape) == mark['shape']:
        return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(mark['shape'], dtype=dtype)


def _read_shards(folder: Path, wanted: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not any(folder.glob('*.safetensors')):
        raise CheckpointError(f'{folder} holds no parts of the training state: the checkpoint is incomplete.')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # that one process alone is meant
            load_sharded(wanted, storage_reader=HuggingFaceStorageReader(str(folder)))
    except (Exception, CheckpointException) as error:  # the second is no Exception
        raise CheckpointError(f'{folder}: the parts of the training state cannot be read: {error}') from error


def _shards_folder(folder: Path, stem: str) -> Path:
    return folder / f'{stem}_shards'
