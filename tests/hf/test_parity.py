"""The numbers of `TransformersModel` against a loop written by hand in PyTorch and PEFT (fp32, one process)."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.helpers import reference
from twinkle.data_format import LossOutput
from twinkle.model import TransformersModel

LR = 1e-2
STEPS = 20
# Losses and norms to fp32 rounding; weights by the absolute difference that Adam makes of rounding, in units of the learning rate.
RELATIVE = 1e-6
WEIGHTS = 1e-2 * LR


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules='all-linear', init_lora_weights='gaussian')


def windows_of(rows, accumulation, size=4):
    micro = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [micro[i : i + accumulation] for i in range(0, len(micro), accumulation)]


@pytest.fixture
def make_pair(tiny_llama):
    """A Twinkle model and the same module by hand, in full or with one LoRA."""

    def make(kind, **options):
        plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        model = TransformersModel(tiny_llama, mixed_precision='no', **options)
        if kind == 'lora':
            torch.manual_seed(3)
            plain = get_peft_model(plain, lora(), adapter_name='a')
            torch.manual_seed(3)
            model.add_adapter_to_model('a', lora())
        return model, plain

    return make


def trainable(module):
    return {n: p for n, p in module.named_parameters() if p.requires_grad}


def assert_same_weights(model, plain, bound=WEIGHTS):
    mine, theirs = trainable(model.model), trainable(plain)
    assert mine.keys() == theirs.keys()
    assert max((mine[n] - theirs[n]).abs().max().item() for n in mine) <= bound


@pytest.mark.parametrize('chunk_bytes', [1, 2**20], ids=['many chunks', 'one chunk'])
@pytest.mark.parametrize('accumulation', [1, 4])
@pytest.mark.parametrize('kind', ['lora', 'full'])
def test_twenty_steps_equal_the_hand_written_loop(monkeypatch, make_pair, kind, accumulation, chunk_bytes):
    """Losses, gradient norms and weights of 20 steps, rows of unequal length, are those of plain PyTorch."""
    monkeypatch.setattr('twinkle.loss.linear.CHUNK_BYTES', chunk_bytes)
    model, plain = make_pair(kind)
    windows = windows_of(reference.random_rows(4 * STEPS * accumulation), accumulation)
    expected = reference.train(plain, windows, lr=LR)

    model.set_optimizer('default', lr=LR, weight_decay=0.01)
    model.set_lr_scheduler('default', num_warmup_steps=2, num_training_steps=STEPS)
    losses, norms = [], []
    for window in windows:
        for rows in window:
            losses.append(model.forward_backward(inputs=rows, gradient_accumulation_steps=accumulation)['loss'])
            norm = model.clip_grad_and_step()
        norms.append(norm)
    assert losses == pytest.approx(expected.losses, rel=RELATIVE)
    assert norms == pytest.approx(expected.norms, rel=RELATIVE)
    assert_same_weights(model, plain)


def test_the_four_steps_called_alone_equal_clip_grad_and_step(make_pair):
    """clip_grad_norm, step, zero_grad and lr_step one by one are clip_grad_and_step, to the bit, in any order that makes sense."""
    rows = reference.random_rows(32)
    results = []
    for order in (
        None,
        ['clip_grad_norm', 'step', 'zero_grad', 'lr_step'],
        ['clip_grad_norm', 'lr_step', 'step', 'zero_grad'],
    ):
        model, _ = make_pair('lora')
        model.set_optimizer('default', lr=LR)
        model.set_lr_scheduler('default', num_warmup_steps=1, num_training_steps=4)
        for start in range(0, 32, 4):
            model.forward_backward(inputs=rows[start : start + 4], gradient_accumulation_steps=2)
            for name in order or ['clip_grad_and_step']:
                getattr(model, name)()
        results.append({n: p.detach().clone() for n, p in trainable(model.model).items()})
    for other in results[1:]:
        assert all(torch.equal(results[0][n], other[n]) for n in other)


def test_step_without_clipping_normalises(make_pair):
    """step() alone applies the mean over the window's tokens, as the hand-written loop without clipping does."""
    model, plain = make_pair('full')
    windows = windows_of(reference.random_rows(24), 3)
    sgd = torch.optim.SGD(plain.parameters(), lr=LR)
    reference.train(plain, windows, lr=LR, warmup=0, max_norm=float('inf'), optimizer=sgd)
    model.set_optimizer('SGD', lr=LR)
    model.set_lr_scheduler('cosine_warmup', num_warmup_steps=0, num_training_steps=len(windows))
    for window in windows:
        for rows in window:
            model.forward_backward(inputs=rows, gradient_accumulation_steps=3)
            model.step()
            model.lr_step()
            model.zero_grad()
    assert_same_weights(model, plain, bound=1e-7)


def test_separate_calls_equal_forward_backward(make_pair):
    """forward, calculate_loss and backward give the loss and the gradients of forward_backward."""
    rows = reference.random_rows(4)
    model, plain = make_pair('lora')
    model.forward(inputs=rows)
    loss = model.calculate_loss()
    model.backward()
    total, count = reference.loss_sum(plain.train(), rows)
    (total / count).backward()
    assert loss == pytest.approx(float(total.detach()) / count, rel=RELATIVE)
    for name, parameter in trainable(model.model).items():
        torch.testing.assert_close(parameter.grad, trainable(plain)[name].grad, rtol=1e-5, atol=1e-7)


def test_logits_equal_plain_transformers(make_pair):
    """forward and forward_only return the logits of the plain module; with disable_lora those of the base."""
    rows = reference.random_rows(4)
    model, plain = make_pair('lora')
    batch = reference.collate(rows)
    keep = batch['attention_mask'].bool()
    keys = {k: batch[k] for k in ('input_ids', 'attention_mask')}
    with torch.no_grad():
        expected = plain.eval()(**keys).logits
        with plain.disable_adapter():
            base = plain(**keys).logits
    torch.testing.assert_close(model.forward_only(inputs=rows)['logits'][keep], expected[keep], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        model.forward(inputs=rows)['logits'].detach()[keep], expected[keep], rtol=1e-5, atol=1e-6
    )
    without = model.forward_only(inputs=rows, disable_lora=True)['logits']
    torch.testing.assert_close(without[keep], base[keep], rtol=1e-5, atol=1e-6)


def test_token_weighted_mean_over_micro_batches(tiny_llama):
    """CASES 1: a micro-batch of one token at loss 4 and one of three at loss 1 report 1.75, not 2.5."""
    model = TransformersModel(tiny_llama, mixed_precision='no')

    def fixed(inputs, outputs, **kwargs):
        count = int((inputs['labels'] != -100).sum())
        return LossOutput(loss_sum=(4.0 if count == 1 else 3.0) + 0 * outputs['logps'].sum(), count=count)

    fixed.requires = frozenset({'logps'})
    model.set_loss(fixed)
    assert model.forward_backward(inputs=[{'input_ids': [1, 2], 'labels': [2, -100]}])['loss'] == 4.0
    assert model.forward_backward(inputs=[{'input_ids': [1, 2, 3, 4], 'labels': [2, 3, 4, -100]}])['loss'] == 1.0
    assert model.calculate_metric()['loss'] == pytest.approx(1.75, rel=1e-12)


@pytest.mark.parametrize('split', [[4, 4], [1, 7], [3, 2, 2, 1]])
def test_gradients_do_not_depend_on_the_split(make_pair, split):
    """CASES 1: however 8 rows are split into micro-batches, gradients equal those of the one batch to 1e-6."""
    rows = reference.random_rows(8)
    model, plain = make_pair('full')
    total, count = reference.loss_sum(plain.train(), rows)
    (total / count).backward()
    start = 0
    for size in split:
        model.forward_backward(inputs=rows[start : start + size], gradient_accumulation_steps=len(split))
        start += size
    norm = model.clip_grad_norm(max_grad_norm=float('inf'))
    assert norm == pytest.approx(
        float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=RELATIVE
    )
    for name, parameter in trainable(model.model).items():
        torch.testing.assert_close(parameter.grad, trainable(plain)[name].grad, rtol=1e-5, atol=1e-6)


def test_interleaved_adapters_do_not_disturb_each_other(tiny_llama):
    """CASES 13: fb(A) fb(B) step(A) leaves B's weights, gradients and Adam state; A equals its run alone."""
    rows_a, rows_b = reference.random_rows(8, seed=1), reference.random_rows(8, seed=2)

    def build(names):
        model = TransformersModel(tiny_llama, mixed_precision='no')
        for name in names:
            torch.manual_seed(ord(name))
            model.add_adapter_to_model(name, lora())
            model.set_optimizer('default', lr=LR, adapter_name=name)
        return model

    both, alone = build('ab'), build('a')
    both.forward_backward(inputs=rows_b, adapter_name='b')
    both.clip_grad_and_step(adapter_name='b')
    both.forward_backward(inputs=rows_a, adapter_name='a')
    both.forward_backward(inputs=rows_b, adapter_name='b')
    b_state = both._adapters.get('b')
    before = copy.deepcopy(
        (
            list(both.trainable_parameters('b')),
            [p.grad for p in both.trainable_parameters('b')],
            b_state.optimizer.state_dict(),
        )
    )
    both.clip_grad_and_step(adapter_name='a')
    after = (
        list(both.trainable_parameters('b')),
        [p.grad for p in both.trainable_parameters('b')],
        b_state.optimizer.state_dict(),
    )
    assert all(torch.equal(x, y) for x, y in zip(before[0], after[0], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(before[1], after[1], strict=True))
    assert str(before[2]) == str(after[2])

    alone.forward_backward(inputs=rows_a)
    alone.clip_grad_and_step()
    mine, theirs = both.get_state_dict(adapter_name='a'), alone.get_state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_equals_pytorchs_own(make_pair, dtype):
    """bf16 and fp16 give the loss and the gradient norm of the hand-written loop under torch.autocast."""
    name = {torch.bfloat16: 'bf16', torch.float16: 'fp16'}[dtype]
    _, plain = make_pair('lora')
    torch.manual_seed(3)
    model = TransformersModel(plain.base_model.model.config._name_or_path, mixed_precision=name)
    torch.manual_seed(3)
    model.add_adapter_to_model('a', lora())
    rows = reference.random_rows(8)
    with torch.autocast('cpu', dtype=dtype):
        total, count = reference.loss_sum(plain.train(), rows)
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainable(plain).values()])
    model.set_optimizer('SGD', lr=0.0)
    assert model.forward_backward(inputs=rows)['loss'] == pytest.approx(float(total.detach()) / count, rel=RELATIVE)
    # Scaled and unscaled by the loss scaler, fp16 gradients differ in their last bits.
    assert model.clip_grad_norm(max_grad_norm=float('inf')) == pytest.approx(
        float(norm), rel=1e-6 if name == 'bf16' else 2e-3
    )
    assert {p.dtype for p in model.model.parameters()} == {torch.float32}
