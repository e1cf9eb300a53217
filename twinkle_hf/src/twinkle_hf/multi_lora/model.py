"""`MultiLoraTransformersModel`: many tenants train their own LoRA on one base model, in turn or in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from twinkle.data_format import LossOutput
from twinkle.errors import ConfigError, DataError, MeshError, NotSupportedError
from twinkle.model import stepping
from twinkle.model.evaluation import can_evaluate, loss_of, needs_of, update_metrics, with_loss
from twinkle.model.fused import FusedBatch, fused_needs, group_rows, join_batches, split_outputs
from twinkle.model.multi_lora import LoraTenant, MultiLora, SlotTable, TenantTable
from twinkle.remote import remote_class, remote_function
from twinkle_hf.model import TransformersModel
from twinkle_hf.multi_lora.slots import Slots
from twinkle_hf.multi_lora.tenants import SlotAdapters, hollow_copy

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from twinkle import DeviceMesh
    from twinkle.data_format import ModelOutput
    from twinkle.model.state import TrainState

__all__ = ['MultiLoraTransformersModel']


@remote_class(execute='all')
class MultiLoraTransformersModel(TransformersModel):
    """A frozen base model with room for several tenants' LoRAs, each trained as if it were alone.

    Tenants come with `multi_lora.acquire_lora(name, LoraConfig(...))` (or `add_adapter_to_model`) and go with
    `multi_lora.release_lora(name)`. Every method takes a tenant's name as `adapter_name`. `forward_backward` and `forward_only` also
    take a list, the tenant of each row, and then run the base model once for all of them; what they return is by tenant.
    `clip_grad_and_step` takes a list of tenants to step.

    Args:
        model_cls, model_id, config, device_mesh, mixed_precision, grad_scaler_config: as for `TransformersModel`.
        max_loras: slots.
        max_r: the largest rank that a slot takes. Slots take max_loras x max_r x (in + out) numbers at each linear layer.
        max_length: the most tokens of a row.
        **kwargs: as for `TransformersModel`.

    Raises:
        ConfigError: an option that cannot work.
        MeshError: a mesh that splits the layers that slots are at (`tp_size`, `ep_size`).
    """

    def __init__(
        self,
        model_cls: Any = None,
        model_id: str | Path | None = None,
        config: PretrainedConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: Literal['no', 'fp8', 'fp16', 'bf16'] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        max_loras: int = 5,
        max_r: int = 32,
        max_length: int = 8192,
        **kwargs: Any,
    ) -> None:
        for name, value in (('max_loras', max_loras), ('max_r', max_r), ('max_length', max_length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f'{name}={value!r} must be an integer of at least 1.')
        if mixed_precision == 'fp8':
            raise NotSupportedError("mixed_precision='fp8' replaces the linear layers that slots are at; use 'bf16'.")
        self.max_length = max_length
        self._sizes = (max_loras, max_r)
        super().__init__(
            model_id,
            model_cls=model_cls,
            config=config,
            device_mesh=device_mesh,
            mixed_precision=mixed_precision,
            grad_scaler_config=grad_scaler_config,
            **kwargs,
        )
        if self.device_mesh.tp_size * self.device_mesh.ep_size > 1:
            raise MeshError(
                'tp_size and ep_size split the layers that slots are at; use dp_size, fsdp_size or ulysses_size.'
            )
        states = TenantTable(self._new_state)
        self._adapters = states
        self.multi_lora = MultiLora(SlotTable(max_loras, max_r), states, _Owner(self))

    # -- building --------------------------------------------------------------------------------------------------------------

    def _prepare_module(self, module: Any) -> None:
        module.requires_grad_(False)
        self._slots = Slots(self.device, *self._sizes)
        self._hollow = hollow_copy(module)
        head = module.get_output_embeddings() if hasattr(module, 'get_output_embeddings') else None
        linear = {
            name: part for name, part in module.named_modules() if isinstance(part, nn.Linear) and part is not head
        }
        self._slots.attach(linear)

    def _make_adapters(self, module: Any) -> Any:
        return SlotAdapters(module, self._slots, self._hollow)

    def _replace_module(self, module: nn.Module) -> None:
        raise NotSupportedError(
            'A patch that returns another module cannot be applied: slots are at the layers of this one.'
        )

    # -- tenants ---------------------------------------------------------------------------------------------------------------

    @remote_function(dispatch='all', collect='first')
    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int | None = None, **kwargs: Any
    ) -> str:
        self._no_unknown('add_adapter_to_model', kwargs)
        if gradient_accumulation_steps is not None:
            from twinkle.model.window import check_accumulation

            check_accumulation(gradient_accumulation_steps)
        slot = self.multi_lora.acquire_lora(adapter_name, config_or_dir)
        self._adapters.get(adapter_name).window.govern(gradient_accumulation_steps)
        return slot

    @contextmanager
    def adapter(self, adapter_name: str) -> Iterator[str]:
        """As `multi_lora.adapter`; the tenant is also what `model.model.generate(...)` uses."""
        before = self._slots.selection
        with self.multi_lora.adapter(adapter_name) as slot:
            try:
                self.adapters.activate(adapter_name)
                yield slot
            finally:
                self._slots.selection = before

    # -- running ---------------------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, state: TrainState, inputs: Any) -> dict[str, Any]:
        batch = super()._prepare_inputs(state, inputs)
        mask = batch.get('attention_mask')
        if mask is not None and mask.ndim == 2 and mask.shape[1] > self.max_length:
            lengths = mask.sum(1).tolist()
            for row, length in enumerate(lengths):
                if length > self.max_length:
                    raise DataError(
                        f'Row {row} of tenant {state.adapter_name!r} has {length} tokens, more than max_length={self.max_length} of this '
                        'model. Truncate in the template, or build the model with a larger max_length.'
                    )
        return batch

    def _run_module(
        self, batch: Mapping[str, Any], adapter_name: str, needs: frozenset[str], *, training: bool, disable_lora: bool
    ) -> ModelOutput:
        before = self._slots.selection
        try:
            if not training:
                return super()._run_module(batch, adapter_name, needs, training=False, disable_lora=disable_lora)
            with self.adapters.own_random_state(adapter_name):
                return super()._run_module(batch, adapter_name, needs, training=True, disable_lora=disable_lora)
        finally:
            self._slots.selection = before

    def _backward(self, state: TrainState, outputs: ModelOutput, loss: LossOutput) -> None:
        # Where activations are computed again in backward, it is with the tenant that they are of.
        with self._slots.using(self.adapters.selection([state.adapter_name], [1])):
            super()._backward(state, outputs, loss)

    @remote_function(dispatch='slice_dp')
    def forward_backward(self, inputs: Any, *, adapter_name: Any = None, **kwargs: Any) -> Any:
        if not _is_list(adapter_name):
            return super().forward_backward(inputs, adapter_name=adapter_name, **kwargs)
        steps, return_logits = kwargs.pop('gradient_accumulation_steps', None), kwargs.pop('return_logits', False)
        rows = self._rows_of(inputs, adapter_name)
        states = {name: self._state(name, steps) for name in self._of_all_ranks(rows)}
        batches = {name: self._begin(states[name], rows[name]) for name in states if name in rows}
        fused = join_batches(batches)
        needs = {}
        for name, batch in batches.items():
            needs[name] = needs_of(states[name], batch, is_training=True, return_logits=return_logits, with_loss=True)
            self._add_reference(states[name], batch, kwargs)
        outputs = self._run_fused(fused, needs, training=True)
        losses: dict[str, LossOutput] = {}
        parts = {part.name: part for part in fused.parts}
        own: dict[str, ModelOutput] = {}
        for name, state in states.items():
            if name in parts:
                own[name] = split_outputs(outputs, parts[name], needs[name])
                losses[name] = loss_of(state, batches[name], own[name], kwargs)
            else:
                losses[name] = LossOutput(torch.zeros((), device=self.device), 0.0)
        # All or none: whose window cannot take a backward is found out before any gradient moves.
        totals = [stepping.scaled(state, losses[name], self) for name, state in states.items()]
        with self._slots.using(self._selection(fused)):
            torch.stack([total for total in totals if total.requires_grad]).sum().backward()
        for name, state in states.items():
            stepping.count(state, losses[name])
            if name in parts:
                update_metrics(state, batches[name], own[name], losses[name], is_training=True)
        return {
            name: with_loss({'logits': own[name]['logits'].detach()} if return_logits else {}, losses[name])
            for name in own
        }

    @remote_function(dispatch='slice_dp')
    def forward_only(self, inputs: Any, *, adapter_name: Any = None, **kwargs: Any) -> Any:
        if not _is_list(adapter_name):
            return super().forward_only(inputs, adapter_name=adapter_name, **kwargs)
        return_logits, disable = kwargs.pop('return_logits', True), kwargs.pop('disable_lora', False)
        if kwargs.pop('return_outputs', None) is not None:
            raise NotSupportedError('return_outputs is for one tenant at a time.')
        rows = self._rows_of(inputs, adapter_name)
        states = {name: self._adapters.get(name) for name in rows}
        batches = {name: self._prepare_inputs(states[name], rows[name]) for name in rows}
        evaluated = {name: not disable and can_evaluate(states[name], batch, kwargs) for name, batch in batches.items()}
        needs = {
            name: needs_of(
                states[name], batch, is_training=False, return_logits=return_logits, with_loss=evaluated[name]
            )
            for name, batch in batches.items()
        }
        fused = join_batches(batches)
        outputs = self._run_fused(fused, needs, training=False, disable_lora=disable)
        found: dict[str, Any] = {}
        with torch.no_grad():
            for part in fused.parts:
                state, batch = states[part.name], batches[part.name]
                own = split_outputs(outputs, part, needs[part.name])
                loss = loss_of(state, batch, own, kwargs) if evaluated[part.name] else None
                update_metrics(state, batch, own, loss, is_training=False)
                found[part.name] = own if loss is None else with_loss(own, loss)
        return found

    @remote_function(dispatch='all', collect='first')
    def clip_grad_and_step(
        self, max_grad_norm: float = 1.0, norm_type: float = 2.0, *, adapter_name: Any = None, **kwargs: Any
    ) -> Any:
        if not _is_list(adapter_name):
            return super().clip_grad_and_step(max_grad_norm, norm_type, adapter_name=adapter_name, **kwargs)
        names = [
            self._adapters.get(name).adapter_name for name in adapter_name
        ]  # an unknown one is found before any steps
        step = super().clip_grad_and_step
        return {name: step(max_grad_norm, norm_type, adapter_name=name, **kwargs) for name in dict.fromkeys(names)}

    def _rows_of(self, inputs: Any, names: Sequence[Any]) -> dict[str, list[Any]]:
        return group_rows(inputs, [self._adapters.get(name).adapter_name for name in names])

    def _of_all_ranks(self, rows: Mapping[str, Any]) -> list[str]:
        """The tenants of this batch on any data rank, in one order: each of their windows is one of all ranks."""
        if self.device_mesh.data_world_size == 1:
            return list(rows)
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, list(rows))
        return list(dict.fromkeys(name for names in everyone for name in names))

    def _selection(self, fused: FusedBatch) -> Any:
        return self.adapters.selection(
            [part.name for part in fused.parts], [part.rows.stop - part.rows.start for part in fused.parts]
        )

    def _run_fused(
        self, fused: FusedBatch, needs: Mapping[str, frozenset[str]], *, training: bool, disable_lora: bool = False
    ) -> ModelOutput:
        names = [part.name for part in fused.parts]
        wanted = frozenset().union(*(fused_needs(one) for one in needs.values()))
        if training and self._has_aux_loss():
            raise NotSupportedError(
                "The routers' loss of a mixture of experts is of all rows together, so it is no tenant's own: give adapter_name one "
                'name, or load the model with output_router_logits=False.'
            )
        if training and getattr(self.model, 'is_gradient_checkpointing', False) and self.adapters.has_dropout(names):
            raise NotSupportedError(
                'Dropout of several tenants in one pass cannot be drawn again where activations are recomputed: give adapter_name one '
                'name, lora_dropout=0, or gradient_checkpointing=False.'
            )
        with self._slots.using(None):
            self._head.look()
        selection = None if disable_lora else self._selection(fused)
        with self._slots.using(selection):
            return self._run(fused.batch, needs=wanted, training=training, adapter_name=names[0])

    # -- keeping ---------------------------------------------------------------------------------------------------------------

    def _rng_state(self, adapter_name: str) -> Any:
        return {'tenant': self.adapters.random_state(adapter_name)}

    def _set_rng_state(self, adapter_name: str, state: Any) -> None:
        self.adapters.set_random_state(adapter_name, state['tenant'])

    def _describe(self) -> dict[str, str]:
        return {**super()._describe(), 'tenants': repr(self.multi_lora)}


class _Owner:
    """What the slot table asks of the model."""

    def __init__(self, model: MultiLoraTransformersModel) -> None:
        self._model = model

    def read_config(self, config_or_dir: Any) -> tuple[Any, int]:
        found: tuple[Any, int] = self._model.adapters.read_config(config_or_dir)
        return found

    def fill_slot(self, tenant: LoraTenant, config_or_dir: Any) -> Any:
        adapters = self._model.adapters
        config = adapters.fill(tenant, config_or_dir)
        own = [parameter for _, parameter in adapters.named_trainable(tenant.tenant_adapter_name)]
        self._model._layout.adapter_added(adapters.module, own, tenant.tenant_adapter_name)
        return config

    def clear_slot(self, tenant: LoraTenant) -> None:
        self._model.adapters.clear(tenant)


def _is_list(adapter_name: Any) -> bool:
    return isinstance(adapter_name, (list, tuple))
