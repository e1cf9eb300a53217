"""Tenants' LoRAs in the slots of one module: PEFT says which layers, ranks, scales and first values; the slots hold them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn

from twinkle.errors import CheckpointError, ConfigError, NotSupportedError
from twinkle.logging import get_logger
from twinkle_hf.multi_lora.slots import Lora, Selection, Slots
from twinkle_hf.peft_adapters import WEIGHTS, cpu_copy, merge_into, read_adapter, read_weights

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from transformers import PreTrainedModel

    from twinkle.model.multi_lora import LoraTenant

__all__ = ['SlotAdapters', 'hollow_copy']

logger = get_logger('twinkle_hf')

_PREFIX = 'base_model.model.'
_PLAIN_INITS = (True, False, 'gaussian', 'orthogonal')


@dataclass
class _Tenant:
    index: int
    config: LoraConfig
    loras: dict[str, Lora]
    generator: torch.Generator
    draws: bool


class SlotAdapters:
    """The tenants of one module, with the interface of `PeftAdapters`. The module itself is frozen and stays as it is."""

    def __init__(self, module: PreTrainedModel, slots: Slots, hollow: nn.Module) -> None:
        self.base = module
        self.slots = slots
        self._hollow = hollow
        self._tenants: dict[str, _Tenant] = {}
        self._base_draws = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()) or bool(
            getattr(module.config.get_text_config(), 'attention_dropout', 0.0)
        )

    # -- as PeftAdapters -------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        return self.base

    @property
    def called(self) -> nn.Module:
        return self.base

    def named_trainable(self, name: str) -> list[tuple[str, Parameter]]:
        """A tenant's parameters under PEFT's names, without its own."""
        if not name:
            return []
        found: list[tuple[str, Parameter]] = []
        for layer, lora in self._tenants[name].loras.items():
            found += [(f'{_PREFIX}{layer}.lora_A.weight', lora.a), (f'{_PREFIX}{layer}.lora_B.weight', lora.b)]
        return found

    def state_dict(self, name: str) -> dict[str, Tensor]:
        return {key: parameter.detach() for key, parameter in self.named_trainable(name)}

    def activate(self, name: str) -> None:
        """Use one tenant in what runs from now on; `''` is the base model alone."""
        self.slots.selection = Selection((self._tenants[name].index,)) if name else None

    @property
    def active(self) -> str:
        chosen = self.slots.selection
        if chosen is None or len(chosen.slots) > 1:
            return ''
        return next((name for name, tenant in self._tenants.items() if tenant.index == chosen.slots[0]), '')

    def disabled(self) -> AbstractContextManager[Any]:
        return self.slots.using(None)

    def base_keys(self) -> dict[str, str]:
        return {key: key for key in self.base.state_dict()}

    def config(self, name: str) -> LoraConfig:
        return copy.deepcopy(self._tenants[name].config)

    def writer(self, name: str, base_model_id: str | None, *, snapshot: bool) -> Callable[[Path], None]:
        """What writes a plain PEFT adapter of the tenant's own rank."""
        config = self.config(name)
        config.base_model_name_or_path = base_model_id or config.base_model_name_or_path
        config.inference_mode = True
        if config.task_type is None:
            base_class = type(self.base)
            config.auto_mapping = {'base_model_class': base_class.__name__, 'parent_library': base_class.__module__}
        tensors = {key: value.to('cpu', copy=snapshot) for key, value in self.state_dict(name).items()}

        def write(folder: Path) -> None:
            save_file(
                {key: value.contiguous() for key, value in tensors.items()},
                str(folder / WEIGHTS),
                metadata={'format': 'pt'},
            )
            config.save_pretrained(str(folder))

        return write

    def merged(self, name: str) -> PreTrainedModel:
        with self.slots.using(None):
            return merge_into(cpu_copy(self.base), self.config(name), self.state_dict(name), name)

    def load(self, name: str, folder: Path) -> None:
        """Read weights into a tenant's slot. Keys and shapes are checked before anything is changed."""
        self._copy(name, read_weights(folder), str(folder))

    # -- tenants ---------------------------------------------------------------------------------------------------------------

    def read_config(self, config_or_dir: Any) -> tuple[LoraConfig, int]:
        """A copy of the config, and its largest rank.

        Raises:
            ConfigError, CheckpointError: what is no config and no adapter's folder.
            NotSupportedError: what a slot cannot do.
        """
        config, _ = read_adapter(config_or_dir)
        _check_supported(config)
        assert isinstance(config, LoraConfig)
        return config, max([config.r, *(config.rank_pattern or {}).values()])

    def fill(self, tenant: LoraTenant, config_or_dir: Any) -> LoraConfig:
        """Put a fresh adapter, or a saved one, into a tenant's slot."""
        config, weights = read_adapter(config_or_dir)
        assert isinstance(config, LoraConfig)
        name = tenant.tenant_adapter_name
        config.inference_mode = False
        wanted = config.target_modules
        found = self._made_by_peft(copy.deepcopy(config), name)
        _report_unmatched(name, wanted, [layer for layer, _ in found])
        loras = {}
        for layer, made in found:
            rank = made.r[name]
            scale, dropout = float(made.scaling[name]), float(getattr(made.lora_dropout[name], 'p', 0.0))
            place = self.slots.layers[layer]
            assert rank <= self.slots.max_r
            loras[layer] = place.put(tenant.index, made.lora_A[name].weight, made.lora_B[name].weight, scale, dropout)
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())  # as plain PEFT would go on after making the adapter
        draws = self._base_draws or any(lora.dropout for lora in loras.values())
        self._tenants[name] = _Tenant(tenant.index, config, loras, generator, draws)
        if weights is not None:
            self._copy(name, weights, 'the adapter folder')
        return config

    def clear(self, tenant: LoraTenant) -> None:
        """Make a tenant's slot as new."""
        self._tenants.pop(tenant.tenant_adapter_name, None)
        self.slots.clear(tenant.index)
        if self.slots.selection is not None and tenant.index in self.slots.selection.slots:
            self.slots.selection = None

    def selection(self, names: Sequence[str], counts: Sequence[int]) -> Selection:
        """What a pass for rows of several tenants uses."""
        tenants = [self._tenants[name] for name in names]
        return Selection(tuple(t.index for t in tenants), tuple(counts), tuple(t.generator for t in tenants))

    @contextlib.contextmanager
    def own_random_state(self, name: str) -> Iterator[None]:
        """Within the context random numbers are the tenant's own; others' go on after it as if it had not been."""
        tenant = self._tenants.get(name)
        if tenant is None or not tenant.draws:
            yield
            return
        before = torch.get_rng_state()
        torch.set_rng_state(tenant.generator.get_state())
        try:
            yield
        finally:
            tenant.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)

    def random_state(self, name: str) -> Tensor:
        return self._tenants[name].generator.get_state()

    def set_random_state(self, name: str, state: Tensor) -> None:
        self._tenants[name].generator.set_state(state)

    def has_dropout(self, names: Sequence[str]) -> bool:
        return any(lora.dropout for name in names for lora in self._tenants[name].loras.values())

    def _made_by_peft(self, config: LoraConfig, name: str) -> list[tuple[str, Any]]:
        """The layers that PEFT makes for a config, on a copy of the module that holds no weights."""
        try:
            made = get_peft_model(_again_hollow(self._hollow), config, adapter_name=name, autocast_adapter_dtype=False)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f'Tenant {name!r}: PEFT cannot make the adapter: {error}') from error
        found = [
            (path.removeprefix(_PREFIX), layer) for path, layer in made.named_modules() if isinstance(layer, LoraLayer)
        ]
        for path, layer in found:
            if not isinstance(layer, LoraLinear) or path not in self.slots.layers:
                raise NotSupportedError(
                    f'Tenant {name!r}: target_modules match {path} ({type(layer.get_base_layer()).__name__}), and there are slots at linear '
                    'layers below the output head only. Leave it out.'
                )
        return found

    def _copy(self, name: str, weights: dict[str, Tensor], where: str) -> None:
        here = dict(self.named_trainable(name))
        missing, unexpected = sorted(here.keys() - weights.keys()), sorted(weights.keys() - here.keys())
        wrong = [key for key, value in here.items() if key in weights and weights[key].shape != value.shape]
        if missing or unexpected or wrong:
            raise CheckpointError(
                f'{where} does not fit tenant {name!r}: missing {missing[:3] or "none"}, unexpected {unexpected[:3] or "none"}, other shapes '
                f'{wrong[:3] or "none"} (the first three of each). Its rank, target modules or base model differ.'
            )
        with torch.no_grad():
            for key, parameter in here.items():
                parameter.copy_(weights[key])


def hollow_copy(module: nn.Module) -> nn.Module:
    """The module with its shapes and names, and no memory for weights. On the CPU, where PEFT makes adapters."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        single: Any = torch.zeros((), dtype=tensor.dtype)
        empty = single.expand(tensor.shape)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


def _again_hollow(hollow: nn.Module) -> Any:
    """A copy of a hollow module, which PEFT may change."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*hollow.parameters(), *hollow.buffers()]}
    return copy.deepcopy(hollow, memo)


def _check_supported(config: PeftConfig) -> None:
    if not isinstance(config, LoraConfig):
        raise NotSupportedError(
            f'Slots hold LoRA, and this is {type(config).__name__}. Use LoraConfig, or TransformersModel.'
        )
    options = {
        'use_dora': (config.use_dora, 'its magnitudes are of the merged weights of each tenant'),
        'bias': (config.bias != 'none', 'biases of the base model are shared'),
        'modules_to_save': (bool(config.modules_to_save), 'it trains a copy of a part of the base model'),
        'trainable_token_indices': (bool(config.trainable_token_indices), 'it trains a part of the base model'),
        'target_parameters': (bool(getattr(config, 'target_parameters', None)), 'slots are at linear layers'),
        'lora_bias': (bool(getattr(config, 'lora_bias', False)), 'slots hold A and B only'),
        'layer_replication': (bool(config.layer_replication), 'it changes the base model'),
        'init_lora_weights': (config.init_lora_weights not in _PLAIN_INITS, 'it reads or changes the base model\'s weights'),
    }  # fmt: skip
    for name, (given, why) in options.items():
        if given:
            raise NotSupportedError(
                f'{name}={getattr(config, name)!r} is not for tenants of one base model: {why}. Leave it out, or use TransformersModel.'
            )


def _report_unmatched(tenant: str, wanted: Any, layers: Sequence[str]) -> None:
    """Tell of entries of a list of target modules that match nothing; PEFT says so only if none of them does."""
    if isinstance(wanted, str) or not wanted:
        return
    lost = sorted(
        entry for entry in wanted if not any(layer == entry or layer.endswith(f'.{entry}') for layer in layers)
    )
    if lost:
        logger.warning('Tenant %r: target_modules %s match nothing in this model.', tenant, ', '.join(map(repr, lost)))
