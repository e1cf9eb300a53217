"""What a call leaves behind: windows, modes, adapters, contexts, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from twinkle.errors import TwinkleError, UnknownAdapterError
from twinkle.testing.conformance._measure import LR, applied, close, flat, ready, weights

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle.model.protocol import TwinkleModel
    from twinkle.testing.subject import Subject

needs = pytest.mark.twinkle_needs


class Interruption(Exception):
    """Raised by the rules themselves."""


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- windows -------------------------------------------------------------------------------------------------------------------


def test_the_step_fires_after_g_micro_batches(subject: Subject) -> None:
    """With g = 3 weights move after micro-batches 3 and 6 and nowhere else; a g that comes with the step governs too."""
    model = ready(subject)
    moved, reported = [], []
    for row in subject.rows(7):
        before = flat(model)
        model.forward_backward([row], gradient_accumulation_steps=3)
        reported.append(model.clip_grad_and_step() is not None)
        moved.append(not torch.equal(before, flat(model)))
    assert moved == reported == [False, False, True, False, False, True, False]
    before = flat(model)
    model.forward_backward(subject.rows(1))
    model.clip_grad_and_step(gradient_accumulation_steps=2)
    assert not torch.equal(before, flat(model))


def test_flush_closes_a_partial_window_once(subject: Subject) -> None:
    """flush=True steps with what there is, as a window of that length would, and then has nothing to do."""
    rows = subject.rows(2)
    partial, full = ready(subject), ready(subject)
    for row in rows:
        partial.forward_backward([row], gradient_accumulation_steps=5)
        full.forward_backward([row], gradient_accumulation_steps=2)
    assert close(applied(partial)[0], applied(full)[0])
    before = flat(partial)
    assert partial.clip_grad_and_step(flush=True) is None
    assert torch.equal(before, flat(partial))


def test_a_step_leaves_no_gradients(subject: Subject) -> None:
    """The second window has the gradient of its own rows alone."""
    first, second = subject.rows(3), subject.rows(3, seed=1)
    model, other = ready(subject, lr=0.0), ready(subject)
    model.forward_backward(first)
    model.clip_grad_and_step(flush=True)
    subject.set_sgd(model, LR)
    for one in (model, other):
        one.forward_backward(second)
    assert close(applied(model)[0], applied(other)[0])


# -- modes ---------------------------------------------------------------------------------------------------------------------


@needs('forward_only')
def test_evaluation_within_a_window_disturbs_nothing(subject: Subject) -> None:
    """`forward_only` between two micro-batches changes neither the gradient nor the mode of the module."""
    rows = subject.rows(2)
    plain, disturbed = ready(subject), ready(subject)
    for row in rows:
        for model in (plain, disturbed):
            model.forward_backward([row], gradient_accumulation_steps=2)
        mode = disturbed.model.training
        disturbed.forward_only(subject.rows(2, seed=3))
        assert disturbed.model.training == mode
    assert close(applied(disturbed)[0], applied(plain)[0])


@needs('forward_only')
def test_an_error_in_the_module_leaves_its_mode(subject: Subject) -> None:
    """After an exception inside `forward_only` the module is in the mode it was in, and trains on."""
    rows = subject.rows(2)
    model, other = ready(subject), ready(subject)
    model.model.train()

    def interrupt(*_: Any) -> None:
        raise Interruption

    hooks = [module.register_forward_pre_hook(interrupt) for module in model.model.modules()]
    with pytest.raises(Interruption):
        model.forward_only(rows)
    for hook in hooks:
        hook.remove()
    assert model.model.training
    for one in (model, other):
        one.forward_backward(rows)
    assert close(applied(model)[0], applied(other)[0])


# -- adapters ------------------------------------------------------------------------------------------------------------------


@needs('forward_only')
def test_outputs_differ_by_adapter(subject: Subject) -> None:
    """Two adapters give different logits, each the same as when it is the only one, whatever was called before."""
    rows = subject.rows(2)
    model = subject.with_adapters('foo', 'bar')
    logits = {name: model.forward_only(rows, adapter_name=name)['logits'] for name in ('foo', 'bar')}
    assert not close(logits['foo'], logits['bar'], 1e-3)
    assert close(model.forward_only(rows, adapter_name='foo')['logits'], logits['foo'], 1e-5)
    alone = subject.with_adapters('foo')
    assert close(alone.forward_only(rows)['logits'], logits['foo'], 1e-5)


@needs('forward_only')
def test_the_base_model_can_be_run_without_its_adapter(subject: Subject, model: TwinkleModel) -> None:
    """`disable_lora=True` gives the logits of the model before it had an adapter."""
    rows = subject.rows(2)
    base = model.forward_only(rows)['logits']
    adapted = subject.with_adapters('foo')
    assert not close(adapted.forward_only(rows)['logits'], base, 1e-3)
    assert close(adapted.forward_only(rows, disable_lora=True)['logits'], base, 1e-5)
    assert not close(adapted.forward_only(rows)['logits'], base, 1e-3)


@pytest.mark.parametrize('optimizer', ['sgd', 'default'])
def test_interleaved_adapters_do_not_disturb_each_other(subject: Subject, optimizer: str) -> None:
    """fb(foo) fb(bar) step(foo): bar's weights stay, and foo moves exactly as it does when it trains alone."""
    together, alone = subject.with_adapters('foo', 'bar'), subject.with_adapters('foo', 'bar')
    for model in (together, alone):
        for name in ('foo', 'bar'):
            if optimizer == 'sgd':
                subject.set_sgd(model, LR, name)
            else:
                model.set_optimizer('default', adapter_name=name, lr=1e-2)
    for step in range(3):
        for model in (together, alone):
            model.forward_backward(subject.rows(2, seed=step), adapter_name='foo')
        together.forward_backward(subject.rows(3, seed=10 + step), adapter_name='bar', gradient_accumulation_steps=9)
        before = weights(together, 'bar')
        for model in (together, alone):
            model.clip_grad_and_step(adapter_name='foo', flush=True)
        assert same(before, weights(together, 'bar'))
    assert close(flat(together, 'foo'), flat(alone, 'foo'), 1e-6)
    assert same(weights(alone, 'bar'), weights(subject.with_adapters('foo', 'bar'), 'bar'))


def test_a_context_says_which_adapter_is_meant(subject: Subject) -> None:
    """Within `adapter(name)` an omitted name is that adapter; contexts nest, and end where they end."""
    model = subject.with_adapters('foo', 'bar')
    a, b = weights(model, 'foo'), weights(model, 'bar')
    assert not same(a, b)
    with model.adapter('foo'):
        assert same(weights(model), a)
        with model.adapter('bar'):
            assert same(weights(model), b)
            assert same(weights(model, 'foo'), a)
        assert same(weights(model), a)
    with pytest.raises(UnknownAdapterError):
        weights(model)


def test_an_exception_ends_a_context(subject: Subject) -> None:
    """After an exception within `adapter(name)` an omitted name means what it meant before."""
    model = subject.with_adapters('foo', 'bar')
    with pytest.raises(Interruption), model.adapter('bar'):
        raise Interruption
    with pytest.raises(UnknownAdapterError):
        weights(model)


# -- checkpoints ---------------------------------------------------------------------------------------------------------------


@needs('save', 'load')
def test_saved_weights_come_back(subject: Subject) -> None:
    """`save` returns the folder; what another model loads from it is equal to the bit."""
    model, other = ready(subject), subject.model()
    model.forward_backward(subject.rows(2))
    model.clip_grad_and_step()
    folder = model.save('last', output_dir=subject.shared('out'))
    subject.barrier()
    assert not same(weights(model), weights(other))
    other.load(folder)
    assert same(weights(model), weights(other))


@needs('save', 'load')
def test_an_adapter_is_saved_and_loaded_alone(subject: Subject) -> None:
    """Saving one of two adapters and loading it elsewhere touches that one only."""
    model, other = subject.with_adapters('foo', 'foobar'), subject.with_adapters('other', 'foo')
    kept = weights(other, 'other')
    folder = model.save('last', output_dir=subject.shared('out'), adapter_name='foo')
    subject.barrier()
    assert not same(weights(other, 'foo'), weights(model, 'foo'))
    other.load(folder, adapter_name='foo')
    assert same(weights(other, 'foo'), weights(model, 'foo'))
    assert same(weights(other, 'other'), kept)


@needs('load')
def test_a_load_that_fails_changes_nothing(subject: Subject, model: TwinkleModel) -> None:
    """Where there are no weights, `load` raises and the model is as it was."""
    before = weights(model)
    empty = subject.shared('empty')
    empty.mkdir(parents=True, exist_ok=True)
    with pytest.raises(TwinkleError):
        model.load(empty)
    assert same(before, weights(model))


@needs('save', 'resume_from_checkpoint')
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(subject: Subject) -> None:
    """Two steps, save, two steps equal two steps, save, a new model that resumes, two steps."""

    def steps(model: TwinkleModel, seeds: range) -> None:
        for seed in seeds:
            model.forward_backward(subject.rows(3, seed))
            model.clip_grad_and_step()

    models = [subject.model(), subject.model()]
    for model in models:
        model.set_optimizer('default', lr=1e-2)
        subject.set_halving(model)
    straight, resumed = models
    steps(straight, range(2))
    folder = straight.save('last', output_dir=subject.shared('out'), save_optimizer=True, consumed_train_samples=6)
    subject.barrier()
    steps(straight, range(2, 4))
    progress = resumed.resume_from_checkpoint(folder)
    expected = {'cur_step': 2, 'consumed_train_samples': 6, 'gradient_accumulation_steps': 1}
    assert {key: progress[key] for key in expected} == expected
    steps(resumed, range(2, 4))
    assert close(flat(resumed), flat(straight), 1e-6)
