"""Backends that each break one rule of the protocol: what the conformance kit has to find."""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch

from twinkle.model.window import AccumulationWindow
from twinkle.testing import ToyModel


class _EarlyWindow(AccumulationWindow):
    """Counts from 0: full after micro-batches 1, g + 1, ..., as `if step % g == 0` at the end of a loop has it."""

    @property
    def at_boundary(self):
        return self.micro_batches > 0 and (self.flushed or self.micro_batches % self.length == 1 % self.length)

    def next(self):
        return _EarlyWindow(length=self.length)


class AccumulationOffByOne(ToyModel):
    """Steps one micro-batch too early."""

    def _new_state(self, adapter_name):
        state = super()._new_state(adapter_name)
        state.window = _EarlyWindow()
        return state


class GradientNotNormalised(ToyModel):
    """Applies the gradient of the sum: the count of a window is always one."""

    def _backward(self, state, outputs, loss):
        before = state.window.count
        super()._backward(state, outputs, loss)
        state.window.count = before if before else torch.ones(())


class GradientPerRow(ToyModel):
    """Divides by rows where tokens are meant."""

    def _begin(self, state, inputs):
        batch = super()._begin(state, inputs)
        self._rows = float((batch['labels'] != -100).any(-1).sum())
        return batch

    def _backward(self, state, outputs, loss):
        before = state.window.count
        super()._backward(state, outputs, loss)
        state.window.count = before + self._rows


class MeanOfMeans(ToyModel):
    """Averages micro-batches, whatever they count."""

    def _backward(self, state, outputs, loss):
        from twinkle.data_format import LossOutput

        count = max(float(loss.count), 1.0)
        super()._backward(state, outputs, LossOutput(loss.loss_sum / count, 1.0 if float(loss.count) else 0.0))


class AdapterIgnored(ToyModel):
    """Evaluates with the first adapter, whichever is named."""

    def _run_module(self, batch, adapter_name, needs, *, training, disable_lora):
        if not training:
            adapter_name = self._adapters.states[0].adapter_name
        return super()._run_module(batch, adapter_name, needs, training=training, disable_lora=disable_lora)


class StateShared(ToyModel):
    """One token count for all adapters."""

    def _backward(self, state, outputs, loss):
        super()._backward(state, outputs, loss)
        for other in self._adapters.states:
            if other is not state:
                other.window.count = other.window.count + loss.count


class OptimizerShared(ToyModel):
    """One optimizer steps the parameters of every adapter."""

    def _named_trainable(self, adapter_name):
        if not adapter_name:
            return super()._named_trainable(adapter_name)
        return [
            (f'{state.adapter_name}.{name}', parameter)
            for state in self._adapters.states
            for name, parameter in super(OptimizerShared, self)._named_trainable(state.adapter_name)
        ]


class DirtyContext(ToyModel):
    """An exception within `adapter()` leaves its adapter selected."""

    @contextmanager
    def adapter(self, adapter_name):
        token = self._adapters._enclosing.set(self._adapters.get(adapter_name).adapter_name)
        yield adapter_name
        self._adapters._enclosing.reset(token)


class DirtyMode(ToyModel):
    """An exception in the module leaves it in evaluation mode."""

    @contextmanager
    def _mode(self, training):
        before = self.model.training
        self.model.train(training)
        with torch.set_grad_enabled(training):
            yield
        self.model.train(before)


class LabelsShiftedTwice(ToyModel):
    """Shifts labels that are shifted already."""

    def _run_module(self, batch, adapter_name, needs, *, training, disable_lora):
        if 'labels' in batch:
            labels = batch['labels']
            shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
            batch['labels'] = shifted
        return super()._run_module(batch, adapter_name, needs, training=training, disable_lora=disable_lora)


class NormInflated(ToyModel):
    """Reports the norm times sqrt(2), as a sum of squares over two equal ranks has it."""

    def clip_grad_and_step(self, *args, **kwargs):
        norm = super().clip_grad_and_step(*args, **kwargs)
        return None if norm is None else norm * math.sqrt(2)


class GradientsKept(ToyModel):
    """Begins the next window with gradients of one that was flushed."""

    def clip_grad_and_step(self, *args, **kwargs):
        state = self._adapters.get(kwargs.get('adapter_name'))
        norm = super().clip_grad_and_step(*args, **kwargs)
        if norm is not None and kwargs.get('flush'):
            for _, parameter in self._named_trainable(state.adapter_name):
                parameter.grad = torch.full_like(parameter, 1e-3)
        return norm


class InputsChanged(ToyModel):
    """Writes into the caller's rows."""

    def forward_backward(self, inputs, **kwargs):
        for row in inputs if isinstance(inputs, list) else []:
            if isinstance(row, dict):
                row.setdefault('length', len(row['input_ids']))
        return super().forward_backward(inputs, **kwargs)


class StateDictAliased(ToyModel):
    """Hands out its own parameters."""

    def get_state_dict(self, *, adapter_name=None):
        if adapter_name is None and not self._adapters.names:
            return {name: value.detach() for name, value in self.model.state_dict().items()}
        return super().get_state_dict(adapter_name=adapter_name)


class RefusalBroken(ToyModel):
    """Declares that it has no `forward`, and has one."""

    cannot = {'forward': 'a pipeline runs forward and backward as one'}

    def _refuse(self, method):
        return None


class Pipeline(ToyModel):
    """Not wrong: declares what it cannot do, and refuses it."""

    cannot = {
        'forward': 'a pipeline runs forward and backward as one',
        'calculate_loss': 'a pipeline runs forward and backward as one',
        'backward': 'a pipeline runs forward and backward as one',
        'forward_only': 'logits stay on the last stage',
    }


class RanksApart(ToyModel):
    """Each rank trains alone."""

    def sum_over_data(self, value):
        return value
