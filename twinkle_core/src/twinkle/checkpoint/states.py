"""Nested training state (of optimizers, schedulers, scalers, random generators) in two files that hold no code.

Tensors go to `<stem>.safetensors` under running numbers, all else to `<stem>.json` as a tree whose objects are tagged,
so that Python's types come back exactly:

    null, true, 1, 1.5, "a", [..]      themselves (floats by their shortest exact representation)
    {"float": "nan" | "inf" | "-inf"}, {"int": "0x.."}                what JSON has no number for
    {"tuple": [..]}, {"dict": {..}}, {"items": [[key, value], ..]}    dicts with string keys, and with others
    {"counter": [[..]]}, {"ordered": [[..]]}                          collections.Counter and OrderedDict
    {"tensor": "0"}, {"tensor": "0", "dtype": .., "shape": [..]}      the second for dtypes that safetensors lacks, as
    bytes
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from twinkle.errors import CheckpointError

__all__ = ['StateSnapshot', 'load_state', 'save_state', 'snapshot_state']

_VERSION = 1
_NATIVE = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    }
)  # fmt: skip
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_EXACT_INT = 1 << 63  # larger ones are written in hexadecimal, which no reader rounds and no limit on digits refuses
_AS_BYTES = frozenset(
    {'complex32', 'complex64', 'complex128', 'uint16', 'uint32', 'uint64'}
    | {'float8_e4m3fnuz', 'float8_e5m2fnuz', 'float8_e8m0fnu'}
)


def save_state(folder: str | Path, stem: str, state: Any) -> None:
    """Write `state` to `folder/<stem>.safetensors` and `folder/<stem>.json`.

    A state is made of None, bool, int, float, str, list, tuple, dict, OrderedDict, Counter and tensors of any dtype and
    layout in memory. Tensors come back contiguous, on the CPU, without gradients; numpy's scalars as Python's.

    Raises:
        CheckpointError: it holds something else (the place in the state and the type are named), or a file cannot be
            written.
    """
    _Encoder(copy=False).encode(state).save(folder, stem)


def snapshot_state(state: Any) -> StateSnapshot:
    """A copy of `state` on the CPU that later steps do not change, for `save_async`. Raises as `save_state` does."""
    return _Encoder(copy=True).encode(state)


@dataclass(frozen=True)
class StateSnapshot:
    """An encoded state: the text of its tree, and its tensors by number."""

    tree: str
    tensors: dict[str, Tensor]

    def save(self, folder: str | Path, stem: str) -> None:
        """Write the two files."""
        json_path, tensors_path = _paths(folder, stem)
        text = self.tree.encode()
        metadata = {'format': 'twinkle-state', 'tree_sha256': hashlib.sha256(text).hexdigest()}
        try:
            save_file(self.tensors, str(tensors_path), metadata=metadata)
            json_path.write_bytes(text)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f'The state {stem!r} cannot be written to {folder}: {error}') from error


def load_state(folder: str | Path, stem: str) -> Any:
    """What `save_state` wrote, tensors on the CPU. Nothing is unpickled.

    Raises:
        CheckpointError: a file is missing, broken, not of this format, or the two do not belong together.
    """
    json_path, tensors_path = _paths(folder, stem)
    for path in (json_path, tensors_path):
        if not path.is_file():
            raise CheckpointError(f'{path.name} is missing in {folder}: the checkpoint holds no state {stem!r}.')
    text = json_path.read_bytes()
    try:
        document = json.loads(text)
        version = document['format_version']
        node = document['state']
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f'{json_path} is not a state of Twinkle: {error!r}. It is broken, or another tool wrote it.'
        ) from error
    if version != _VERSION:
        raise CheckpointError(
            f'{json_path} has format_version {version!r}; this Twinkle reads {_VERSION}. Upgrade twinkle-core.'
        )
    tensors = _read_tensors(tensors_path, hashlib.sha256(text).hexdigest(), json_path.name)
    decoder = _Decoder(tensors)
    try:
        state = decoder.decode(node)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f'{json_path} is broken: {error!r}.') from error
    unused = tensors.keys() - decoder.used
    if unused:
        raise CheckpointError(
            f'{tensors_path} holds {len(unused)} tensors that {json_path.name} does not mention: broken.'
        )
    return state


def _paths(folder: str | Path, stem: str) -> tuple[Path, Path]:
    return Path(folder, f'{stem}.json'), Path(folder, f'{stem}.safetensors')


def _read_tensors(path: Path, tree_sha256: str, tree_name: str) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework='pt', device='cpu') as file:
            if (file.metadata() or {}).get('tree_sha256') != tree_sha256:
                raise CheckpointError(
                    f'{path} and {tree_name} do not belong together: one was changed, or is of another save.'
                )
            # clone: what safetensors gives is backed by the file, which may be replaced while training goes on
            return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f'{path} is not a safetensors file, or is truncated: {error}. Nothing else is read in its place; pickles '
            'never are.'
        ) from error


class _Encoder:
    def __init__(self, *, copy: bool) -> None:
        self._copy = copy
        self._tensors: dict[str, Tensor] = {}
        self._keys: dict[int, dict[str, Any]] = {}
        self._kept: list[Any] = []  # an id stays taken only while its object lives
        self._storages: set[int] = set()
        self._open: set[int] = set()

    def encode(self, state: Any) -> StateSnapshot:
        try:
            node = self._node(state, 'state')
            tree = json.dumps({'format_version': _VERSION, 'state': node}, allow_nan=False, separators=(',', ':'))
        except RecursionError as error:
            raise CheckpointError('The state is nested too deeply to be saved.') from error
        return StateSnapshot(tree, self._tensors)

    def _node(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_EXACT_INT <= value < _EXACT_INT else {'int': hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {'float': repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if kind.__module__ == 'numpy' and hasattr(value, 'item') and getattr(value, 'shape', None) == ():
            number = value.item()
            if type(number) in (bool, int, float, str):
                return self._node(number, where)
        if kind in (list, tuple, torch.Size, dict, OrderedDict, Counter):
            return self._container(value, where)
        raise CheckpointError(
            f'{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickling. A state is '
            'made of tensors, numbers, strings, None, lists, tuples and dicts; a part with other things needs a '
            'state_dict() that turns them into these.'
        )

    def _container(self, value: Any, where: str) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f'{where} contains itself; such a state cannot be saved.')
        self._open.add(id(value))
        try:
            if isinstance(value, (list, tuple)):
                nodes = [self._node(item, f'{where}[{index}]') for index, item in enumerate(value)]
                return nodes if isinstance(value, list) else {'tuple': nodes}
            if type(value) is dict and all(type(key) is str for key in value):
                return {'dict': {key: self._node(item, f'{where}[{key!r}]') for key, item in value.items()}}
            tag = 'counter' if isinstance(value, Counter) else 'ordered' if isinstance(value, OrderedDict) else 'items'
            return {
                tag: [[self._key(key, where), self._node(item, f'{where}[{key!r}]')] for key, item in value.items()]
            }
        finally:
            self._open.discard(id(value))

    def _key(self, key: Any, where: str) -> Any:
        if isinstance(key, Tensor):
            raise CheckpointError(f'A key of {where} is a tensor; keys are numbers, strings, None and tuples of them.')
        return self._node(key, f'the key {key!r} of {where}')

    def _tensor(self, tensor: Tensor, where: str) -> Any:
        known = self._keys.get(id(tensor))
        if known is not None:
            return known
        if (
            type(tensor) not in _PLAIN_TENSORS
            or tensor.layout != torch.strided
            or tensor.is_quantized
            or tensor.is_meta
        ):
            raise CheckpointError(
                f'{where} is a {type(tensor).__module__}.{type(tensor).__qualname__} (dtype {tensor.dtype}, layout '
                f'{tensor.layout}, device {tensor.device}); only plain, dense tensors with data are saved here. '
                'Sharded ones go to a distributed checkpoint.'
            )
        dtype = str(tensor.dtype).removeprefix('torch.')
        if tensor.dtype not in _NATIVE and dtype not in _AS_BYTES:
            raise CheckpointError(f'{where} is a tensor of dtype {dtype}, which cannot be saved.')
        key = str(len(self._tensors))
        node: dict[str, Any] = {'tensor': key}
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.dtype not in _NATIVE:
            node |= {'dtype': dtype, 'shape': list(tensor.shape)}
            plain = plain.reshape(-1).view(torch.uint8)
        self._tensors[key] = self._own(plain)
        self._keys[id(tensor)] = node
        self._kept.append(tensor)
        return node

    def _own(self, tensor: Tensor) -> Tensor:
        """The tensor with a storage of its own, as safetensors wants it; copied if it was asked for."""
        storage = tensor.untyped_storage().data_ptr()
        if self._copy or storage in self._storages:
            return tensor.to('cpu', copy=True)
        self._storages.add(storage)
        return tensor


class _Decoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._views: dict[str, Tensor] = {}
        self.used: set[str] = set()

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), None)
        if tag == 'tensor':
            return self._tensor(node)
        if len(node) != 1 or tag not in _DECODERS:
            raise ValueError(f'unknown kind of value {sorted(node)}')
        return _DECODERS[tag](self, node[tag])

    def pairs(self, items: Any) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in items]

    def _tensor(self, node: dict[str, Any]) -> Tensor:
        key = node['tensor']
        self.used.add(key)
        if 'dtype' not in node:
            return self._tensors[key]
        if key not in self._views:
            if node['dtype'] not in _AS_BYTES:
                raise ValueError(f'unknown dtype {node["dtype"]!r}')
            self._views[key] = self._tensors[key].view(getattr(torch, node['dtype'])).reshape(node['shape'])
        return self._views[key]


_DECODERS: dict[str, Any] = {
    'int': lambda decoder, text: int(text, 16),
    'float': lambda decoder, text: {'nan': math.nan, 'inf': math.inf, '-inf': -math.inf}[text],
    'tuple': lambda decoder, items: tuple(decoder.decode(items)),
    'dict': lambda decoder, items: {key: decoder.decode(value) for key, value in items.items()},
    'items': lambda decoder, items: dict(decoder.pairs(items)),
    'ordered': lambda decoder, items: OrderedDict(decoder.pairs(items)),
    'counter': lambda decoder, items: Counter(dict(decoder.pairs(items))),
}
