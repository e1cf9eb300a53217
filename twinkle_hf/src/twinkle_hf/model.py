"""`TransformersModel`: any Transformers model, with or without PEFT adapters, behind the protocol."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from safetensors.torch import load_file

from twinkle.device_mesh import DeviceMesh
from twinkle.errors import CheckpointError, NotSupportedError, StateError
from twinkle.launcher import local_rank, world_size
from twinkle.model.base import BaseModel
from twinkle.remote import remote_class
from twinkle.runtime import default_device_mesh
from twinkle_hf.head import OutputHead
from twinkle_hf.loading import copy_tokenizer_files, load_module
from twinkle_hf.options import check_options
from twinkle_hf.patch import enable_gradient_checkpointing
from twinkle_hf.peft_adapters import PeftAdapters
from twinkle_hf.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor, nn
    from torch.nn import Parameter
    from transformers import PretrainedConfig

    from twinkle.data_format import ModelOutput

__all__ = ['TransformersModel']

# Keys of a batch that are for the loss, not for the module.
_NOT_FOR_MODULE = frozenset({'labels', 'loss_weights'})


@remote_class(execute='all')
class TransformersModel(BaseModel):
    """A Transformers model that is trained in full, or through PEFT adapters that share it.

    Args:
        model_id: a local folder, `hf://org/name`, `ms://org/name` or any registered source. Left out, `config` gives a model with
            random weights.
        model_cls: a Transformers class, its name, or an Auto class; by default the architecture that the config names, else
            `AutoModelForCausalLM`.
        config: a `PretrainedConfig` to use instead of the one at `model_id`. It is copied.
        device_mesh: the layout of processes; by default the runtime's.
        mixed_precision: `'no'` is fp32, `'bf16'` and `'fp16'` are autocast over fp32 weights (fp16 with a loss scaler); pass
            `dtype=torch.bfloat16` beside `'bf16'` for weights, adapters included, in bf16. By default `'bf16'` where the processor
            has it, else `'no'`.
        strategy: how several processes share the work, `'accelerate'` or `'native_fsdp'`.
        ddp_config, fsdp_config, memory_efficient_init: for several processes.
        grad_scaler_config: keywords of `torch.amp.GradScaler`.
        gradient_checkpointing: recompute activations in backward, to save memory.
        remote_group: the device group this model lives in; a label in local mode.
        **kwargs: go to `from_pretrained` (or to the class's `from_config`): `attn_implementation`, `dtype`, `revision`, ...

    Raises:
        ConfigError, MeshError, NotSupportedError: an option that cannot work, before anything is loaded.
        SourceError: there is no model at `model_id`.
    """

    backend: ClassVar[str] = 'transformers'

    def __init__(
        self,
        model_id: str | Path | None = None,
        *,
        model_cls: Any = None,
        config: PretrainedConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: Literal['no', 'fp8', 'fp16', 'bf16'] | None = None,
        strategy: Literal['accelerate', 'native_fsdp'] = 'accelerate',
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        gradient_checkpointing: bool = False,
        remote_group: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.device_mesh = device_mesh if device_mesh is not None else default_device_mesh()
        check_options(self.device_mesh, strategy, ddp_config, fsdp_config, memory_efficient_init)
        self.device_mesh.check_world(world_size())
        dtype = kwargs.pop('dtype', kwargs.pop('torch_dtype', None))
        self.precision = Precision.choose(mixed_precision, self.device_mesh.device_type, dtype, grad_scaler_config)
        self.strategy = strategy
        self.remote_group = remote_group
        self.model_id = None if model_id is None else str(model_id)
        module, self._folder = load_module(model_cls, model_id, config, self.precision.parameter_dtype, kwargs)
        torch.nn.Module.to(module, device=self.device)
        if gradient_checkpointing:
            enable_gradient_checkpointing(module)
        self.adapters = PeftAdapters(module)
        self._head = OutputHead(module)
        self._accepted = _forward_keywords(module)
        super().__init__()

    # -- primitives ------------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self.adapters.module

    @property
    def device(self) -> torch.device:
        if self.device_mesh.device_type == 'cpu':
            return torch.device('cpu')
        return torch.device(self.device_mesh.device_type, local_rank())

    def _run_module(
        self, batch: Mapping[str, Any], adapter_name: str, needs: frozenset[str], *, training: bool, disable_lora: bool
    ) -> ModelOutput:
        self.adapters.activate(adapter_name)
        module = self.adapters.module
        keywords = {key: batch[key] for key in batch if key in self._accepted}
        if _is_packed(batch):
            _check_can_pack(self.adapters.base)
            # Transformers keeps packed samples apart by their positions, but only where no mask says that all may see all.
            keywords.pop('attention_mask', None)

        def run() -> Any:
            return module(**keywords, use_cache=False, return_dict=True)

        if training:
            if not module.training:
                module.train()
            with self.precision.autocast():
                return self._head.run(run, batch, needs)
        with _evaluating(module), torch.no_grad(), self.precision.autocast():
            if not disable_lora:
                return self._head.run(run, batch, needs)
            with self.adapters.disabled():
                return self._head.run(run, batch, needs)

    def _named_trainable(self, adapter_name: str) -> Iterable[tuple[str, Parameter]]:
        return self.adapters.named_trainable(adapter_name)

    def _create_adapter(self, adapter_name: str, config_or_dir: Any, **kwargs: Any) -> None:
        self._no_unknown('add_adapter_to_model', kwargs)
        self.adapters.add(adapter_name, config_or_dir)

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        return self.precision.make_scaler()

    @contextmanager
    def adapter(self, adapter_name: str) -> Iterator[str]:
        """As in the protocol; the adapter is also the active one of the module, for `model.model.generate(...)`."""
        before = self.adapters.active
        with super().adapter(adapter_name) as name:
            try:
                self.adapters.activate(name)
                yield name
            finally:
                self.adapters.activate(before)

    def _describe(self) -> dict[str, str]:
        return {
            'model': f'{type(self.adapters.base).__name__} from {self.model_id or "its config (random weights)"}',
            'precision': str(self.precision),
            'device': f'{self.device}, {self.device_mesh.world_size} process(es)',
        }

    # -- weights ---------------------------------------------------------------------------------------------------------------

    def get_state_dict(self, *, adapter_name: str | None = None) -> dict[str, Tensor]:
        name = self._adapters.get(adapter_name).adapter_name
        weights = self.adapters.state_dict(name) if name else self.adapters.base.state_dict()
        return {key: value.detach().to('cpu', copy=True) for key, value in weights.items()}

    def _export_weights(self, folder: Path, adapter_name: str) -> None:
        if adapter_name:
            self.adapters.save(adapter_name, folder, self.model_id)
        else:
            self.adapters.base.save_pretrained(str(folder))
        template = self._adapters.get(adapter_name).template
        if template is not None:
            template.save_pretrained(folder)
        elif self._folder is not None:
            copy_tokenizer_files(self._folder, folder)

    def _import_weights(self, folder: Path, adapter_name: str) -> None:
        if adapter_name:
            self.adapters.load(adapter_name, folder)
            return
        weights = _read_safetensors(folder)
        module = self.adapters.base
        _check_keys(module, weights, folder)
        module.load_state_dict(weights, strict=False)
        module.tie_weights()

    def _replace_module(self, module: nn.Module) -> None:
        if self.adapters.peft is not None:
            raise StateError(
                'A patch that returns another module comes before add_adapter_to_model(), which wraps the module.'
            )
        if self._adapters.get('').optimizer is not None:
            raise StateError(
                'A patch that returns another module comes before set_optimizer(), which holds the old parameters.'
            )
        self.adapters = PeftAdapters(module)  # type: ignore[arg-type]
        self._head = OutputHead(module)  # type: ignore[arg-type]
        self._accepted = _forward_keywords(module)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode within the context; the mode before it after it."""
    was_training = module.training
    if was_training:
        module.eval()
    try:
        yield
    finally:
        if was_training:
            module.train()


def _is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether positions start again within a row: it holds several samples, which must not see each other."""
    positions, mask = batch.get('position_ids'), batch.get('attention_mask')
    if positions is None or mask is None or positions.ndim != 2 or positions.shape != mask.shape:
        return False
    return bool(((positions[:, 1:] == 0) & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)).any())


def _check_can_pack(module: nn.Module) -> None:
    """Raise for layers that carry a state from token to token and would carry it from sample to sample."""
    config: Any = module.config
    kinds = set(getattr(config.get_text_config(), 'layer_types', None) or ())
    stateful = sorted(kind for kind in kinds if 'linear' in kind or 'mamba' in kind or 'recurrent' in kind)
    if stateful:
        raise NotSupportedError(
            f'{type(module).__name__} has layers of type {", ".join(stateful)}, which would carry their state across packed samples. '
            'Use a Dataset without packing, so that each row is one sample.'
        )


def _forward_keywords(module: nn.Module) -> frozenset[str]:
    """The batch's keys that the module's forward names, also where a subclass hides them behind `**kwargs`."""
    forwards = [cls.__dict__['forward'] for cls in type(module).__mro__ if 'forward' in cls.__dict__]
    return frozenset(name for forward in forwards for name in inspect.signature(forward).parameters) - _NOT_FOR_MODULE


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


def _check_keys(module: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Every parameter has its weights (or is tied to one that has), and every weight its parameter."""
    here = module.state_dict()
    by_storage: dict[int, set[str]] = {}
    for key, value in here.items():
        by_storage.setdefault(value.data_ptr(), set()).add(key)
    missing = [
        key for key, value in here.items() if key not in weights and not by_storage[value.data_ptr()] & weights.keys()
    ]
    unexpected = [key for key in weights if key not in here]
    wrong = [key for key, value in weights.items() if key in here and here[key].shape != value.shape]
    if missing or unexpected or wrong:
        raise CheckpointError(
            f'{folder} does not fit {type(module).__name__}: missing {missing[:3] or "none"}, unexpected {unexpected[:3] or "none"}, '
            f'other shapes {wrong[:3] or "none"} (the first three of each).'
        )
