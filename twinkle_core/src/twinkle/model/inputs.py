"""From whatever a loop passes as `inputs` to the tensors that a module takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle.errors import DataError, StateError

if TYPE_CHECKING:
    import torch

    from twinkle.model.state import TrainState

__all__ = ['prepare_inputs']


def prepare_inputs(state: TrainState, inputs: Any, device: torch.device) -> dict[str, Any]:
    """The batch of tensors for `inputs`, on `device`. `inputs` stays as it is.

    Raises:
        DataError: nothing to run, or rows of a wrong type.
        StateError: rows that are not encoded, and no template to encode them.
    """
    if state.processor is None:
        raise StateError('No input processor is set. Call set_processor(...).')
    if isinstance(inputs, Mapping):
        if 'input_ids' in inputs and not isinstance(inputs['input_ids'], (list, tuple)):
            return dict(state.processor(inputs, device=device))
        rows: Sequence[Any] = [inputs]
    elif isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
        rows = inputs
    else:
        raise DataError(
            f'inputs is {type(inputs).__name__}; pass one InputFeature, a list of them, a dictionary of tensors, or trajectories '
            '(rows with "messages") when a template is set.'
        )
    if not rows:
        raise DataError('inputs is empty: there is no row to run. Skip empty batches, or use drop_last=True.')
    features = [feature for index, row in enumerate(rows) for feature in _features(state, row, index)]
    if not features:
        raise DataError(
            f'The template dropped all {len(rows)} rows of this batch (truncation="delete"); raise max_length.'
        )
    return dict(state.processor(features, device=device))


def _features(state: TrainState, row: Any, index: int) -> Sequence[Any]:
    if not isinstance(row, Mapping):
        raise DataError(f'Row {index} of inputs is {type(row).__name__}; a row is a dictionary.')
    if 'input_ids' in row:
        return [row]
    if state.template is None:
        raise StateError(
            f'Row {index} of inputs has no input_ids (keys: {sorted(map(str, row))}), and no template is set to encode it. Call '
            "set_template('default') on the model, or encode the data set first."
        )
    return state.template.encode(row)
