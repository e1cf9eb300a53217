"""One pass through the base model for rows of several tenants: who the rows are of, what to compute, and each tenant's own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import DataError, NotSupportedError

if TYPE_CHECKING:
    from twinkle.data_format import ModelOutput

__all__ = ['FusedBatch', 'Part', 'fused_needs', 'group_rows', 'join_batches', 'split_outputs']

_PADDING = {'labels': IGNORE_INDEX}
# Computed for tokens by themselves, so that the rows of one tenant can be told from another's.
_BY_TOKEN = frozenset({'logits', 'logps', 'entropies', 'values', 'hidden_states'})


@dataclass(frozen=True)
class Part:
    """One tenant's rows in a joined batch: `rows` of them, each `length` tokens before padding to the longest tenant's."""

    name: str
    rows: slice
    length: int
    batch: Mapping[str, Any]


@dataclass(frozen=True)
class FusedBatch:
    """A joined batch, and whose its rows are, tenant after tenant."""

    batch: dict[str, Any]
    parts: tuple[Part, ...]


def group_rows(inputs: Any, names: Sequence[str]) -> dict[str, list[Any]]:
    """Rows by tenant, in the order in which tenants first come.

    Raises:
        DataError: not one name for each row.
    """
    if isinstance(inputs, Mapping) or not isinstance(inputs, Sequence):
        raise DataError(
            f'adapter_name is a list of {len(names)} names, one for each row: pass inputs as a list of rows, not {type(inputs).__name__}.'
        )
    if len(inputs) != len(names):
        raise DataError(f'adapter_name names {len(names)} tenants for {len(inputs)} rows: give one for each row.')
    if not names:
        raise DataError('inputs is empty: there is no row to run.')
    rows: dict[str, list[Any]] = {}
    for name, row in zip(names, inputs, strict=True):
        rows.setdefault(name, []).append(row)
    return rows


def join_batches(batches: Mapping[str, Mapping[str, Any]]) -> FusedBatch:
    """The batches of several tenants as one, padded to the longest.

    Raises:
        NotSupportedError: tenants whose batches hold other kinds of inputs for the module.
    """
    longest = max(batch['input_ids'].shape[1] for batch in batches.values())
    keys = [set(_tensors(batch)) for batch in batches.values()]
    for kind in ('pixel_values', 'pixel_values_videos', 'input_features', 'inputs_embeds'):
        if any(kind in found for found in keys):
            raise NotSupportedError(
                f'Rows with {kind} are not run for several tenants at once: give adapter_name one name.'
            )
    shared = set.intersection(*keys)
    joined: dict[str, Any] = {}
    parts: list[Part] = []
    start = 0
    for name, batch in batches.items():
        rows, length = batch['input_ids'].shape
        parts.append(Part(name, slice(start, start + rows), length, batch))
        start += rows
        for key in shared:
            value = batch[key]
            extra = longest - length
            if extra:
                value = torch.cat([value, value.new_full((rows, extra, *value.shape[2:]), _PADDING.get(key, 0))], 1)
            joined.setdefault(key, []).append(value)
    if 'labels' not in shared and any('labels' in found for found in keys):
        raise NotSupportedError("Some tenants' rows have labels and others' have none: run them in calls of their own.")
    return FusedBatch({key: torch.cat(values) for key, values in joined.items()}, tuple(parts))


def fused_needs(needs: frozenset[str]) -> frozenset[str]:
    """What to compute for all tenants together: by token, since a sum over all rows tells nobody its own.

    Raises:
        NotSupportedError: what cannot be told apart by token.
    """
    if 'nll' in needs:
        needs = (needs - {'nll'}) | {'logps'}
    rest = needs - _BY_TOKEN
    if rest:
        raise NotSupportedError(
            f'A loss or a metric of these tenants needs {", ".join(sorted(rest))}, which is not computed for several tenants at once: '
            'give adapter_name one name.'
        )
    return needs


def split_outputs(outputs: ModelOutput, part: Part, needs: frozenset[str]) -> ModelOutput:
    """One tenant's rows of what was computed, without the padding to others' lengths."""
    found: dict[str, Any] = {
        key: value[part.rows, : part.length]
        for key, value in outputs.items()
        if key in _BY_TOKEN and isinstance(value, Tensor)
    }
    if 'nll' in needs:
        logps = found['logps']
        weights = part.batch.get('loss_weights')
        found['nll'] = -(logps if weights is None else logps * weights).sum()
    return found  # type: ignore[return-value]


def _tensors(batch: Mapping[str, Any]) -> list[str]:
    shape = batch['input_ids'].shape
    return [key for key, value in batch.items() if isinstance(value, Tensor) and value.shape[:2] == shape]
