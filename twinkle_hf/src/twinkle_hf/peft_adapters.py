"""Adapters through PEFT: adding them, making one active, their weights in and out."""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from twinkle.errors import AdapterError, CheckpointError, ConfigError, NotSupportedError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.nn import Parameter
    from transformers import PreTrainedModel

__all__ = ['PeftAdapters']

WEIGHTS = 'adapter_model.safetensors'


class PeftAdapters:
    """The adapters of one module. Without any, the module is the plain Transformers one."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.base = module
        self.peft: PeftModel | None = None
        self._trainable: dict[str, list[tuple[str, Parameter]]] = {}
        self._active: str | None = None

    @property
    def module(self) -> nn.Module:
        """What is called in a forward pass."""
        return self.base if self.peft is None else self.peft

    def named_trainable(self, name: str) -> list[tuple[str, Parameter]]:
        """What an adapter trains; for `''` every parameter of the module that requires gradients."""
        if name:
            return self._trainable[name]
        return [(n, p) for n, p in self.base.named_parameters() if p.requires_grad]

    def add(self, name: str, config_or_dir: Any) -> None:
        """Add an adapter from a config, or from the folder of a saved one. The caller's config stays as it is.

        Raises:
            ConfigError, CheckpointError: neither of these, or a folder that holds no adapter; nothing has changed.
        """
        config, weights = _read(config_or_dir)
        if self.peft is not None and config.peft_type != self.peft.peft_type:
            raise NotSupportedError(
                f'Adapter {name!r} is of type {_type_name(config.peft_type)}, and this model has '
                f'{_type_name(self.peft.peft_type)} adapters: PEFT does not mix types on one model.'
            )
        config.inference_mode = False
        frozen = {id(p) for p in self.base.parameters() if not p.requires_grad}
        first = self.peft is None
        try:
            # Adapters take the dtype of the layers they sit on: PEFT's own cast to fp32 would change it in silence.
            if self.peft is None:
                peft = get_peft_model(self.base, config, adapter_name=name, autocast_adapter_dtype=False)
                assert isinstance(peft, PeftModel)
                self.peft = peft
            else:
                self.peft.add_adapter(name, config, autocast_adapter_dtype=False)
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
        return dict(get_peft_model_state_dict(self.peft, adapter_name=name))

    def save(self, name: str, folder: Path, base_model_id: str | None) -> None:
        """Write `adapter_model.safetensors` and `adapter_config.json`, as `PeftModel.from_pretrained` reads them."""
        assert self.peft is not None
        config = copy.deepcopy(self.peft.peft_config[name])
        config.base_model_name_or_path = base_model_id or config.base_model_name_or_path
        config.inference_mode = True
        if config.task_type is None:
            # What PeftModel needs to find the base model's class by itself.
            base_class = type(self.base)
            config.auto_mapping = {'base_model_class': base_class.__name__, 'parent_library': base_class.__module__}
        tensors = {key: value.detach().cpu().contiguous() for key, value in self.state_dict(name).items()}
        save_file(tensors, str(folder / WEIGHTS), metadata={'format': 'pt'})
        config.save_pretrained(str(folder))

    def load(self, name: str, folder: Path) -> None:
        """Read weights into an adapter that exists. Keys and shapes are checked before anything is changed."""
        self._set_weights(name, _weights_of(folder), str(folder))

    def _set_weights(self, name: str, weights: dict[str, Tensor], where: str) -> None:
        assert self.peft is not None
        here = self.state_dict(name)
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


def _read(config_or_dir: Any) -> tuple[PeftConfig, dict[str, Tensor] | None]:
    if isinstance(config_or_dir, PeftConfig):
        return copy.deepcopy(config_or_dir), None
    if isinstance(config_or_dir, (str, Path)):
        folder = Path(config_or_dir)
        if not (folder / 'adapter_config.json').is_file():
            raise CheckpointError(f'{folder} holds no adapter_config.json, so it is no adapter folder.')
        return PeftConfig.from_pretrained(str(folder)), _weights_of(folder)
    raise ConfigError(
        f'An adapter is made from a PEFT config (LoraConfig(r=8), say) or the folder of a saved adapter, not from {config_or_dir!r}.'
    )


def _weights_of(folder: Path) -> dict[str, Tensor]:
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
