"""How the outputs of data-parallel ranks become one, for a driver that called them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinkle.data_format import ModelOutput

__all__ = ['merge_outputs']


def merge_outputs(results: Sequence[ModelOutput]) -> ModelOutput:
    """One `ModelOutput` of several: rows are concatenated, `loss` is the mean weighted by `num_tokens`, counts are summed."""
    import torch

    if len(results) == 1:
        return results[0]
    merged: dict[str, Any] = {}
    for key in results[0]:
        values: list[Any] = [result[key] for result in results]  # type: ignore[literal-required]
        if key == 'loss':
            counts = [result['num_tokens'] for result in results]
            total = sum(counts)
            merged[key] = sum(v * c for v, c in zip(values, counts, strict=True)) / total if total else 0.0
        elif key == 'num_tokens':
            merged[key] = sum(values)
        elif key == 'aux_loss':
            merged[key] = torch.stack(values).mean()
        elif values[0].ndim == 0:
            merged[key] = torch.stack(values).sum()
        else:
            merged[key] = torch.cat(_right_padded(values)) if values[0].ndim > 1 else torch.cat(values)
    return merged  # type: ignore[return-value]


def _right_padded(tensors: list[Any]) -> list[Any]:
    """Ranks pad to their own longest row; bring [B, T, ...] to one T."""
    import torch

    longest = max(t.shape[1] for t in tensors)
    return [
        t
        if t.shape[1] == longest
        else torch.cat([t, t.new_zeros(t.shape[0], longest - t.shape[1], *t.shape[2:])], dim=1)
        for t in tensors
    ]
