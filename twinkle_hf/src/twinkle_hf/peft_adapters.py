"""Adapters through PEFT: adding them, making one active, their weights in and out."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import nn

from twinkle.errors import AdapterError, CheckpointError, ConfigError, NotSupportedError
from twinkle_hf.parallel.adapters import check_can_shard, whole_shapes
from twinkle_hf.parallel.layout import sharded_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Parameter
    from transformers import PreTrainedModel

__all__ = ['WEIGHTS', 'PeftAdapters', 'cpu_copy', 'merge_into', 'read_adapter', 'read_weights']

M = TypeVar('M', bound=nn.Module)

WEIGHTS = 'adapter_model.safetensors'


class PeftAdapters:
    """The adapters of one module. Without any, the module is the plain Transformers one."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.base = module
        self.peft: PeftModel | None = None
        # FSDP2 puts whole parameters in the place of shards between forward and backward: the shards are what is trained.
        self._shards = list(module.named_parameters()) if sharded_names(module) else None
        self._trainable: dict[str, list[tuple[str, Parameter]]] = {}
        self._active: str | None = None

    @property
    def module(self) -> nn.Module:
        """The module that users see: PEFT's, once there is an adapter."""
        return self.base if self.peft is None else self.peft

    @property
    def called(self) -> nn.Module:
        """What is called in a forward pass.

        PEFT's own forward is needed for prompts that it puts before the inputs only; it calls `forward` of the base model, past the
        hooks that gather sharded weights.
        """
        if self.peft is None or not self.peft.active_peft_config.is_prompt_learning:
            return self.base
        return self.peft

    def named_trainable(self, name: str) -> list[tuple[str, Parameter]]:
        """What an adapter trains; for `''` every parameter of the module that requires gradients."""
        if name:
            return self._trainable[name]
        return [(n, p) for n, p in self._shards or self.base.named_parameters() if p.requires_grad]

    def add(self, name: str, config_or_dir: Any) -> None:
        """Add an adapter from a config, or from the folder of a saved one. The caller's config stays as it is.

        Raises:
            ConfigError, CheckpointError: neither of these, or a folder that holds no adapter; nothing has changed.
        """
        config, weights = read_adapter(config_or_dir)
        if self.peft is not None and config.peft_type != self.peft.peft_type:
            raise NotSupportedError(
                f'Adapter {name!r} is of type {_type_name(config.peft_type)}, and this model has '
                f'{_type_name(self.peft.peft_type)} adapters: PEFT does not mix types on one model.'
            )
        config.inference_mode = False
        if sharded_names(self.base):
            check_can_shard(config)
        frozen = {id(p) for p in self.base.parameters() if not p.requires_grad}
        first = self.peft is None
        try:
            with whole_shapes(self.base):
                self._inject(name, config)
            assert self.peft is not None
            self.peft.set_adapter(name)
            others = {id(p) for pairs in self._trainable.values() for _, p in pairs}
            own = [(n, p) for n, p in self.peft.named_parameters() if p.requires_grad and id(p) not in others]
            if not own:
                raise ConfigError(
                    f'target_modules={getattr(config, "target_modules", None)!r} match no module of this model.'
                )
            if weights is not None:
                self._set_weights(name, weights, 'the adapter folder')
        except Exception as error:
            self._undo(name, first=first, frozen=frozen)
            if isinstance(error, (AdapterError, CheckpointError)):
                raise
            raise ConfigError(f'Adapter {name!r} cannot be added: {error}') from error
        self._trainable[name] = own
        self._active = name
        self._keep_trainable()

    def _inject(self, name: str, config: PeftConfig) -> None:
        # Adapters take the dtype of the layers they sit on: PEFT's own cast to fp32 would change it in silence.
        if self.peft is None:
            peft = get_peft_model(self.base, config, adapter_name=name, autocast_adapter_dtype=False)
            assert isinstance(peft, PeftModel)
            self.peft = peft
            return
        with _outside_of_copies(self.peft, config):
            self.peft.add_adapter(name, config, autocast_adapter_dtype=False)

    def activate(self, name: str) -> None:
        """Make one adapter the active one. The others stay trainable, so that their pending backward passes still count."""
        if not name or name == self._active or self.peft is None:
            return
        self.peft.set_adapter(name)
        self._active = name
        self._keep_trainable()

    @property
    def active(self) -> str:
        """The active adapter's name, `''` without adapters."""
        return self._active or ''

    def disabled(self) -> AbstractContextManager[Any]:
        """The base model alone."""
        return contextlib.nullcontext() if self.peft is None else self.peft.disable_adapter()

    def state_dict(self, name: str) -> dict[str, Tensor]:
        """One adapter's weights under PEFT's names, without the adapter's own name."""
        assert self.peft is not None
        # Not 'auto', which asks a hub about the vocabulary, and saves the base model's embeddings beside adapters on them.
        return dict(get_peft_model_state_dict(self.peft, adapter_name=name, save_embedding_layers=False))

    def base_keys(self) -> dict[str, str]:
        """Keys of the base model's own weights as they are now, and as they are without adapters."""
        if self.peft is None:
            return {key: key for key in self.base.state_dict()}
        prefix = getattr(self.peft.base_model, 'prefix', None) or 'lora_'
        found = {}
        for key in self.base.state_dict():
            parts = key.split('.')
            if any(part.startswith(prefix) for part in parts) or 'modules_to_save' in parts:
                continue
            found[key] = '.'.join(part for part in parts if part not in ('base_layer', 'original_module'))
        return found

    def writer(self, name: str, base_model_id: str | None, *, snapshot: bool) -> Callable[[Path], None]:
        """What writes `adapter_model.safetensors` and `adapter_config.json`, as `PeftModel.from_pretrained` reads them."""
        assert self.peft is not None
        config = copy.deepcopy(self.peft.peft_config[name])
        config.base_model_name_or_path = base_model_id or config.base_model_name_or_path
        config.inference_mode = True
        if config.task_type is None:
            # What PeftModel needs to find the base model's class by itself.
            base_class = type(self.base)
            config.auto_mapping = {'base_model_class': base_class.__name__, 'parent_library': base_class.__module__}
        tensors = {key: value.detach().to('cpu', copy=snapshot) for key, value in self.state_dict(name).items()}

        def write(folder: Path) -> None:
            contiguous = {key: value.contiguous() for key, value in tensors.items()}
            save_file(contiguous, str(folder / WEIGHTS), metadata={'format': 'pt'})
            config.save_pretrained(str(folder))

        return write

    def merged(self, name: str) -> PreTrainedModel:
        """A copy of the base model on the CPU with one adapter merged into it, by PEFT. The model itself stays as it is.

        Raises:
            NotSupportedError: an adapter that PEFT cannot merge.
        """
        assert self.peft is not None
        twin: Any = cpu_copy(self.peft)
        if not hasattr(twin.base_model, 'merge_and_unload'):
            raise NotSupportedError(
                f'Adapter {name!r} is of type {_type_name(self.peft.peft_config[name].peft_type)}, which PEFT cannot merge into the '
                'model. Save without merge_lora=True.'
            )
        return _merge(twin, name)

    def config(self, name: str) -> PeftConfig:
        """A copy of an adapter's config."""
        assert self.peft is not None
        return copy.deepcopy(self.peft.peft_config[name])

    def load(self, name: str, folder: Path) -> None:
        """Read weights into an adapter that exists. Keys and shapes are checked before anything is changed."""
        self._set_weights(name, read_weights(folder), str(folder))

    def _set_weights(self, name: str, weights: dict[str, Tensor], where: str) -> None:
        assert self.peft is not None
        here = self.state_dict(name)
        weights = self._without_base(weights, where)
        missing, unexpected = sorted(here.keys() - weights.keys()), sorted(weights.keys() - here.keys())
        wrong = [
            f'{key} {tuple(weights[key].shape)} here {tuple(value.shape)}'
            for key, value in here.items()
            if key in weights and weights[key].shape != value.shape
        ]
        if missing or unexpected or wrong:
            raise CheckpointError(
                f'{where} does not fit adapter {name!r}: missing {_some(missing)}, unexpected {_some(unexpected)}, '
                f'other shapes {_some(wrong)}. Its rank, target modules or base model differ.'
            )
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            set_peft_model_state_dict(self.peft, weights, adapter_name=name)

    def _without_base(self, weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """`weights` without embeddings of the base model, which PEFT saves beside adapters on them.

        Raises:
            CheckpointError: they differ from those here, so that the adapter belongs to another base model.
        """
        assert self.peft is not None
        kept, base = {}, {key: value for key, value in self.peft.state_dict().items() if 'base_layer' in key}
        for key, value in weights.items():
            if key not in base:
                kept[key] = value
            elif base[key].shape != value.shape or not torch.equal(base[key].to('cpu', value.dtype), value):
                raise CheckpointError(
                    f'{where} brings weights of the base model ({key}) that differ from those here: it was trained on another base.'
                )
        return kept

    def _keep_trainable(self) -> None:
        # PEFT freezes adapters that are not active; autograd would then drop the gradients of a backward that is still to come.
        for pairs in self._trainable.values():
            for _, parameter in pairs:
                parameter.requires_grad_(True)

    def _undo(self, name: str, *, first: bool, frozen: set[int]) -> None:
        """Take a half-added adapter out again."""
        if first:
            self.peft = None
            for parent in list(self.base.modules()):
                for child_name, child in list(parent.named_children()):
                    if isinstance(child, BaseTunerLayer):
                        setattr(parent, child_name, child.get_base_layer())
            self.base.__dict__.pop('peft_config', None)
            for parameter in self.base.parameters():
                parameter.requires_grad_(id(parameter) not in frozen)
        elif self.peft is not None and self._active is not None:
            self.peft.set_adapter(self._active)
            if name in self.peft.peft_config:
                self.peft.delete_adapter(name)
            self._keep_trainable()


def merge_into(module: PreTrainedModel, config: PeftConfig, weights: dict[str, Tensor], name: str) -> PreTrainedModel:
    """A plain module with an adapter, of this config and these weights, merged into it by PEFT.

    Raises:
        NotSupportedError: an adapter that PEFT cannot merge.
    """
    peft: Any = get_peft_model(module, config, adapter_name=name, autocast_adapter_dtype=False)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        set_peft_model_state_dict(peft, {key: value.cpu() for key, value in weights.items()}, adapter_name=name)
    return _merge(peft, name)


def _refuse_tied(peft: nn.Module, name: str) -> None:
    """Raise where an adapter sits on a weight that another layer uses too: merged, it would change that layer as well."""
    users: dict[int, int] = {}
    for part in peft.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                users[id(parameter)] = users.get(id(parameter), 0) + 1
    for place, layer in peft.named_modules():
        # Retrained tokens are tied by PEFT itself, adapters are not.
        if isinstance(layer, LoraLayer) and any(name in getattr(layer, names) for names in layer.adapter_layer_names):
            weight = getattr(layer.get_base_layer(), 'weight', None)
            if weight is not None and users.get(id(weight), 0) > 1:
                raise NotSupportedError(
                    f'Adapter {name!r} cannot be merged: it sits on {place.removeprefix("base_model.model.")}, whose weight is tied to '
                    'another layer, which the merge would change too. Save without merge_lora=True.'
                )


def _merge(peft: Any, name: str) -> Any:
    _refuse_tied(peft, name)
    peft.set_adapter(name)
    try:
        return peft.merge_and_unload(adapter_names=[name])
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise NotSupportedError(f'Adapter {name!r} cannot be merged into the model: {error}') from error


@contextlib.contextmanager
def _outside_of_copies(module: nn.Module, config: Any) -> Iterator[None]:
    """Keep a further adapter out of the private copies that `modules_to_save` of others made: PEFT would target them, too."""
    copies = [
        f'{prefix}.{inner}' if inner else prefix
        for prefix, wrapper in module.named_modules()
        if isinstance(wrapper, AuxiliaryTrainingWrapper)
        for inner, _ in wrapper.named_modules()
    ]
    given = getattr(config, 'exclude_modules', None)
    if not copies or not hasattr(config, 'exclude_modules'):
        yield
        return
    names = [name.removeprefix('base_model.model.') for name in copies]
    if isinstance(given, str):
        config.exclude_modules = '|'.join([f'(?:{given})', *map(re.escape, names)])
    else:
        config.exclude_modules = [*(given or ()), *names]
    try:
        yield
    finally:
        config.exclude_modules = given


def cpu_copy(module: M) -> M:
    """A copy of a module whose parameters and buffers live on the CPU; tied ones stay tied, gradients stay behind."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        twin = nn.Parameter(parameter.detach().to('cpu', copy=True), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = twin
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to('cpu', copy=True)
    return copy.deepcopy(module, memo)


def read_adapter(config_or_dir: Any) -> tuple[PeftConfig, dict[str, Tensor] | None]:
    """A copy of a config; or the config and the weights of a saved adapter's folder."""
    if isinstance(config_or_dir, PeftConfig):
        return copy.deepcopy(config_or_dir), None
    if isinstance(config_or_dir, (str, Path)):
        folder = Path(config_or_dir)
        if not (folder / 'adapter_config.json').is_file():
            raise CheckpointError(f'{folder} holds no adapter_config.json, so it is no adapter folder.')
        return PeftConfig.from_pretrained(str(folder)), read_weights(folder)
    raise ConfigError(
        f'An adapter is made from a PEFT config (LoraConfig(r=8), say) or the folder of a saved adapter, not from {config_or_dir!r}.'
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a saved adapter, on the CPU, from safetensors only."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f'{folder} holds no {WEIGHTS}. Adapters are read from safetensors only; a pickled .bin is never loaded.'
        )
    return load_file(str(path), device='cpu')


def _type_name(peft_type: Any) -> str:
    return str(getattr(peft_type, 'value', peft_type))


def _some(items: list[str]) -> str:
    if not items:
        return 'none'
    return ', '.join(items[:3]) + (f' and {len(items) - 3} more' if len(items) > 3 else '')
