"""Setting up an adapter's training: parts are resolved by name in the registries and put into its state."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from twinkle import registry
from twinkle.errors import ConfigError, StateError
from twinkle.loss.base import as_loss
from twinkle.model.protocol import TwinkleModel
from twinkle.remote import remote_function

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Parameter

    from twinkle.model.adapters import AdapterTable

__all__ = ['SetupMethods']


class SetupMethods(TwinkleModel):
    """The `set_*` methods and `add_metric`. See `TwinkleModel` for what each promises."""

    _adapters: AdapterTable

    if TYPE_CHECKING:  # a primitive of `BaseModel`

        def _named_trainable(self, adapter_name: str) -> Iterable[tuple[str, Parameter]]: ...

    def _build(self, kind: str, spec: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(registry, kind).build(spec, *args, backend=self.backend, **kwargs)

    @remote_function(dispatch='all')
    def set_loss(self, loss: Any, *, adapter_name: str | None = None, **kwargs: Any) -> None:
        state = self._adapters.get(adapter_name)
        state.loss = as_loss(self._build('losses', loss, **kwargs))

    @remote_function(dispatch='all')
    def set_optimizer(
        self,
        optimizer: Any = 'default',
        *,
        adapter_name: str | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        state = self._adapters.get(adapter_name)
        part = registry.optimizers.resolve(optimizer, backend=self.backend, trust_remote_code=trust_remote_code)
        if isinstance(part, type) or not hasattr(part, 'param_groups'):
            named = list(self._named_trainable(state.adapter_name))
            if not named:
                raise StateError(
                    f'{state.adapter_name or "The base model"!r} has no trainable parameters to optimise (all are frozen).'
                )
            takes_names = getattr(part, 'takes_named_parameters', False)
            part = part(named if takes_names else [parameter for _, parameter in named], **kwargs)
            self._arrange_optimizer(part)
        elif kwargs:
            raise ConfigError(
                f'set_optimizer: an optimizer that is built already takes no keywords, got {sorted(kwargs)}.'
            )
        state.optimizer, state.lr_scheduler = part, None

    def _arrange_optimizer(self, optimizer: Any) -> None:
        """An optimizer was built of the adapter's parameters, and has not stepped yet."""

    @remote_function(dispatch='all')
    def set_lr_scheduler(
        self,
        lr_scheduler: Any = 'default',
        *,
        adapter_name: str | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        state = self._adapters.get(adapter_name)
        if state.optimizer is None:
            raise StateError(
                "set_lr_scheduler() comes after set_optimizer(): a schedule moves an optimizer's learning rate."
            )
        part = registry.lr_schedulers.resolve(lr_scheduler, backend=self.backend, trust_remote_code=trust_remote_code)
        if isinstance(part, type) or not hasattr(part, 'get_last_lr'):
            part = part(state.optimizer, **kwargs)
        elif kwargs:
            raise ConfigError(
                f'set_lr_scheduler: a schedule that is built already takes no keywords, got {sorted(kwargs)}.'
            )
        elif part.optimizer is not state.optimizer:
            raise ConfigError('set_lr_scheduler: this schedule moves another optimizer than the one set on the model.')
        state.lr_scheduler = part

    @remote_function(dispatch='all')
    def set_template(self, template: Any = 'default', *, adapter_name: str | None = None, **kwargs: Any) -> None:
        state = self._adapters.get(adapter_name)
        state.template = self._build('templates', template, **kwargs)
        if not state.own_processor:
            # Padding is masked, but a model may look at ids: pad with the token that the tokenizer pads with.
            pad = state.template.pad_token_id
            state.processor = self._build('input_processors', 'default', pad_token_id=pad)

    @remote_function(dispatch='all')
    def set_processor(self, processor: Any = 'default', *, adapter_name: str | None = None, **kwargs: Any) -> None:
        state = self._adapters.get(adapter_name)
        state.processor = self._build('input_processors', processor, **kwargs)
        state.own_processor = True

    @remote_function(dispatch='all')
    def add_metric(
        self, metric: Any, *, is_training: bool | None = None, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        state = self._adapters.get(adapter_name)
        first = self._build('metrics', metric, **kwargs)
        key = registry.metrics.name_of(metric) if isinstance(metric, str) else type(first).__name__
        if is_training is not False:
            state.train_metrics[key] = first
        if is_training is not True:
            state.eval_metrics[key] = copy.deepcopy(first) if is_training is None else first
