"""`get_train_configs`: what is being trained, and how, as a table that a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinkle.model.base import BaseModel
    from twinkle.model.state import TrainState

__all__ = ['summarise']


def summarise(model: BaseModel, states: Sequence[TrainState]) -> str:
    """A text of two columns: the model's own lines, then a block per adapter."""
    head = {'class': type(model).__name__, **model._describe()}
    blocks = [head, *(_state_lines(model, state) for state in states)]
    width = max(len(key) for block in blocks for key in block)
    return '\n\n'.join('\n'.join(f'{key:<{width}}  {value}' for key, value in block.items()) for block in blocks)


def _state_lines(model: BaseModel, state: TrainState) -> dict[str, str]:
    trainable = sum(p.numel() for p in model.trainable_parameters(state.adapter_name))
    total = sum(p.numel() for p in model.model.parameters())
    return {
        'adapter': state.adapter_name or '(none: the base model)',
        'trainable': f'{trainable:,} of {total:,} parameters ({100 * trainable / max(total, 1):.3f}%)',
        'optimizer': _optimizer(state.optimizer),
        'lr schedule': _named(state.lr_scheduler),
        'loss': _named(state.loss),
        'template': _named(state.template),
        'processor': _named(state.processor),
        'metrics': f'training: {", ".join(state.train_metrics) or "-"}; evaluation: {", ".join(state.eval_metrics) or "-"}',
        'accumulation': f'{state.window.length} micro-batch(es) per step',
        'step': f'{state.step}' + (f' ({state.skipped_steps} skipped by overflow)' if state.skipped_steps else ''),
    }


def _named(part: Any) -> str:
    if part is None:
        return 'not set'
    described = getattr(part, 'describe', None)
    return str(described()) if callable(described) else type(part).__name__


def _optimizer(optimizer: Any) -> str:
    if optimizer is None:
        return 'not set'
    groups = [
        ', '.join(f'{key}={group[key]:g}' for key in ('lr', 'weight_decay') if isinstance(group.get(key), (int, float)))
        + f' on {sum(p.numel() for p in group["params"]):,} parameters'
        for group in optimizer.param_groups
    ]
    return f'{type(optimizer).__name__}: ' + '; '.join(groups)
