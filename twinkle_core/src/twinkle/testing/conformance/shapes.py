"""What goes in and what comes out."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from twinkle.testing.conformance._measure import close, padded, ready, weights
from twinkle.testing.subject import VOCABULARY

if TYPE_CHECKING:
    from twinkle.model.protocol import TwinkleModel
    from twinkle.testing.subject import Subject

needs = pytest.mark.twinkle_needs


@needs('forward_only')
def test_forward_only_gives_logits_without_gradients(subject: Subject, model: TwinkleModel) -> None:
    """`forward_only` of B rows gives logits [B, T, V], T the longest row, that carry no gradient."""
    rows = subject.rows(3)
    logits = model.forward_only(rows)['logits']
    assert tuple(logits.shape[:2]) == (3, max(len(row['input_ids']) for row in rows))
    assert logits.shape[2] >= VOCABULARY
    assert not logits.requires_grad
    assert bool(torch.isfinite(logits).all())


@needs('forward')
def test_forward_gives_logits_with_gradients(subject: Subject, model: TwinkleModel) -> None:
    """`forward` gives logits of the same shape that gradients flow through."""
    rows = subject.rows(2)
    logits = model.forward(rows)['logits']
    assert tuple(logits.shape[:2]) == (2, max(len(row['input_ids']) for row in rows))
    assert logits.requires_grad


def test_forward_backward_gives_a_loss_and_a_count(subject: Subject, model: TwinkleModel) -> None:
    """`forward_backward` returns `loss` as a float and `num_tokens`, and no logits unless they are asked for."""
    outputs = model.forward_backward(subject.rows(2))
    assert isinstance(outputs['loss'], float)
    assert outputs['num_tokens'] > 0
    assert 'logits' not in outputs
    again = model.forward_backward(subject.rows(2), gradient_accumulation_steps=2, return_logits=True)
    assert tuple(again['logits'].shape[:1]) == (2,)
    assert not again['logits'].requires_grad


@needs('forward_only')
def test_every_form_of_inputs_means_the_same(subject: Subject, model: TwinkleModel) -> None:
    """One feature, a list of one, the keyword `inputs`, and a dictionary of tensors give the same logits."""
    row = subject.rows(1)[0]
    tensors = {key: torch.tensor([value]) for key, value in row.items()}
    expected = model.forward_only([row])['logits']
    for inputs in (row, {key: torch.tensor(value) for key, value in row.items()}, tensors):
        assert close(model.forward_only(inputs)['logits'], expected, 1e-5)
    assert close(model.forward_only(inputs=(row,))['logits'], expected, 1e-5)


def test_inputs_are_not_changed(subject: Subject, model: TwinkleModel) -> None:
    """Rows and tensors that are passed in compare equal before and after."""
    rows = subject.rows(3)
    tensors = {key: padded(rows, key, fill) for key, fill in (('input_ids', 0), ('labels', -100))}
    before = copy.deepcopy((rows, tensors))
    model.forward_backward(rows, gradient_accumulation_steps=2)
    model.forward_backward(tensors)
    assert rows == before[0]
    assert tensors.keys() == before[1].keys()
    assert all(torch.equal(tensors[key], before[1][key]) for key in tensors)


@needs('forward_only')
def test_padding_changes_nothing(subject: Subject, model: TwinkleModel) -> None:
    """A row's logits are the same alone and beside a longer row."""
    rows = sorted(subject.rows(6), key=lambda row: len(row['input_ids']))
    short, long = rows[0], rows[-1]
    length = len(short['input_ids'])
    assert close(
        model.forward_only([short, long])['logits'][0, :length], model.forward_only([short])['logits'][0], 1e-5
    )


def test_the_state_dict_is_a_copy_on_the_cpu(subject: Subject, model: TwinkleModel) -> None:
    """`get_state_dict` gives whole tensors on the CPU; changing them does not change the model."""
    first = weights(model)
    assert first
    assert all(isinstance(value, torch.Tensor) and value.device.type == 'cpu' for value in first.values())
    assert not any(value.requires_grad for value in first.values())
    kept = {name: value.clone() for name, value in first.items()}
    for value in first.values():
        value.zero_()
    second = weights(model)
    assert second.keys() == kept.keys()
    assert all(torch.equal(second[name], kept[name]) for name in kept)


def test_metrics_are_numbers(subject: Subject) -> None:
    """`calculate_metric` gives floats by name, and `loss` among them."""
    model = ready(subject)
    model.forward_backward(subject.rows(2))
    model.clip_grad_and_step()
    metrics: dict[str, Any] = model.calculate_metric()
    assert 'loss' in metrics
    assert all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in metrics.values())


def test_the_summary_names_what_trains(subject: Subject) -> None:
    """`get_train_configs` is text that names every adapter, or the one that was asked for."""
    model = subject.with_adapters('first', 'second')
    text = model.get_train_configs()
    assert 'first' in text
    assert 'second' in text
    assert 'second' not in model.get_train_configs(adapter_name='first')
