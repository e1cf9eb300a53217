"""The chunked linear head: exact derivatives, low precision, and no tensor of tokens by vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle.loss import linear
from twinkle.loss.linear import linear_cross_entropy, linear_logps, linear_nll
from twinkle.loss.outputs import head_outputs, outputs_from_logits


def problem(tokens=7, hidden=5, vocab=9, *, bias=True, ignored=2, dtype=torch.float64, frozen=False):
    """Input, weight and bias of a head, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=dtype, requires_grad=not frozen)
    shift = torch.randn(vocab, generator=generator, dtype=dtype, requires_grad=not frozen) if bias else None
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.randperm(tokens, generator=generator)[:ignored]] = -100
    return states, weight, shift, labels


def check_once(function, *tensors):
    """`gradcheck` for a function whose backward runs once only: central differences of a scalar in float64."""
    trained = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    for tensor, gradient in zip(trained, torch.autograd.grad(function(*tensors), trained), strict=True):
        flat = tensor.detach().view(-1)
        for i in range(len(flat)):
            values = []
            for step in (1e-5, -2e-5):
                flat[i] += step
                values.append(float(function(*tensors).detach()))
            flat[i] += 1e-5
            assert float(gradient.view(-1)[i]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6, abs=1e-8)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator gives, and what matrix products cost."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = [value for value in args if isinstance(value, torch.Tensor)][-2:]
            self.products += left.shape[0] * left.shape[1] * right.shape[1]
        return result


@pytest.mark.parametrize('chunk_size', [1, 3, 7])
@pytest.mark.parametrize('frozen', [False, True])
@pytest.mark.parametrize('bias', [False, True])
def test_derivatives_are_those_of_the_function(bias, frozen, chunk_size):
    """In float64 the analytic gradients equal finite differences, of log-probabilities and entropies and of the weighted sum."""
    states, weight, shift, labels = problem(bias=bias, frozen=frozen)
    loss_weights = torch.rand(len(labels), dtype=torch.float64)

    def nll(states, weight, shift):
        return linear_nll(states, weight, labels, bias=shift, loss_weights_N=loss_weights, chunk_size=chunk_size)

    def logps(states, weight, shift):
        return linear_logps(
            states, weight, labels, bias=shift, temperature=0.7, with_entropy=True, chunk_size=chunk_size
        )

    check_once(nll, states, weight, shift)
    assert torch.autograd.gradcheck(logps, (states, weight, shift))


@pytest.mark.parametrize('with_entropy', [False, True])
def test_a_trained_bias_of_a_frozen_weight_gets_its_gradient(with_entropy):
    """Any part of the head may be the only one that is trained."""
    states, weight, shift, labels = problem()
    states, weight = states.detach(), weight.detach()

    def logps(shift):
        logps, entropies = linear_logps(states, weight, labels, bias=shift, with_entropy=with_entropy, chunk_size=2)
        return logps if entropies is None else logps + entropies

    assert torch.autograd.gradcheck(logps, (shift,))
    check_once(lambda shift: linear_nll(states, weight, labels, bias=shift), shift)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('bias', [False, True])
def test_a_head_in_low_precision_equals_the_plain_one(dtype, bias):
    """Weights kept in bf16 or fp16: the product is theirs, softmax, sums and the weight's gradient are in fp32."""
    states, weight, shift, labels = problem(40, 16, 30, bias=bias, dtype=torch.float32)
    narrow = [None if p is None else p.detach().to(dtype).requires_grad_() for p in (states, weight, shift)]
    nll, logps = linear_cross_entropy(narrow[0], narrow[1], labels, bias=narrow[2], chunk_size=7)
    logits = nn.functional.linear(*narrow).float()
    each = nn.functional.cross_entropy(logits, labels, reduction='none')
    assert nll.dtype is logps.dtype is torch.float32
    torch.testing.assert_close(logps, -each.detach(), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(each.sum(), [p for p in narrow if p is not None])
    for got, expected in zip(torch.autograd.grad(nll, [p for p in narrow if p is not None]), wanted, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.float(), expected.float(), rtol=4e-2, atol=4e-2)
    by_token = torch.rand(len(labels))
    general, _ = linear_logps(narrow[0], narrow[1], labels, bias=narrow[2], chunk_size=7)
    wanted = torch.autograd.grad(-(nn.functional.cross_entropy(
        nn.functional.linear(*narrow).float(), labels, reduction='none') * by_token).sum(), narrow[0])[0]  # fmt: skip
    got = torch.autograd.grad((general * by_token).sum(), narrow[0])[0]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=4e-2, atol=4e-2)


def test_large_logits_do_not_overflow():
    """The largest logit of a row is taken out before exp, also where a label's probability vanishes."""
    states, weight, _, labels = problem(bias=False)
    nll, logps = linear_cross_entropy(states * 1e3, weight, labels)
    expected = nn.functional.cross_entropy(1e3 * states @ weight.t(), labels, reduction='sum')
    assert torch.isfinite(logps).all()
    torch.testing.assert_close(nll, expected)
    logps, entropies = linear_logps(states.float() * 1e3, weight.float(), labels, with_entropy=True)
    (logps.sum() + entropies.sum()).backward()
    assert torch.isfinite(states.grad).all()


@pytest.mark.parametrize('frozen', [False, True])
@pytest.mark.parametrize('kind', ['nll', 'logps', 'entropies'])
def test_logits_of_all_tokens_are_never_held(kind, frozen):
    """Forward and backward, no tensor is larger than a chunk's logits or the weight; and no label costs nothing."""
    tokens, hidden, vocab, chunk = 64, 4, 100, 8
    states, weight, _, labels = problem(
        tokens, hidden, vocab, bias=False, ignored=0, frozen=frozen, dtype=torch.float32
    )

    def run(labels):
        with Largest() as seen:
            if kind == 'nll':
                value = linear_nll(states, weight, labels, chunk_size=chunk)
            else:
                logps, entropies = linear_logps(
                    states, weight, labels, with_entropy=kind == 'entropies', chunk_size=chunk
                )
                value = (logps if entropies is None else logps + entropies).sum()
            value.backward()
        return seen, value

    all_seen, _ = run(labels)
    assert all_seen.numel <= max(chunk * vocab, hidden * vocab)
    half = labels.clone()
    half[::2] = -100
    assert run(half)[0].products == all_seen.products // 2
    states.grad = None
    nothing, value = run(torch.full_like(labels, -100))
    assert float(value.detach()) == 0.0
    assert nothing.products == 0
    assert torch.equal(states.grad, torch.zeros_like(states))


def test_chunks_keep_to_a_budget_of_memory(monkeypatch):
    """A chunk takes what CHUNK_BYTES says, more only with a large weight; few tokens are not cut at all."""
    weight = torch.empty(151_936, 512)
    assert 4 * 151_936 * linear._chunk_size(weight) <= linear.CHUNK_BYTES
    large = torch.empty(151_936, 4_096, device='meta', dtype=torch.bfloat16)
    assert linear._chunk_size(large) > 2 * linear._chunk_size(weight)
    assert linear.fits_one_chunk(10, weight)
    assert not linear.fits_one_chunk(200, weight)
    monkeypatch.setattr(linear, 'CHUNK_BYTES', 1)
    assert linear._chunk_size(torch.empty(64, 1)) == 1


def test_autocast_leaves_float64_alone():
    """As PyTorch's own autocast does."""
    states, weight, _, labels = problem(bias=False)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        nll = linear_nll(states, weight, labels)
    torch.testing.assert_close(nll, linear_nll(states, weight, labels))


@pytest.mark.parametrize('needs', [{'nll'}, {'logps', 'entropies'}])
def test_any_head_sees_labelled_tokens_only(needs):
    """Masked prompt tokens cost no product; without any label the sum is 0 and every parameter has a gradient of 0."""
    head = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 11))
    states = torch.randn(2, 5, 4, requires_grad=True)
    labels = torch.tensor([[-100, -100, 1, 2, -100], [-100, 10, 0, -100, -100]])
    seen = []
    head.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    outputs = head_outputs(head, states, labels, needs, chunk_size=3)
    assert seen == [3, 1]
    expected = outputs_from_logits(head(states), labels, needs)
    for key in needs:
        torch.testing.assert_close(outputs[key], expected[key])
    nothing = head_outputs(head, states, torch.full_like(labels, -100), needs)
    total = sum(nothing[key].sum() for key in needs)
    assert float(total.detach()) == 0.0
    total.backward()
    for parameter in (states, *head.parameters()):
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
