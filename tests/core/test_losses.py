"""Losses against PyTorch's own on full logits, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twinkle.data_format import LossOutput
from twinkle.errors import ConfigError, DataError, InvalidPartError, StateError
from twinkle.loss import ChunkedCrossEntropyLoss, CrossEntropyLoss, MSELoss, as_loss
from twinkle.loss.linear import linear_cross_entropy, linear_logps
from twinkle.loss.outputs import head_outputs, outputs_from_hidden, outputs_from_logits

NEEDS = frozenset({'logps', 'nll', 'entropies', 'hidden_states'})


def problem(rows=2, length=5, hidden=7, vocab=11, *, bias=False, ignored=0.3, dtype=torch.float64, seed=0):
    """A linear head, its input and labels, some ignored."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(hidden, vocab, bias=bias, dtype=dtype)
    states = torch.randn(rows, length, hidden, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < ignored] = -100
    return head, states, labels


def naive(head, states, labels, temperature=1.0):
    """Log-probabilities and entropies from full logits."""
    log_p = (head(states) / temperature).double().log_softmax(-1)
    kept = labels != -100
    logps = torch.where(kept, log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1), 0.0)
    entropies = torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0.0)
    return logps, entropies


def gradients(value, head, states, *, keep=True):
    wanted = [p for p in (states, *head.parameters()) if p.requires_grad]
    return torch.autograd.grad(value, wanted, retain_graph=keep)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 6),
    vocab=st.integers(2, 13),
    bias=st.booleans(),
    frozen=st.booleans(),
    weighted=st.booleans(),
    chunk=st.integers(1, 9),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
def test_linear_cross_entropy_equals_full_logits(rows, length, vocab, bias, frozen, weighted, chunk, ignored, seed):
    """Value, log-probabilities and all gradients, for any shape, chunk, weight and frozen or trainable head."""
    head, states, labels = problem(rows, length, vocab=vocab, bias=bias, ignored=ignored, seed=seed)
    head.requires_grad_(not frozen)
    weights = torch.rand(labels.shape, dtype=torch.float64) if weighted else None
    nll, logps = linear_cross_entropy(
        states.flatten(0, 1), head.weight, labels.flatten(), bias=head.bias, chunk_size=chunk,
        loss_weights_N=None if weights is None else weights.flatten(),
    )  # fmt: skip
    expected_logps, _ = naive(head, states, labels)
    expected = -(expected_logps if weights is None else expected_logps * weights).sum()
    # The softmax is taken in fp32 on purpose, whatever the dtype of the weights.
    assert float(nll.detach()) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(logps.double(), expected_logps.flatten().detach(), rtol=1e-5, atol=1e-5)
    for got, wanted in zip(
        gradients(3 * nll, head, states, keep=False), gradients(3 * expected, head, states), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    bias=st.booleans(),
    frozen=st.booleans(),
    entropy=st.booleans(),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    chunk=st.integers(1, 9),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
def test_linear_logps_equal_full_logits(bias, frozen, entropy, temperature, chunk, ignored, seed):
    """Per-token log-probabilities and entropies, and their gradients under any weighting of tokens."""
    head, states, labels = problem(bias=bias, ignored=ignored, seed=seed)
    head.requires_grad_(not frozen)
    logps, entropies = linear_logps(
        states.flatten(0, 1), head.weight, labels.flatten(), bias=head.bias, temperature=temperature,
        with_entropy=entropy, chunk_size=chunk,
    )  # fmt: skip
    expected_logps, expected_entropies = naive(head, states, labels, temperature)
    torch.testing.assert_close(logps.double(), expected_logps.flatten(), rtol=1e-5, atol=1e-5)
    by_token = torch.randn(labels.numel(), dtype=torch.float64)
    value, expected = (logps * by_token).sum(), (expected_logps.flatten() * by_token).sum()
    if entropy:
        torch.testing.assert_close(entropies.double(), expected_entropies.flatten(), rtol=1e-5, atol=1e-5)
        value, expected = (
            value + (entropies * by_token**2).sum(),
            expected + (expected_entropies.flatten() * by_token**2).sum(),
        )
    else:
        assert entropies is None
    for got, wanted in zip(gradients(value, head, states), gradients(expected, head, states), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('chunk_bytes', [1, 2**20])
@pytest.mark.parametrize('bias', [False, True])
def test_all_three_roads_to_outputs_agree(monkeypatch, bias, chunk_bytes):
    """From logits, from a linear head (in chunks, or few enough for one) and from any head: the same, and only what was asked for."""
    monkeypatch.setattr('twinkle.loss.linear.CHUNK_BYTES', chunk_bytes)
    head, states, labels = problem(bias=bias)
    weights = torch.rand(labels.shape, dtype=torch.float64)
    from_logits = outputs_from_logits(head(states), labels, NEEDS - {'hidden_states'}, loss_weights=weights)
    for outputs in (
        outputs_from_hidden(states, head, labels, NEEDS, loss_weights=weights),
        head_outputs(head, states, labels, NEEDS, loss_weights=weights, chunk_size=3),
    ):
        assert outputs.keys() == NEEDS
        for key in from_logits:
            torch.testing.assert_close(outputs[key].double(), from_logits[key].double(), rtol=1e-5, atol=1e-5)
    only = outputs_from_hidden(states, head, labels, {'nll'})
    assert only.keys() == {'nll'}
    torch.testing.assert_close(only['nll'].double(), -from_logits['logps'].double().sum(), rtol=1e-5, atol=1e-5)
    assert outputs_from_hidden(states, head, None, {'hidden_states'})['hidden_states'] is states


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_low_precision_equals_the_autocast_head(dtype):
    """Under autocast the numbers are those of a head run under autocast and a softmax in fp32."""
    head, states, labels = problem(rows=4, length=16, hidden=32, vocab=50, dtype=torch.float32)
    with torch.autocast('cpu', dtype=dtype):
        nll, _ = linear_cross_entropy(states.flatten(0, 1), head.weight, labels.flatten())
        logits = head(states)
    assert logits.dtype is dtype
    expected = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction='sum')
    assert nll.dtype is torch.float32
    assert float(nll.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for got, wanted in zip(gradients(nll, head, states), gradients(expected, head, states), strict=True):
        assert got.dtype is torch.float32
        # One rounding to the low dtype apart: of the gradient of the logits, and of the sum over chunks.
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_backward_twice_is_refused():
    """Gradients are made in forward and given away once: a second backward says so instead of giving wrong ones."""
    head, states, labels = problem()
    nll, _ = linear_cross_entropy(states.flatten(0, 1), head.weight, labels.flatten())
    nll.backward(retain_graph=True)
    with pytest.raises(StateError, match='second time'):
        nll.backward()


@pytest.mark.parametrize('weighted', [False, True])
def test_cross_entropy_losses_equal_pytorch(weighted):
    """Sum, count and gradient of both, the chunked one for every chunk size."""
    head, states, labels = problem()
    inputs = {'labels': labels}
    if weighted:
        inputs['loss_weights'] = torch.rand(labels.shape, dtype=torch.float64)
    each = nn.functional.cross_entropy(head(states).flatten(0, 1), labels.flatten(), reduction='none').view(
        labels.shape
    )
    weights = inputs.get('loss_weights', torch.ones_like(each))
    expected = (each * weights).sum()
    count = float((weights * (labels != -100)).sum())
    results = [
        CrossEntropyLoss()(
            inputs, outputs_from_hidden(states, head, labels, {'nll'}, loss_weights=inputs.get('loss_weights'))
        )
    ]
    results += [ChunkedCrossEntropyLoss(size)(inputs, {'logits': head(states)}) for size in (1, 3, 4, 100)]
    for result in results:
        assert float(result.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        assert float(result.count) == pytest.approx(count, rel=1e-6)
        for got, wanted in zip(
            gradients(result.loss_sum, head, states), gradients(expected, head, states), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_mse_counts_elements_and_checks_shapes():
    """Squared differences over elements; predictions of another shape than the labels are refused."""
    predictions, labels = torch.randn(3, 1, requires_grad=True), torch.randn(3)
    result = MSELoss()({'labels': labels}, {'logits': predictions})
    assert float(result.loss_sum.detach() / result.count) == pytest.approx(
        float(nn.functional.mse_loss(predictions.detach().squeeze(1), labels)), rel=1e-6
    )
    with pytest.raises(DataError, match=r'\(3, 2\)'):
        MSELoss()({'labels': labels}, {'logits': torch.randn(3, 2)})


def test_mse_weighs_rows():
    """Weights per row or per element multiply the terms and are what is counted; another shape is refused."""
    predictions, labels = torch.randn(3, 2), torch.randn(3, 2)
    squares = (predictions - labels).square()
    for weights in (torch.tensor([2.0, 0.0, 1.0]), torch.rand(3, 2)):
        full = weights if weights.ndim == 2 else weights[:, None].expand(3, 2)
        result = MSELoss()({'labels': labels, 'sample_weights': weights}, {'logits': predictions})
        assert float(result.loss_sum) == pytest.approx(float((squares * full).sum()), rel=1e-6)
        assert float(result.count) == pytest.approx(float(full.sum()), rel=1e-6)
    with pytest.raises(DataError, match='sample_weights'):
        MSELoss()({'labels': labels}, {'logits': predictions}, sample_weights=[1.0, 2.0])


def test_functions_as_losses():
    """A tensor is the mean of one micro-batch; a LossOutput is taken as it is; anything else is refused by name."""
    inputs, outputs = {}, {'logps': torch.ones(2)}
    result = as_loss(lambda inputs, outputs: outputs['logps'].mean())(inputs, outputs)
    assert (float(result.loss_sum), float(result.count)) == (1.0, 1.0)
    own = LossOutput(loss_sum=torch.tensor(6.0), count=3)
    assert as_loss(lambda inputs, outputs: own)(inputs, outputs) is own

    def wrong(inputs, outputs):
        return outputs['logps']

    with pytest.raises(InvalidPartError, match=r'wrong.*\(2,\)'):
        as_loss(wrong)(inputs, outputs)
    assert as_loss(wrong).requires == {'logits', 'logps'}
    wrong.requires = {'logps'}
    assert as_loss(wrong).requires == {'logps'}


def test_bad_options_and_missing_labels_are_refused():
    """A chunk of no tokens; log-probabilities without labels, or with labels of another length."""
    head, states, labels = problem()
    with pytest.raises(ConfigError, match='chunk_size=0'):
        ChunkedCrossEntropyLoss(0)
    with pytest.raises(DataError, match='no labels'):
        outputs_from_hidden(states, head, None, {'nll'})
    with pytest.raises(DataError, match='shape'):
        outputs_from_hidden(states, head, labels[:, 1:], {'nll'})
