"""What is refused, by which error, and with which words: the value, the rule, the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twinkle.errors import (
    ConfigError,
    DataError,
    DuplicateAdapterError,
    NameNotAllowedError,
    NotSupportedError,
    StateError,
    UnknownAdapterError,
    UnknownNameError,
)
from twinkle.model.protocol import TwinkleModel
from twinkle.testing.conformance._measure import flat, ready

if TYPE_CHECKING:
    from twinkle.testing.subject import Subject

needs = pytest.mark.twinkle_needs


def _arguments(subject: Subject, method: str) -> tuple[Any, ...]:
    """What a method is called with when it is expected to refuse."""
    if method in ('forward', 'forward_only', 'forward_backward'):
        return (subject.rows(2),)
    if method == 'add_adapter_to_model':
        return ('foo', subject.adapter())
    return {
        'add_metric': ('loss',),
        'apply_patch': (lambda module: None,),
        'load': (subject.shared('nothing'),),
        'resume_from_checkpoint': (subject.shared('nothing'),),
        'save': ('last', subject.shared('nothing')),
        'set_loss': ('cross_entropy',),
    }.get(method, ())


def test_what_is_declared_impossible_is_refused(subject: Subject, model: TwinkleModel) -> None:
    """Every method in `cannot` exists, and raises NotSupportedError with the declared reason."""
    for method, reason in subject.cannot.items():
        assert hasattr(TwinkleModel, method), f'{method!r} in `cannot` is no method of the protocol'
        assert reason.strip(), f'`cannot` gives no reason for {method!r}'
        with pytest.raises(NotSupportedError) as error:
            getattr(model, method)(*_arguments(subject, method))
        assert reason in str(error.value)


def test_a_step_needs_an_optimizer(subject: Subject, model: TwinkleModel) -> None:
    """Without an optimizer, `step` names set_optimizer."""
    model.forward_backward(subject.rows(1))
    with pytest.raises(StateError, match='set_optimizer'):
        model.step()


def test_a_step_needs_a_backward(subject: Subject) -> None:
    """A step before any backward, and a second one after a step, are refused."""
    model = ready(subject)
    with pytest.raises(StateError):
        model.step()
    model.forward_backward(subject.rows(1))
    model.step()
    with pytest.raises(StateError):
        model.step()


def test_a_schedule_needs_an_optimizer(subject: Subject, model: TwinkleModel) -> None:
    """A schedule without an optimizer is refused, and names set_optimizer."""
    with pytest.raises(StateError, match='set_optimizer'):
        subject.set_halving(model)


@needs('calculate_loss')
def test_a_loss_needs_a_forward(subject: Subject, model: TwinkleModel) -> None:
    """`calculate_loss` before any forward is refused, and names forward."""
    with pytest.raises(StateError, match='forward'):
        model.calculate_loss()


@needs('backward')
def test_a_backward_needs_a_loss(subject: Subject, model: TwinkleModel) -> None:
    """`backward` before any loss is refused, and names calculate_loss."""
    with pytest.raises(StateError, match='calculate_loss'):
        model.backward()


def test_an_unknown_adapter_is_named_with_those_that_exist(subject: Subject) -> None:
    """An unknown name, and no name where there are several, give an error that lists the adapters."""
    model = subject.with_adapters('first', 'second')
    for name in ('third', None):
        with pytest.raises(UnknownAdapterError) as error:
            model.forward_backward(subject.rows(1), adapter_name=name)
        assert 'first' in str(error.value)
        assert 'second' in str(error.value)
        assert name is None or name in str(error.value)


def test_a_taken_adapter_name_is_refused(subject: Subject) -> None:
    """A second adapter of a name is refused, and the first is as it was."""
    model = subject.with_adapters('first')
    before = flat(model, 'first')
    with pytest.raises(DuplicateAdapterError, match='first'):
        model.add_adapter_to_model('first', subject.adapter(1))
    assert bool((flat(model, 'first') == before).all())


@pytest.mark.parametrize('name', ['', 'a.b', 'a/b', '../a'])
def test_adapter_names_that_cannot_be_part_of_a_path_are_refused(
    subject: Subject, model: TwinkleModel, name: str
) -> None:
    """An adapter's name becomes part of parameter and file names."""
    with pytest.raises(NameNotAllowedError):
        model.add_adapter_to_model(name, subject.adapter())


def test_an_unknown_part_is_refused_with_a_suggestion(subject: Subject, model: TwinkleModel) -> None:
    """A misspelt loss names the right one; nothing falls back to another."""
    with pytest.raises(UnknownNameError, match='cross_entropy'):
        model.set_loss('cross_entrpy')


@pytest.mark.parametrize('inputs', [[], None, 'text', 3, [3]], ids=repr)
def test_inputs_of_a_wrong_kind_are_refused(subject: Subject, model: TwinkleModel, inputs: Any) -> None:
    """Nothing, text, numbers and rows that are no dictionaries are no inputs."""
    with pytest.raises(DataError):
        model.forward_backward(inputs)


@pytest.mark.parametrize('steps', [0, -1, 1.5, True, '2'], ids=repr)
def test_an_impossible_accumulation_is_refused(subject: Subject, model: TwinkleModel, steps: Any) -> None:
    """gradient_accumulation_steps is an integer of at least 1; the error shows the value."""
    with pytest.raises(ConfigError, match='gradient_accumulation_steps'):
        model.forward_backward(subject.rows(1), gradient_accumulation_steps=steps)


def test_an_impossible_norm_is_refused(subject: Subject) -> None:
    """max_grad_norm must be above 0: a clip to nothing is a mistake."""
    model = ready(subject)
    model.forward_backward(subject.rows(1))
    with pytest.raises(ConfigError, match='max_grad_norm'):
        model.clip_grad_and_step(max_grad_norm=0.0)


@needs('save')
@pytest.mark.parametrize('name', ['../outside', 'a/b', '..', 'latest', ''])
def test_checkpoint_names_stay_inside_output_dir(subject: Subject, model: TwinkleModel, name: str) -> None:
    """A name is one folder inside output_dir; nothing is written for another."""
    out = subject.shared('out')
    with pytest.raises(NameNotAllowedError):
        model.save(name, output_dir=out)
    assert not out.exists()


@needs('save')
def test_training_state_within_a_window_names_flush(subject: Subject) -> None:
    """A checkpoint of training state in the middle of a window is written exactly, or refused with `flush` as the way out."""
    model = ready(subject)
    model.forward_backward(subject.rows(1), gradient_accumulation_steps=2)
    try:
        model.save('last', output_dir=subject.shared('out'), save_optimizer=True)
        refusal = 'flush'
    except StateError as error:
        refusal = str(error)
    assert 'flush' in refusal
    model.save('weights', output_dir=subject.shared('out'))
