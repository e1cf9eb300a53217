"""A whole backend in few lines: what a third one has to write.

Names carry shapes: B rows, T tokens, H hidden size, V vocabulary, R the rank of an adapter.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from twinkle.device_mesh import DeviceMesh
from twinkle.errors import CheckpointError, ConfigError
from twinkle.loss.outputs import outputs_from_hidden
from twinkle.model.base import BaseModel
from twinkle.remote import remote_class
from twinkle.runtime import default_device_mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Parameter

    from twinkle.data_format import ModelOutput

__all__ = ['ToyModel']

_WEIGHTS = 'model.safetensors'


class ToyAdapter(nn.Module):
    """A low-rank change of the hidden state."""

    def __init__(self, hidden_size: int, rank: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.down_HR = nn.Parameter(torch.randn(hidden_size, rank, generator=generator) * 0.3)
        self.up_RH = nn.Parameter(torch.randn(rank, hidden_size, generator=generator) * 0.3)

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        return hidden_BTH @ self.down_HR @ self.up_RH


class ToyModule(nn.Module):
    """Each token's hidden state is a mixture of the embeddings up to it."""

    def __init__(self, vocabulary: int, hidden_size: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocabulary, hidden_size)
            self.mix = nn.Linear(hidden_size, hidden_size)
            self.head = nn.Linear(hidden_size, vocabulary)
        self.adapters = nn.ModuleDict()

    def forward(self, input_ids_BT: Tensor, adapter_name: str) -> Tensor:
        embedded_BTH = self.embed(input_ids_BT)
        seen_T1 = torch.arange(1, input_ids_BT.shape[1] + 1, device=input_ids_BT.device)[:, None]
        hidden_BTH = embedded_BTH + embedded_BTH.cumsum(1) / seen_T1
        change_BTH = self.mix(hidden_BTH)
        if adapter_name:
            change_BTH = change_BTH + self.adapters[adapter_name](hidden_BTH)
        return hidden_BTH + torch.tanh(change_BTH)


@remote_class(execute='all')
class ToyModel(BaseModel):
    """A language model small enough for a test, trained whole or through low-rank adapters, on any number of data ranks.

    Args:
        model_id: a folder that `save` wrote; without one the weights come from `seed`.
    """

    backend: ClassVar[str] = 'toy'

    def __init__(
        self,
        model_id: str | Path | None = None,
        *,
        vocabulary: int = 64,
        hidden_size: int = 16,
        seed: int = 0,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self.device_mesh = device_mesh if device_mesh is not None else default_device_mesh()
        self._module = ToyModule(vocabulary, hidden_size, seed)
        super().__init__()
        for parameter in self._module.parameters():
            self._sum_gradients(parameter)
        if model_id is not None:
            self._import_weights(Path(model_id), '')

    @classmethod
    def conformance_model(cls, folder: Path) -> ToyModel:
        """What the conformance kit tests."""
        return cls()

    @classmethod
    def conformance_adapter(cls, folder: Path, seed: int) -> dict[str, int]:
        """An adapter for the conformance kit that changes what the model computes."""
        return {'rank': 4, 'seed': seed}

    # -- running ---------------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._module

    @property
    def device(self) -> torch.device:
        return torch.device('cpu')

    def _run_module(
        self, batch: Mapping[str, Any], adapter_name: str, needs: frozenset[str], *, training: bool, disable_lora: bool
    ) -> ModelOutput:
        with self._mode(training):
            hidden_BTH = self._module(batch['input_ids'], '' if disable_lora else adapter_name)
            weights = batch.get('loss_weights')
            return outputs_from_hidden(hidden_BTH, self._module.head, batch.get('labels'), needs, loss_weights=weights)

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        before = self._module.training
        self._module.train(training)
        try:
            with torch.set_grad_enabled(training):
                yield
        finally:
            self._module.train(before)

    # -- adapters and weights --------------------------------------------------------------------------------------------------

    def _create_adapter(self, adapter_name: str, config_or_dir: Any, **kwargs: Any) -> None:
        self._no_unknown('add_adapter_to_model', kwargs)
        if isinstance(config_or_dir, (str, Path)):
            weights = _read(Path(config_or_dir))
            hidden_size, rank = weights['down_HR'].shape
            adapter = ToyAdapter(hidden_size, rank, seed=0)
            _put(adapter, weights, Path(config_or_dir))
        elif isinstance(config_or_dir, dict) and config_or_dir.keys() == {'rank', 'seed'}:
            adapter = ToyAdapter(self._module.head.in_features, **config_or_dir)
        else:
            raise ConfigError(f'An adapter is {{"rank": .., "seed": ..}} or a saved folder, not {config_or_dir!r}.')
        for parameter in self._module.parameters():
            if not self._module.adapters:
                parameter.requires_grad_(False)
        for parameter in adapter.parameters():
            self._sum_gradients(parameter)
        self._module.adapters[adapter_name] = adapter

    def _part(self, adapter_name: str) -> nn.Module:
        return self._module.adapters[adapter_name] if adapter_name else self._module

    def _named_trainable(self, adapter_name: str) -> Iterable[tuple[str, Parameter]]:
        return self._part(adapter_name).named_parameters()

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Tensor]:
        part = self._part(self._adapters.get(adapter_name).adapter_name)
        return {name: value.detach().to('cpu', copy=True) for name, value in part.state_dict().items()}

    def _weights_writer(self, adapter_name: str, *, snapshot: bool) -> Callable[[Path], None]:
        weights = self.get_state_dict(adapter_name=adapter_name)
        return lambda folder: save_file(weights, str(folder / _WEIGHTS))

    def _import_weights(self, folder: Path, adapter_name: str) -> None:
        _put(self._part(adapter_name), _read(folder), folder)

    # -- data ranks ------------------------------------------------------------------------------------------------------------

    def sum_over_data(self, value: Tensor) -> Tensor:
        if self.device_mesh.world_size == 1:
            return value
        total = value.detach().clone()
        torch.distributed.all_reduce(total)
        return total

    def _sum_gradients(self, parameter: Parameter) -> None:
        if self.device_mesh.world_size > 1:
            parameter.register_hook(self.sum_over_data)


def _read(folder: Path) -> dict[str, Tensor]:
    if not (folder / _WEIGHTS).is_file():
        raise CheckpointError(f'{folder} holds no {_WEIGHTS}.')
    return load_file(str(folder / _WEIGHTS))


def _put(part: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    here = {name: value.shape for name, value in part.state_dict().items()}
    if here != {name: value.shape for name, value in weights.items()}:
        raise CheckpointError(
            f'{folder} holds {sorted(weights)}; this model has {sorted(here)} of other names or shapes.'
        )
    part.load_state_dict(weights)
