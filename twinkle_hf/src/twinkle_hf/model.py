"""`TransformersModel`: any Transformers model, with or without PEFT adapters, behind the protocol."""

from __future__ import annotations

import inspect
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from twinkle.device_mesh import DeviceMesh
from twinkle.errors import ConfigError, NotSupportedError, StateError
from twinkle.launcher import local_rank, rank, world_size
from twinkle.model.base import BaseModel
from twinkle.remote import remote_class
from twinkle.runtime import default_device_mesh
from twinkle_hf.fp8 import check_fp8_shape, convert_to_fp8
from twinkle_hf.head import OutputHead
from twinkle_hf.loading import copy_tokenizer_files, load_module
from twinkle_hf.options import check_mesh
from twinkle_hf.packed import check_attention, check_can_pack, flatten_rows, is_packed, takes_one_row, unflatten_rows
from twinkle_hf.parallel import build_layout
from twinkle_hf.parallel.gradients import full_tensor, group_by_layout
from twinkle_hf.parallel.states import load_training_state, save_training_state
from twinkle_hf.parallel.weights import gather_weights, twin_of
from twinkle_hf.patch import enable_gradient_checkpointing
from twinkle_hf.peft_adapters import PeftAdapters, cpu_copy, merge_into
from twinkle_hf.pooling import Pooling
from twinkle_hf.precision import Precision
from twinkle_hf.weights_in import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from torch.nn import Parameter
    from transformers import PretrainedConfig

    from twinkle.data_format import ModelOutput
    from twinkle_hf.parallel.ulysses import SequenceSplit, Whole

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
        strategy: who spreads the model over several processes: `'accelerate'` (its DistributedDataParallel and FSDP2), or
            `'native_fsdp'` (PyTorch's FSDP2, and Transformers' own tensor and expert parallelism).
        ddp_config: with `'accelerate'`, for full-parameter training on a mesh of `dp_size`: keys of its
            `DistributedDataParallelKwargs`.
        fsdp_config: for a mesh with `fsdp_size`: with `'native_fsdp'` the attributes of
            `twinkle_hf.parallel.sharded.ShardOptions`, with `'accelerate'` those of its `FullyShardedDataParallelPlugin`.
        memory_efficient_init: with `fsdp_size`, only rank 0 loads the weights, and the others are given their shards.
        grad_scaler_config: keywords of `torch.amp.GradScaler`.
        fp8_config: keywords of `accelerate.utils.TERecipeKwargs`, for `mixed_precision='fp8'`, which trains by Accelerate's Transformer
            Engine recipe and needs a GPU that has fp8.
        gradient_checkpointing: recompute activations in backward, to save memory.
        pooling: how an embedding is made of the hidden states of a sample: their `'mean'`, the first (`'cls'`), or the `'last'`. By
            default what the model's folder says (Sentence Transformers models do), else `'last'` for causal models, `'mean'` for others.
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
        fp8_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        gradient_checkpointing: bool = False,
        pooling: Literal['mean', 'cls', 'last'] | None = None,
        remote_group: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.device_mesh = device_mesh if device_mesh is not None else default_device_mesh()
        check_mesh(self.device_mesh, strategy)
        self.device_mesh.check_world(world_size())
        dtype = kwargs.pop('dtype', kwargs.pop('torch_dtype', None))
        self.precision = Precision.choose(mixed_precision, self.device_mesh.device_type, dtype, grad_scaler_config)
        self.strategy = strategy
        self.remote_group = remote_group
        self.model_id = None if model_id is None else str(model_id)
        if model_id is None and self.device_mesh.tp_size * self.device_mesh.ep_size > 1:
            raise ConfigError(
                'tp_size and ep_size need model_id: each rank reads its part of the weights from files. Save a model with random weights '
                'once, and give its folder.'
            )
        if fp8_config and self.precision.name != 'fp8':
            raise ConfigError(f"fp8_config is for mixed_precision='fp8'; it is {self.precision.name!r} here.")
        self._layout = build_layout(
            self.device_mesh,
            self.device,
            strategy=strategy,
            ddp_config=ddp_config,
            fsdp_config=fsdp_config,
            memory_efficient_init=memory_efficient_init,
        )

        def load(*, on_meta: bool = False, **also: Any) -> tuple[Any, Path | None]:
            options = {**kwargs, **also}
            dtype = self.precision.parameter_dtype
            found = load_module(model_cls, model_id, config, dtype, options, on_meta=on_meta)
            self._module_class: type = type(found[0])  # FSDP2 puts a class of its own in its place
            return found

        def prepare(module: Any) -> None:
            self._prepare_module(module)
            if self.precision.name == 'fp8':
                convert_to_fp8(module, fp8_config or {})
            if gradient_checkpointing:
                enable_gradient_checkpointing(module)

        module, self._folder = self._layout.load(load, prepare)
        self._sequences: SequenceSplit | None = None
        if self.device_mesh.ulysses_size > 1:
            from twinkle_hf.parallel.ulysses import SequenceSplit

            assert self._layout.groups is not None
            self._sequences = SequenceSplit(module, self._layout.groups)
        self.pooling = Pooling.choose(pooling, self._folder, module)
        self.adapters = self._make_adapters(module)
        self._head = OutputHead(module)
        self._accepted = _forward_keywords(module)
        super().__init__()

    def _prepare_module(self, module: Any) -> None:
        """The module was loaded, and is not sharded yet."""

    def _make_adapters(self, module: Any) -> Any:
        """What holds the module's adapters."""
        return PeftAdapters(module)

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
        if not disable_lora:
            return self._run(batch, needs=needs, training=training, adapter_name=adapter_name)
        with self.adapters.disabled():
            return self._run(batch, needs=needs, training=training, adapter_name=adapter_name)

    def _run(
        self, batch: Mapping[str, Any], *, needs: frozenset[str], training: bool, adapter_name: str
    ) -> ModelOutput:
        """Run the module as its adapters are."""
        module = self.adapters.module
        with ExitStack() as stack:
            if training:
                check_attention(self.adapters.base, self.device.type)
                if not module.training:
                    module.train()
                self._begin_micro_batch(adapter_name)
            else:
                stack.enter_context(_evaluating(module))
                stack.enter_context(torch.no_grad())
            stack.enter_context(self.precision.autocast())
            called = self._layout.callable(self.adapters.called, training=training, has_adapter=bool(adapter_name))
            return self._forward(called, batch, needs)

    def _begin_micro_batch(self, adapter_name: str) -> None:
        window = self._adapters.get(adapter_name).window
        self._layout.begin(
            self.adapters.base,
            first=window.micro_batches == 0,
            last=window.micro_batches + 1 >= window.length,
            has_adapter=bool(adapter_name),
            apart=self._has_aux_loss(),
        )

    def _has_aux_loss(self) -> bool:
        text: Any = self.adapters.base.config.get_text_config()
        return bool(getattr(text, 'output_router_logits', False))

    def _forward(self, module: nn.Module, batch: Mapping[str, Any], needs: frozenset[str]) -> ModelOutput:
        """The module's forward on a batch, padded or packed."""
        rows, base = batch, self.adapters.base
        packed = is_packed(batch)
        if packed:
            check_can_pack(base)
            if takes_one_row(base) and len(batch['position_ids']) > 1:
                rows = flatten_rows(batch)
        pooled = 'embeddings' in needs
        wanted = (needs - {'embeddings'}) | {'hidden_states'} if pooled else needs
        if self._sequences is None:
            outputs = self._call(module, rows, wanted, packed=packed)
        else:
            part, whole = self._sequences.part_of(rows, packed=packed, dtype=base.dtype)
            outputs = self._call(module, part, wanted, packed=True, whole=whole)
            outputs = self._sequences.gather(outputs, rows['input_ids'].shape[1])
        if rows is not batch:
            outputs = unflatten_rows(outputs, batch)
        if pooled:
            if 'hidden_states' not in outputs:
                raise NotSupportedError(
                    f"{type(base).__name__} gives no hidden states to make embeddings of; load it with model_cls='AutoModel'."
                )
            outputs['embeddings'] = self.pooling(outputs['hidden_states'], batch)
            if 'hidden_states' not in needs:
                del outputs['hidden_states']
        return outputs

    def _call(
        self,
        module: nn.Module,
        rows: Mapping[str, Any],
        needs: frozenset[str],
        *,
        packed: bool,
        whole: Whole | None = None,
    ) -> ModelOutput:
        keywords = {key: rows[key] for key in rows if key in self._accepted}
        if packed:
            # Transformers keeps packed samples apart by their positions, but only where no mask says that all may see all.
            keywords.pop('attention_mask', None)
        if self.precision.name == 'fp8':
            check_fp8_shape(keywords.get('input_ids'), self.adapters.base)
        if 'use_cache' in self._accepted:
            keywords['use_cache'] = False

        def run() -> Any:
            if whole is None or self._sequences is None:
                return module(**keywords, return_dict=True)
            output = module(**keywords, **whole.keywords, return_dict=True)
            if getattr(output, 'aux_loss', None) is not None:
                output.aux_loss = self._sequences.aux_loss(self.adapters.base, output, whole)
            return output

        return self._head.run(run, rows, needs)

    def _named_trainable(self, adapter_name: str) -> Iterable[tuple[str, Parameter]]:
        return self.adapters.named_trainable(adapter_name)

    def _create_adapter(self, adapter_name: str, config_or_dir: Any, **kwargs: Any) -> None:
        self._no_unknown('add_adapter_to_model', kwargs)
        self.adapters.add(adapter_name, config_or_dir)
        own = [parameter for _, parameter in self.adapters.named_trainable(adapter_name)]
        self._layout.adapter_added(self.adapters.module, own, adapter_name)

    # -- over ranks ------------------------------------------------------------------------------------------------------------

    def sum_over_data(self, value: Tensor) -> Tensor:
        return self._layout.sum_over_data(value)

    def prepare_backward(self, *, of_aux_loss: bool) -> None:
        self._layout.prepare_backward(self.adapters.base, of_aux_loss=of_aux_loss)

    def reduce_gradients(self, adapter_name: str) -> float:
        parameters = self.trainable_parameters(adapter_name)
        return self._layout.reduce(self.adapters.base, parameters, has_adapter=bool(adapter_name))

    def _arrange_optimizer(self, optimizer: Any) -> None:
        if self._layout.sharded:
            group_by_layout(optimizer)

    def clip_gradients(self, parameters: Sequence[Parameter], max_norm: float, norm_type: float) -> float:
        return self._layout.clip(parameters, max_norm, norm_type)

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
        return {key: full_tensor(value.detach()).to('cpu', copy=True) for key, value in weights.items()}

    def _weights_writer(self, adapter_name: str, *, snapshot: bool) -> Callable[[Path], None]:
        if adapter_name:
            write = self.adapters.writer(adapter_name, self.model_id, snapshot=snapshot)
        elif self._layout.sharded:
            write = self._whole_model().save_pretrained
        else:
            write = (cpu_copy(self.adapters.base) if snapshot else self.adapters.base).save_pretrained
        return self._with_tokenizer(write, adapter_name)

    def _whole_model(self) -> Any:
        """A plain module on the CPU with all weights, on rank 0; one without memory elsewhere. Every rank takes part."""
        base = self.adapters.base
        keys = self.adapters.base_keys()
        state = gather_weights(
            {keys[key]: value for key, value in base.state_dict(keep_vars=True).items() if key in keys}
        )
        twin = twin_of(self._module_class, base.config, state if rank() == 0 else None)
        twin.generation_config = getattr(base, 'generation_config', None)
        return twin

    def _merged_writer(self, adapter_name: str) -> Callable[[Path], None]:
        if not self._layout.sharded:
            return self._with_tokenizer(self.adapters.merged(adapter_name).save_pretrained, adapter_name)
        twin = self._whole_model()
        adapter = self.adapters.state_dict(adapter_name)
        if rank() != 0:
            return self._with_tokenizer(twin.save_pretrained, adapter_name)
        config = self.adapters.config(adapter_name)
        return self._with_tokenizer(merge_into(twin, config, adapter, adapter_name).save_pretrained, adapter_name)

    def _with_tokenizer(self, write: Callable[[Path], Any], adapter_name: str) -> Callable[[Path], None]:
        template = self._adapters.get(adapter_name).template

        def write_all(folder: Path) -> None:
            write(folder)
            if template is not None:
                template.save_pretrained(folder)
            elif self._folder is not None:
                copy_tokenizer_files(self._folder, folder)

        return write_all

    def _import_weights(self, folder: Path, adapter_name: str) -> None:
        if adapter_name:
            self.adapters.load(adapter_name, folder)
            return
        load_weights(self.adapters.base, self._module_class, folder)

    def _save_training_state(self, folder: Path, stem: str, kept: dict[str, Any]) -> None:
        save_training_state(folder, stem, kept)

    def _load_training_state(self, folder: Path, stem: str, adapter_name: str) -> dict[str, Any]:
        return load_training_state(folder, stem, self._named_trainable(adapter_name))

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


def _forward_keywords(module: nn.Module) -> frozenset[str]:
    """The batch's keys that the module's forward names, also where a subclass hides them behind `**kwargs`."""
    forwards = [cls.__dict__['forward'] for cls in type(module).__mro__ if 'forward' in cls.__dict__]
    return frozenset(name for forward in forwards for name in inspect.signature(forward).parameters) - _NOT_FOR_MODULE
