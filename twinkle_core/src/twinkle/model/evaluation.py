"""From what a forward pass gave to a loss and to metrics, for one adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from twinkle.errors import ConfigError, NotSupportedError, StateError
from twinkle.logging import get_logger
from twinkle.loss.outputs import outputs_from_logits

if TYPE_CHECKING:
    from twinkle.data_format import LossOutput, ModelOutput
    from twinkle.model.state import TrainState

__all__ = ['can_evaluate', 'chosen_outputs', 'loss_of', 'mean_of', 'needs_of', 'only', 'update_metrics', 'with_loss']

logger = get_logger('twinkle.model')


def needs_of(
    state: TrainState, batch: Mapping[str, Any], *, is_training: bool, return_logits: bool, with_loss: bool
) -> frozenset[str]:
    """What a forward pass must compute: for the loss and the metrics that this batch has enough for, and for the caller."""
    needs: set[str] = {'logits'} if return_logits else set()
    labelled = 'labels' in batch
    for metric in state.metrics(is_training).values():
        if labelled or not metric.needs_labels:
            needs |= metric.requires
    if with_loss and (labelled or not state.loss.needs_labels):
        needs |= state.loss.requires
    return frozenset(needs)


def chosen_outputs(names: Iterable[str]) -> frozenset[str]:
    """The keys of `ModelOutput` that a caller asked for.

    Raises:
        ConfigError: one that a forward pass does not compute.
    """
    known = ['logits', 'logps', 'nll', 'entropies', 'embeddings', 'values', 'hidden_states', 'aux_loss']
    if isinstance(names, str):
        names = [names]
    needs = frozenset(names)
    if not needs or not needs <= set(known):
        raise ConfigError(f'return_outputs={sorted(map(str, needs))} must name some of {", ".join(known)}.')
    return needs


def only(outputs: ModelOutput, needs: frozenset[str]) -> ModelOutput:
    """What was asked for, of what was computed.

    Raises:
        NotSupportedError: the model does not give it.
    """
    missing = sorted(needs - outputs.keys())
    if missing:
        raise NotSupportedError(f'This model gives no {", ".join(missing)}; it gave {", ".join(sorted(outputs))}.')
    return {key: value for key, value in outputs.items() if key in needs}  # type: ignore[return-value]


def loss_of(state: TrainState, batch: Mapping[str, Any], outputs: ModelOutput, kwargs: Mapping[str, Any]) -> LossOutput:
    """The loss of a micro-batch.

    Raises:
        StateError: the forward pass did not compute what the loss needs, and it cannot be derived.
    """
    loss = state.loss
    missing = loss.requires - outputs.keys()
    if missing and 'logits' in outputs and 'labels' in batch:
        # set_loss() after forward(): what can be derived from the logits is.
        weights = batch.get('loss_weights')
        outputs.update(outputs_from_logits(outputs['logits'], batch['labels'], missing, loss_weights=weights))
        missing = loss.requires - outputs.keys()
    if missing:
        raise StateError(
            f'{type(loss).__name__} needs {sorted(missing)}, which the forward pass did not compute (it has {sorted(outputs)}'
            f'{"" if "labels" in batch or not loss.needs_labels else "; the inputs have no labels"}). '
            f'{_way_out(missing)}'
        )
    result = loss(batch, outputs, **kwargs)
    if not state.warned_empty and float(result.count) == 0:
        state.warned_empty = True
        logger.warning(
            'A micro-batch has nothing to learn from: every label is -100. It counts 0 and contributes no gradient. This is said '
            'once per adapter.'
        )
    return result


def update_metrics(
    state: TrainState, batch: Mapping[str, Any], outputs: ModelOutput, loss: LossOutput | None, *, is_training: bool
) -> None:
    """Let the metrics take in a micro-batch; one without labels has nothing for them."""
    labelled = 'labels' in batch
    if not labelled and loss is None:
        return
    with torch.no_grad():
        for metric in state.metrics(is_training).values():
            if labelled or not metric.needs_labels:
                metric.update(batch, outputs, loss)


def mean_of(loss: LossOutput) -> float:
    """The mean over what was counted, 0.0 if nothing was."""
    count = float(loss.count)
    return float(loss.loss_sum.detach()) / count if count else 0.0


def with_loss(outputs: Any, loss: LossOutput) -> ModelOutput:
    """`outputs`, with the mean of the loss and what it counted."""
    return {**outputs, 'loss': mean_of(loss), 'num_tokens': float(loss.count)}  # type: ignore[typeddict-item]


def can_evaluate(state: TrainState, batch: Mapping[str, Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward without gradients has all that the loss needs beside the module's outputs."""
    needed = [*state.loss.required_inputs, *(['ref_logps'] if state.loss.needs_reference else [])]
    return ('labels' in batch or not state.loss.needs_labels) and all(key in batch or key in kwargs for key in needed)


def _way_out(missing: Iterable[str]) -> str:
    if 'values' in missing:
        return (
            "Values come from a model with one number per token, such as model_cls='AutoModelForTokenClassification' with "
            'num_labels=1; a policy without them is trained with value_coef=0.'
        )
    return 'Give inputs with labels, and call set_loss() before forward().'
