"""The numbers contract: what a loss is the mean of, and which gradient a step applies.

Everything is seen from outside: losses as they are reported, gradients as plain SGD has moved the weights by them.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import pytest
import torch

from twinkle.testing.conformance._measure import LR, applied, close, flat, padded, ready

if TYPE_CHECKING:
    from twinkle.model.protocol import TwinkleModel
    from twinkle.testing.subject import Subject

needs = pytest.mark.twinkle_needs


@needs('forward_only')
def test_labels_are_the_targets_of_their_own_position(subject: Subject, model: TwinkleModel) -> None:
    """`labels[t]` is the target of `logits[t]`: the loss is the mean cross entropy over labels that are not -100."""
    rows = subject.rows(4)
    labels = padded(rows, 'labels', -100)
    logits = model.forward_only(rows)['logits'].double().cpu()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    outputs = model.forward_backward(rows)
    assert outputs['num_tokens'] == int((labels != -100).sum())
    assert outputs['loss'] == pytest.approx(float(expected), rel=1e-4)


def test_the_gradient_is_that_of_the_reported_mean(subject: Subject) -> None:
    """A small step lowers the loss by lr * |gradient|^2, and doubling the data does not change the gradient."""
    rows, lr = subject.rows(4), 0.01
    model = ready(subject, lr)
    before = model.forward_backward(rows)['loss']
    gradient, _ = applied(model, lr=lr)
    assert before - model.forward_backward(rows)['loss'] == pytest.approx(lr * float(gradient.norm()) ** 2, rel=0.1)
    for batches in ([rows + rows], [rows, rows]):
        other = ready(subject, lr)
        for batch in batches:
            other.forward_backward(batch, gradient_accumulation_steps=len(batches))
        assert close(applied(other, lr=lr)[0], gradient, 1e-3)


def test_the_norm_is_that_of_the_gradient(subject: Subject) -> None:
    """The norm that `clip_grad_and_step` returns is the length of the gradient that it applies when nothing is clipped."""
    model = ready(subject)
    model.forward_backward(subject.rows(4))
    gradient, norm = applied(model)
    assert norm == pytest.approx(float(gradient.norm()), rel=1e-3)


def test_clipping_shortens_the_gradient(subject: Subject) -> None:
    """Above max_grad_norm the gradient keeps its direction and has that length; below it is left alone."""
    rows = subject.rows(4)
    gradients: list[torch.Tensor] = []
    for share in (math.inf, 2.0, 0.5):
        model = ready(subject)
        model.forward_backward(rows)
        limit = share * float(gradients[0].norm()) if gradients else math.inf
        gradients.append(applied(model, max_grad_norm=limit)[0])
    assert close(gradients[1], gradients[0])
    assert close(gradients[2], gradients[0] / 2, 1e-3)


def test_the_split_into_micro_batches_does_not_matter(subject: Subject) -> None:
    """Six rows of unequal lengths at once, one by one, or two and four, give the same gradient."""
    rows = subject.rows(6)
    gradients = []
    for batches in ([rows], [[row] for row in rows], [rows[:2], rows[2:]]):
        model = ready(subject)
        for batch in batches:
            model.forward_backward(batch, gradient_accumulation_steps=len(batches))
        gradients.append(applied(model)[0])
    assert close(gradients[1], gradients[0])
    assert close(gradients[2], gradients[0])


def test_nothing_to_learn_changes_nothing(subject: Subject) -> None:
    """Labels that are all -100 give a loss of 0.0 and leave weights as they are; in a window they do not count."""
    rows = subject.rows(2)
    empty = [copy.copy(row) for row in rows]
    for row in empty:
        row['labels'] = [-100] * len(row['input_ids'])
    model, alone, beside = ready(subject), ready(subject), ready(subject)
    assert model.forward_backward(empty)['loss'] == 0.0
    assert float(applied(model)[0].norm()) == 0.0
    alone.forward_backward(rows)
    beside.forward_backward(empty, gradient_accumulation_steps=2)
    beside.forward_backward(rows)
    assert close(applied(beside)[0], applied(alone)[0])


@needs('forward', 'calculate_loss', 'backward')
def test_forward_loss_and_backward_equal_forward_backward(subject: Subject) -> None:
    """The three calls one by one give the loss and the gradient of the one call."""
    rows = subject.rows(3)
    whole, parts = ready(subject), ready(subject)
    loss = whole.forward_backward(rows)['loss']
    parts.forward(rows)
    assert parts.calculate_loss() == pytest.approx(loss, rel=1e-4)
    parts.backward()
    assert close(applied(parts)[0], applied(whole)[0])


def test_the_four_calls_of_a_step_equal_the_one(subject: Subject) -> None:
    """clip_grad_norm, step, lr_step and zero_grad called after every micro-batch equal clip_grad_and_step."""
    rows = subject.rows(5)
    whole, parts = ready(subject), ready(subject)
    for model in (whole, parts):
        subject.set_halving(model)
    for row in rows:
        for model in (whole, parts):
            model.forward_backward([row], gradient_accumulation_steps=2)
        whole.clip_grad_and_step(max_grad_norm=0.1)
        parts.clip_grad_norm(max_grad_norm=0.1)
        parts.step()
        parts.lr_step()
        parts.zero_grad()
    assert close(flat(parts), flat(whole), 1e-6)


def test_stepping_without_clipping_is_normalised_too(subject: Subject) -> None:
    """`step` on its own applies the same gradient as with a clipping that changes nothing."""
    rows = subject.rows(3)
    clipped, plain = ready(subject), ready(subject)
    for model in (clipped, plain):
        for row in rows:
            model.forward_backward([row], gradient_accumulation_steps=3)
    expected, _ = applied(clipped)
    before = flat(plain)
    plain.step(gradient_accumulation_steps=1)
    assert close((before - flat(plain)) / LR, expected)


def test_the_schedule_counts_optimizer_steps(subject: Subject) -> None:
    """A schedule that halves the learning rate does so once per optimizer step, however many micro-batches that took."""
    model = ready(subject)
    subject.set_halving(model)
    lengths = []
    for seed in range(3):
        for row in subject.rows(3, seed):
            model.forward_backward([row], gradient_accumulation_steps=3)
        lengths.append(float(applied(model, max_grad_norm=1e-2)[0].norm()))
    assert lengths == pytest.approx([1e-2, 5e-3, 2.5e-3], rel=1e-2)


def test_metrics_weigh_micro_batches_by_tokens(subject: Subject) -> None:
    """`loss` of calculate_metric is the mean over all tokens since the last call, and then begins anew."""
    model = ready(subject)
    outputs = [model.forward_backward([row], gradient_accumulation_steps=9) for row in subject.rows(4)]
    total = sum(out['loss'] * out['num_tokens'] for out in outputs)
    expected = total / sum(out['num_tokens'] for out in outputs)
    assert model.calculate_metric()['loss'] == pytest.approx(expected, rel=1e-4)
    last = model.forward_backward(subject.rows(1, seed=7))
    assert model.calculate_metric()['loss'] == pytest.approx(last['loss'], rel=1e-4)


@needs('forward_only')
def test_metrics_of_training_and_evaluation_are_apart(subject: Subject) -> None:
    """What `forward_only` sees counts for `calculate_metric(is_training=False)` alone."""
    model = ready(subject)
    trained = model.forward_backward(subject.rows(2))['loss']
    model.forward_only(subject.rows(3, seed=5))
    assert model.calculate_metric()['loss'] == pytest.approx(trained, rel=1e-4)
    assert model.calculate_metric(is_training=False)['loss'] != pytest.approx(trained, rel=1e-4)
