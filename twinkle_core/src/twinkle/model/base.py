"""`BaseModel`: everything of the protocol that does not depend on the backend.

A backend subclasses it and gives the primitives at the top of the class: run the module, name its trainable parameters, make an
adapter, and move weights in and out. What depends on how parameters are laid out (sums over ranks, clipping) has a default for one
process and is overridden where there are more.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from twinkle import checkpoint as store
from twinkle.errors import ConfigError, NotSupportedError, StateError
from twinkle.launcher import rank
from twinkle.loss.base import as_loss
from twinkle.model import checkpointing, stepping
from twinkle.model.adapters import AdapterTable
from twinkle.model.evaluation import (
    can_evaluate,
    chosen_outputs,
    loss_of,
    mean_of,
    needs_of,
    only,
    update_metrics,
    with_loss,
)
from twinkle.model.inputs import prepare_inputs
from twinkle.model.merging import merge_outputs
from twinkle.model.setup import SetupMethods
from twinkle.model.state import PendingForward, TrainState
from twinkle.model.summary import summarise
from twinkle.patch import apply_patch
from twinkle.remote import remote_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor, nn
    from torch.nn import Parameter

    from twinkle.data_format import LossOutput, ModelOutput
    from twinkle.metric import Metric

__all__ = ['BaseModel']


class BaseModel(SetupMethods):
    """The shared half of a backend. See `TwinkleModel` for what each public method promises."""

    cannot: ClassVar[Mapping[str, str]] = {}
    """Methods that this backend refuses, with the reason; the conformance kit then tests the refusal."""

    def __init__(self) -> None:
        self._adapters = AdapterTable(self._new_state)

    # -- primitives a backend gives --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where inputs go."""

    @abstractmethod
    def _run_module(
        self, batch: Mapping[str, Any], adapter_name: str, needs: frozenset[str], *, training: bool, disable_lora: bool
    ) -> ModelOutput:
        """Run the module on a collated batch. At least the keys of `needs` must be in the result.

        With `training` the module is in training mode and gradients are recorded. Whatever it was in before (mode, active adapter)
        holds again afterwards, also after an exception.
        """

    @abstractmethod
    def _named_trainable(self, adapter_name: str) -> Iterable[tuple[str, Parameter]]:
        """Names and parameters that the adapter (or the base model, `''`) trains, in a stable order."""

    @abstractmethod
    def _create_adapter(self, adapter_name: str, config_or_dir: Any, **kwargs: Any) -> None:
        """Put the adapter into the module, or raise and leave it as it was."""

    @abstractmethod
    def _weights_writer(self, adapter_name: str, *, snapshot: bool) -> Callable[[Path], None]:
        """What writes the weights into a folder, in the layout that other tools read.

        With `snapshot` it is called in a thread while training goes on, and must write the weights as they are now.
        """

    @abstractmethod
    def _import_weights(self, folder: Path, adapter_name: str) -> None:
        """Read weights from `folder`; missing or unexpected keys raise before anything is changed."""

    def _merged_writer(self, adapter_name: str) -> Callable[[Path], None]:
        """What writes the base model with the adapter merged into it, as both are now."""
        raise NotSupportedError(f'{type(self).__name__} cannot merge adapters: save without merge_lora=True.')

    def _save_training_state(self, folder: Path, stem: str, kept: dict[str, Any]) -> None:
        """Write the state of optimizer, schedule and scaler. Every rank calls it; where all hold all of it, the first one writes."""
        if rank() == 0:
            store.save_state(folder, stem, kept)

    def _load_training_state(self, folder: Path, stem: str, adapter_name: str) -> dict[str, Any]:
        """Read what `_save_training_state` wrote."""
        kept: dict[str, Any] = store.load_state(folder, stem)
        return kept

    def _rng_state(self, adapter_name: str) -> Any:
        """The random state that goes with an adapter's training state: the process's."""
        return store.rng_state()

    def _set_rng_state(self, adapter_name: str, state: Any) -> None:
        store.set_rng_state(state)

    def _make_scaler(self) -> Any:
        """A gradient scaler for fp16 training, else None."""
        return None

    def _describe(self) -> dict[str, str]:
        """Lines for the head of `get_train_configs`: model, precision, mesh."""
        return {}

    # -- GradientOps: one process; overridden where parameters or data are spread over ranks --------------------------------------

    def trainable_parameters(self, adapter_name: str) -> Sequence[Parameter]:
        """The parameters that this adapter trains, in a stable order."""
        return [parameter for _, parameter in self._named_trainable(adapter_name)]

    def sum_over_data(self, value: Tensor) -> Tensor:
        """`value` summed over data-parallel ranks."""
        return value

    def prepare_backward(self, *, of_aux_loss: bool) -> None:
        """Where a micro-batch has an auxiliary loss, its backward is about to run, or the main one through the same graph."""

    def reduce_gradients(self, adapter_name: str) -> float:
        """Bring the window's gradients together over ranks; returns what is still to be multiplied for their sum."""
        return 1.0

    def clip_gradients(self, parameters: Sequence[Parameter], max_norm: float, norm_type: float) -> float:
        """Clip in place by the global norm; returns the norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))

    # -- running ---------------------------------------------------------------------------------------------------------------

    @remote_function(dispatch='slice_dp', collect=merge_outputs)
    def forward(
        self, inputs: Any, *, adapter_name: str | None = None, return_logits: bool = True, **kwargs: Any
    ) -> ModelOutput:
        self._refuse('forward')
        self._no_unknown('forward', kwargs)
        state = self._adapters.get(adapter_name)
        batch = self._begin(state, inputs)
        needs = needs_of(state, batch, is_training=True, return_logits=return_logits, with_loss=True)
        self._add_reference(state, batch, {})
        outputs = self._run_module(batch, state.adapter_name, needs, training=True, disable_lora=False)
        state.pending = PendingForward(batch, outputs)
        return outputs

    @remote_function(dispatch='slice_dp', collect=merge_outputs)
    def forward_only(
        self,
        inputs: Any,
        *,
        adapter_name: str | None = None,
        disable_lora: bool = False,
        return_logits: bool = True,
        return_outputs: Iterable[str] | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        self._refuse('forward_only')
        state = self._adapters.get(adapter_name)
        batch = self._prepare_inputs(state, inputs)
        if return_outputs is not None:
            needs = chosen_outputs(return_outputs)
            return only(
                self._run_module(batch, state.adapter_name, needs, training=False, disable_lora=disable_lora), needs
            )
        evaluated = not disable_lora and can_evaluate(state, batch, kwargs)
        needs = needs_of(state, batch, is_training=False, return_logits=return_logits, with_loss=evaluated)
        outputs = self._run_module(batch, state.adapter_name, needs, training=False, disable_lora=disable_lora)
        with torch.no_grad():
            loss = loss_of(state, batch, outputs, kwargs) if evaluated else None
            update_metrics(state, batch, outputs, loss, is_training=False)
        state.pending = PendingForward(batch, outputs, loss, is_training=False)
        return with_loss(outputs, loss) if loss is not None else outputs

    @remote_function(dispatch='all', collect='mean')
    def calculate_loss(self, *, adapter_name: str | None = None, **kwargs: Any) -> float:
        self._refuse('calculate_loss')
        state = self._adapters.get(adapter_name)
        pending = state.pending
        if pending is None:
            raise StateError('calculate_loss() needs a forward pass: call forward(inputs) (or forward_only) first.')
        if pending.loss is None:
            with torch.set_grad_enabled(pending.is_training):
                pending.loss = loss_of(state, pending.inputs, pending.outputs, kwargs)
            update_metrics(state, pending.inputs, pending.outputs, pending.loss, is_training=pending.is_training)
        return mean_of(pending.loss)

    @remote_function(dispatch='all')
    def backward(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        self._refuse('backward')
        state = self._state(adapter_name, gradient_accumulation_steps)
        pending = state.pending
        if pending is None or pending.loss is None:
            raise StateError(
                'backward() needs a loss: call forward(inputs) and calculate_loss() first, or forward_backward().'
            )
        if not pending.is_training:
            raise StateError(
                'backward() cannot follow forward_only(), which records no gradients. Call forward() instead.'
            )
        self._backward(state, pending.outputs, pending.loss)

    @remote_function(dispatch='slice_dp', collect=merge_outputs)
    def forward_backward(
        self,
        inputs: Any,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        return_logits: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        state = self._state(adapter_name, gradient_accumulation_steps)
        batch = self._begin(state, inputs)
        needs = needs_of(state, batch, is_training=True, return_logits=return_logits, with_loss=True)
        self._add_reference(state, batch, kwargs)
        outputs = self._run_module(batch, state.adapter_name, needs, training=True, disable_lora=False)
        loss = loss_of(state, batch, outputs, kwargs)
        self._backward(state, outputs, loss)
        update_metrics(state, batch, outputs, loss, is_training=True)
        return with_loss({'logits': outputs['logits'].detach()} if return_logits else {}, loss)

    def _begin(self, state: TrainState, inputs: Any) -> dict[str, Any]:
        """Start a training micro-batch: what was pending is dropped, metrics take the time, inputs become tensors."""
        state.pending = None
        for metric in state.train_metrics.values():
            metric.begin()
        return self._prepare_inputs(state, inputs)

    def _prepare_inputs(self, state: TrainState, inputs: Any) -> dict[str, Any]:
        return prepare_inputs(state, inputs, self.device)

    def _backward(self, state: TrainState, outputs: ModelOutput, loss: LossOutput) -> None:
        state.pending = None
        stepping.accumulate(state, loss, outputs.get('aux_loss'), self)

    def _add_reference(self, state: TrainState, batch: dict[str, Any], kwargs: Mapping[str, Any]) -> None:
        """Log-probabilities of the reference, for a loss that needs them and was given none: the base model, adapter disabled."""
        if not state.loss.needs_reference or not state.adapter_name:
            return
        if batch.get('ref_logps') is None and kwargs.get('ref_logps') is None and 'labels' in batch:
            outputs = self._run_module(
                batch, state.adapter_name, frozenset({'logps'}), training=False, disable_lora=True
            )
            batch['ref_logps'] = outputs['logps']

    # -- stepping --------------------------------------------------------------------------------------------------------------

    @remote_function(dispatch='all', collect='first')
    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> float | None:
        state = self._state(adapter_name, gradient_accumulation_steps)
        return stepping.clip(state, _check_norm(max_grad_norm), norm_type, self)

    @remote_function(dispatch='all')
    def step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        stepping.optimizer_step(self._state(adapter_name, gradient_accumulation_steps), self)

    @remote_function(dispatch='all')
    def zero_grad(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        stepping.zero(self._state(adapter_name, gradient_accumulation_steps), self)

    @remote_function(dispatch='all')
    def lr_step(self, *, adapter_name: str | None = None, gradient_accumulation_steps: int | None = None) -> None:
        stepping.schedule_step(self._state(adapter_name, gradient_accumulation_steps))

    @remote_function(dispatch='all', collect='first')
    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> float | None:
        state = self._state(adapter_name, gradient_accumulation_steps)
        if flush:
            if not state.window.is_partial:
                return None
            state.window.flushed = True
        if state.window.micro_batches and not state.window.at_boundary:
            return None
        max_grad_norm = _check_norm(max_grad_norm)
        norm = stepping.clip(state, max_grad_norm, norm_type, self)
        stepping.optimizer_step(state, self)
        stepping.schedule_step(state)
        stepping.zero(state, self)
        return norm

    def _state(self, adapter_name: str | None, gradient_accumulation_steps: int | None) -> TrainState:
        state = self._adapters.get(adapter_name)
        state.window.govern(gradient_accumulation_steps)
        return state

    # -- setting up ------------------------------------------------------------------------------------------------------------

    def _new_state(self, adapter_name: str) -> TrainState:
        state = TrainState(
            adapter_name,
            loss=as_loss(self._build('losses', 'default')),
            scaler=self._make_scaler(),
            processor=self._build('input_processors', 'default'),
        )
        for name in ('loss', 'train'):
            state.train_metrics[name] = self._build('metrics', name)
        state.eval_metrics['loss'] = self._build('metrics', 'loss')
        return state

    @remote_function(dispatch='all', collect='first')
    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int | None = None, **kwargs: Any
    ) -> str:
        self._adapters.check_new(adapter_name)
        window = copy.copy(self._adapters.states[0].window)
        window.govern(gradient_accumulation_steps)  # a bad value is refused before the module changes
        self._create_adapter(adapter_name, config_or_dir, **kwargs)
        self._adapters.add(adapter_name).window.govern(gradient_accumulation_steps)
        return adapter_name

    @remote_function(dispatch='all', collect='first')
    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> dict[str, float]:
        state = self._adapters.get(adapter_name)
        info = state.info()
        result: dict[str, float] = {}
        for metric in state.metrics(is_training).values():
            result.update(metric.compute(self._reduce_sums(metric), info))
            metric.reset()
        return result

    def _reduce_sums(self, metric: Metric) -> dict[str, float]:
        sums = metric.sums()
        if not sums:
            return {}
        values = self.sum_over_data(torch.tensor(list(sums.values()), dtype=torch.float64))
        return dict(zip(sums, values.tolist(), strict=True))

    @remote_function(dispatch='all')
    def apply_patch(self, patch: Any, **kwargs: Any) -> None:
        patched = apply_patch(self.model, patch, backend=self.backend, **kwargs)
        if patched is not self.model:
            self._replace_module(patched)

    def _replace_module(self, module: nn.Module) -> None:
        raise NotSupportedError(
            f'{type(self).__name__} takes patches that change the module in place only; this one returned another.'
        )

    @remote_function(dispatch='all', collect='first')
    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        states = self._adapters.states if adapter_name is None else [self._adapters.get(adapter_name)]
        return summarise(self, states)

    def adapter(self, adapter_name: str) -> AbstractContextManager[str]:
        return self._adapters.enclosing(adapter_name)

    # -- keeping ---------------------------------------------------------------------------------------------------------------

    @remote_function(dispatch='all', collect='first')
    def save(
        self,
        name: str | None = None,
        output_dir: str | Path = 'output',
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        keep_last: int | None = None,
        async_save: bool = False,
        merge_lora: bool = False,
    ) -> str:
        state = self._adapters.get(adapter_name)
        if merge_lora and save_optimizer:
            raise ConfigError(
                'save(merge_lora=True) writes a complete model, which an adapter cannot resume from: leave save_optimizer out, and '
                'save the training state in a checkpoint of its own.'
            )
        if merge_lora and not state.adapter_name:
            raise ConfigError('save(merge_lora=True): there is no adapter to merge; save() writes the whole model.')

        def writer(snapshot: bool) -> Callable[[Path], None]:
            if merge_lora:
                return self._merged_writer(state.adapter_name)
            return self._weights_writer(state.adapter_name, snapshot=snapshot)

        return checkpointing.save(
            self,
            state,
            writer,
            name,
            output_dir,
            save_optimizer=save_optimizer,
            consumed_train_samples=consumed_train_samples,
            keep_last=keep_last,
            async_save=async_save,
        )

    @remote_function(dispatch='all')
    def load(self, checkpoint: str | Path, *, adapter_name: str | None = None) -> None:
        state = self._adapters.get(adapter_name)
        self._import_weights(checkpointing.find(checkpoint), state.adapter_name)

    @remote_function(dispatch='all', collect='first')
    def resume_from_checkpoint(
        self, checkpoint: str | Path, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        state = self._adapters.get(adapter_name)
        return checkpointing.resume(self, state, checkpoint, resume_only_model=resume_only_model)

    def _refuse(self, method: str) -> None:
        if method in self.cannot:
            raise NotSupportedError(f'{type(self).__name__}.{method}() is not possible here: {self.cannot[method]}')

    def _no_unknown(self, method: str, kwargs: Mapping[str, Any]) -> None:
        if kwargs:
            raise ConfigError(f'{method}() takes no {sorted(kwargs)}; keywords for the loss go to calculate_loss().')


def _check_norm(max_grad_norm: float) -> float:
    if not max_grad_norm > 0:
        raise ConfigError(
            f'max_grad_norm={max_grad_norm!r} must be above 0 (use float("inf") to measure without clipping).'
        )
    return max_grad_norm
