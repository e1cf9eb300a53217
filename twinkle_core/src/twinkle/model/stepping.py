"""The numbers of one optimizer step: backward of a sum, normalisation at the boundary, clipping, stepping, scheduling.

The contract, for any split of a batch into micro-batches and ranks: the gradient applied is the sum of all losses of the window
over the global count of what they counted. Functions here work on one adapter's `TrainState`; what depends on how parameters are
laid out comes from the backend through `GradientOps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from twinkle.errors import StateError
from twinkle.logging import get_logger
from twinkle.model.window import AccumulationWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from twinkle.data_format import LossOutput
    from twinkle.model.state import TrainState

__all__ = ['GradientOps', 'accumulate', 'clip', 'count', 'local', 'optimizer_step', 'scaled', 'schedule_step', 'zero']

logger = get_logger('twinkle.model')


class GradientOps(Protocol):
    """What the step needs to know of a backend."""

    def trainable_parameters(self, adapter_name: str) -> Sequence[Parameter]:
        """The parameters that this adapter trains."""

    def sum_over_data(self, value: Tensor) -> Tensor:
        """`value` summed over data-parallel ranks."""

    def prepare_backward(self, *, of_aux_loss: bool) -> None:
        """Where a micro-batch has an auxiliary loss, its backward is about to run, or the main one through the same graph."""

    def reduce_gradients(self, adapter_name: str) -> float:
        """Bring the window's gradients together over ranks: once per window, before they are normalised.

        Returns:
            What they are still to be multiplied with to be sums over data-parallel ranks (their number, where backward averaged).
        """

    def clip_gradients(self, parameters: Sequence[Parameter], max_norm: float, norm_type: float) -> float:
        """Clip in place by the global norm of the unsharded gradients; returns the norm before clipping."""


def accumulate(state: TrainState, loss: LossOutput, aux_loss: Tensor | None, ops: GradientOps) -> None:
    """Backward of one micro-batch into the window.

    Raises:
        StateError: the last step's gradients are still there, so that new ones would mix with them.
    """
    total = scaled(state, loss, ops)
    if aux_loss is not None:
        ops.prepare_backward(of_aux_loss=True)
        aux_loss = state.scaler.scale(aux_loss) if state.scaler is not None else aux_loss
        _accumulate_aux(state.window, aux_loss, ops.trainable_parameters(state.adapter_name))
        ops.prepare_backward(of_aux_loss=False)
    total.backward()
    count(state, loss)


def scaled(state: TrainState, loss: LossOutput, ops: GradientOps) -> Tensor:
    """What a micro-batch's backward is of: the loss's sum over the window's constant, scaled for fp16. `count` follows its backward.

    Raises:
        StateError: as for `accumulate`.
    """
    window = state.window
    if window.normalised:
        raise StateError(
            f'The gradients of {_whose(state)} are already normalised for a step; a further backward would mix with them. '
            'After clip_grad_norm() or step(), finish with step() and zero_grad(), or use clip_grad_and_step() for all of it.'
        )
    if window.constant is None:
        # The first micro-batch's count, over all ranks: the same on each, it can be undone after gradients are summed over ranks.
        window.constant = ops.sum_over_data(as_count(loss.count)).clamp(min=1).to(loss.loss_sum.dtype)
    total = loss.loss_sum / window.constant
    return state.scaler.scale(total) if state.scaler is not None else total


def count(state: TrainState, loss: LossOutput) -> None:
    """Note in the window that a micro-batch's gradients are there."""
    window = state.window
    window.count = window.count + (loss.count.detach() if isinstance(loss.count, torch.Tensor) else loss.count)
    window.micro_batches += 1


def clip(state: TrainState, max_norm: float, norm_type: float, ops: GradientOps) -> float | None:
    """Normalise, measure and clip at the boundary; the norm before clipping, or None elsewhere."""
    window = state.window
    if not window.at_boundary or window.stepped:
        return window.grad_norm
    _normalise(state, ops)
    norm = ops.clip_gradients(ops.trainable_parameters(state.adapter_name), max_norm, norm_type)
    if window.grad_norm is None:
        window.grad_norm = state.last_grad_norm = norm
    return norm


def optimizer_step(state: TrainState, ops: GradientOps) -> None:
    """Step at the boundary; nothing within a window.

    Raises:
        StateError: there is no optimizer, or no gradient to step with.
    """
    window = state.window
    if state.optimizer is None:
        raise StateError(
            f"{_whose(state)} has no optimizer to step. Call set_optimizer(...) first; set_optimizer('default') is AdamW."
        )
    if window.micro_batches == 0 or window.stepped:
        raise StateError(
            f'step() has no gradients of {_whose(state)} to step with: there was no backward since the last step. '
            'Call forward_backward() (or forward(), calculate_loss() and backward()) first.'
        )
    if not window.at_boundary:
        return
    _normalise(state, ops)
    window.stepped = True
    if not _apply_optimizer(state):
        state.skipped_steps += 1  # the schedule counts optimizer steps, and there was none
        return
    state.step += 1
    state.schedule_due = True
    if window.schedule_requested:
        schedule_step(state)


def schedule_step(state: TrainState) -> None:
    """Advance the schedule, once per optimizer step: before or after `zero`, and if asked before the step, right after it."""
    window = state.window
    if state.schedule_due:
        state.schedule_due = False
        if state.lr_scheduler is not None:
            state.lr_scheduler.step()
    elif window.at_boundary and not window.stepped:
        window.schedule_requested = True


def zero(state: TrainState, ops: GradientOps) -> None:
    """Drop gradients at the boundary and begin the next window; nothing within a window."""
    if not state.window.at_boundary:
        return
    for parameter in ops.trainable_parameters(state.adapter_name):
        parameter.grad = None
    state.window = state.window.next()


def _accumulate_aux(window: AccumulationWindow, aux_loss: Tensor, parameters: Sequence[Parameter]) -> None:
    """Keep an auxiliary loss's gradients apart: they are averaged over micro-batches, whatever those count."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    aux_loss.backward(retain_graph=True)
    for index, (parameter, grad) in enumerate(zip(parameters, kept, strict=True)):
        new, parameter.grad = parameter.grad, grad
        if new is not None:
            window.aux_grads[index] = window.aux_grads[index] + new if index in window.aux_grads else new


def _normalise(state: TrainState, ops: GradientOps) -> None:
    """Turn the window's gradients into the gradient of the mean over what was counted on all ranks. Done once."""
    window = state.window
    if window.normalised:
        return
    parameters = ops.trainable_parameters(state.adapter_name)
    # Nothing counted on any rank: the gradients are zero as they are, and stay so.
    tokens = float(ops.sum_over_data(as_count(window.count))) or 1.0
    constant = float(window.constant) if window.constant is not None else 1.0
    if window.aux_grads:
        ranks = float(ops.sum_over_data(torch.ones(())))  # a mean over those, too
        weight = tokens / (constant * window.micro_batches * ranks)
        for index, grad in window.aux_grads.items():
            parameter = parameters[index]
            parameter.grad = grad * weight if parameter.grad is None else parameter.grad.add_(grad, alpha=weight)
        window.aux_grads.clear()
    factor = constant / tokens * ops.reduce_gradients(state.adapter_name)
    if state.scaler is not None and state.optimizer is not None:
        state.scaler.unscale_(state.optimizer)
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)
    window.normalised = True


def as_count(value: Tensor | float) -> Tensor:
    """A count as a tensor of one dtype: a rank may have counted in integers, and another one in weights."""
    return torch.as_tensor(value).detach().to(torch.float64)


def local(grad: Tensor) -> Tensor:
    """The part of a gradient that this rank holds: all of it, or its shard."""
    return grad.to_local() if hasattr(grad, 'to_local') else grad


def _apply_optimizer(state: TrainState) -> bool:
    """Take the step; False if an fp16 overflow skipped it."""
    if state.scaler is None:
        state.optimizer.step()
        return True
    before = state.scaler.get_scale()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    skipped = state.scaler.get_scale() < before
    if skipped:
        logger.info(
            'fp16 overflow in %s: step skipped, loss scale %g -> %g', _whose(state), before, state.scaler.get_scale()
        )
    return not skipped


def _whose(state: TrainState) -> str:
    return f'adapter {state.adapter_name!r}' if state.adapter_name else 'the base model'
