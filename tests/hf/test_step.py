"""States and boundaries of the optimizer step, empty micro-batches, precision."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig

from tests.helpers import reference
from twinkle.errors import ConfigError, StateError
from twinkle.model import TransformersModel


@pytest.fixture
def model(tiny_llama):
    return TransformersModel(tiny_llama, mixed_precision='no')


def weights(model):
    return {n: p.detach().clone() for n, p in model.model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def test_a_batch_without_labels_to_learn_from_is_zero_and_changes_nothing(model, caplog):
    """CASES 3: an all -100 batch reports loss 0.0, leaves weights under SGD, gives no NaN, and is reported."""
    model.set_optimizer('SGD', lr=0.1)
    before = weights(model)
    rows = [{'input_ids': [1, 2, 3], 'labels': [-100, -100, -100]}]
    with caplog.at_level('WARNING', logger='twinkle'):
        assert model.forward_backward(inputs=rows)['loss'] == 0.0
    assert 'nothing to learn from' in caplog.text
    assert model.clip_grad_and_step() == 0.0
    assert same(before, weights(model))
    assert model.calculate_metric()['loss'] == 0.0


def test_an_empty_micro_batch_does_not_count(model):
    """Within a window, a micro-batch without labels leaves the gradient of the others as it is."""
    rows = reference.random_rows(4)
    model.set_optimizer('SGD', lr=0.1)
    model.forward_backward(inputs=[{'input_ids': [1, 2], 'labels': [-100, -100]}], gradient_accumulation_steps=2)
    model.forward_backward(inputs=rows)
    with_empty = model.clip_grad_norm(max_grad_norm=float('inf'))
    model.step()
    model.zero_grad()
    other = TransformersModel(model.model_id, mixed_precision='no')
    other.forward_backward(inputs=rows)
    assert with_empty == pytest.approx(other.clip_grad_norm(max_grad_norm=float('inf')), rel=1e-6)


def test_the_step_fires_after_g_micro_batches(model):
    """Gradient accumulation fires after micro-batches g, 2g, 3g; elsewhere every method of the step does nothing."""
    model.set_optimizer('SGD', lr=0.1)
    fired = []
    for row in reference.random_rows(7):
        before = weights(model)
        model.forward_backward(inputs=[row], gradient_accumulation_steps=3)
        norm = model.clip_grad_and_step()
        fired.append((norm is not None, not same(before, weights(model))))
    assert fired == [(False, False), (False, False), (True, True)] * 2 + [(False, False)]


def test_flush_closes_a_partial_window_once(model):
    """flush=True steps with what there is, exactly as a window of that length would, and then has nothing to do."""
    rows = reference.random_rows(2)
    model.set_optimizer('SGD', lr=0.1)
    for row in rows:
        model.forward_backward(inputs=[row], gradient_accumulation_steps=4)
        model.clip_grad_and_step()
    assert model.clip_grad_and_step(flush=True) is not None
    flushed = weights(model)
    assert model.clip_grad_and_step(flush=True) is None
    other = TransformersModel(model.model_id, mixed_precision='no')
    other.set_optimizer('SGD', lr=0.1)
    for row in rows:
        other.forward_backward(inputs=[row], gradient_accumulation_steps=2)
        other.clip_grad_and_step()
    assert same(flushed, weights(other))


def test_accumulation_given_in_any_call_is_remembered(model):
    """g given to a step method governs the window it is given in, and later ones."""
    model.set_optimizer('SGD', lr=0.1)
    rows = reference.random_rows(4)
    norms = []
    for index, row in enumerate(rows):
        model.forward_backward(inputs=[row])
        norms.append(model.clip_grad_and_step(**({'gradient_accumulation_steps': 2} if index == 0 else {})))
    assert [norm is not None for norm in norms] == [False, True, False, True]


@pytest.mark.parametrize('accumulation', [1, 4])
def test_learning_rate_moves_per_optimizer_step(model, accumulation):
    """CASES 9: warm-up 2 of 10 gives factors 0, .5, 1, .96194, .85355 at steps 0..4 for any accumulation."""
    model.set_optimizer('SGD', lr=1.0)
    model.set_lr_scheduler('default', num_warmup_steps=2, num_training_steps=10)
    seen = []
    for row in reference.random_rows(5 * accumulation):
        model.forward_backward(inputs=[row], gradient_accumulation_steps=accumulation)
        lr = model._adapters.get().optimizer.param_groups[0]['lr']
        if model.clip_grad_and_step() is not None:
            seen.append(lr)
    assert seen == pytest.approx([0, 0.5, 1, 0.96194, 0.85355], abs=5e-6)


def test_clipping_unscales_first_and_only_at_the_boundary(tiny_llama):
    """CASES 8: gradients (3, 4) under a loss scale of 1024, maximum 1: norm 5, clipped to (0.6, 0.8), at the boundary only."""
    model = TransformersModel(tiny_llama, mixed_precision='fp16', grad_scaler_config={'init_scale': 1024.0})
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    pair = model.model.model.norm.weight
    pair.requires_grad_(True)
    model.set_optimizer('SGD', lr=0.0)
    towards = torch.zeros_like(pair)
    towards[0], towards[1] = 3.0, 4.0

    def linear(inputs, outputs, **kwargs):
        return (pair * towards).sum() + 0 * outputs['logps'].sum().float()

    linear.requires = frozenset({'logps'})
    model.set_loss(linear)
    rows = reference.random_rows(2)
    model.forward_backward(inputs=rows, gradient_accumulation_steps=2)
    raw = pair.grad.clone()
    assert model.clip_grad_norm(max_grad_norm=1.0) is None
    assert torch.equal(pair.grad, raw)
    model.forward_backward(inputs=rows)
    assert model.clip_grad_norm(max_grad_norm=1.0) == pytest.approx(5.0, rel=1e-5)
    assert pair.grad[:2].tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
    assert pair.grad[2:].abs().max() == 0


def test_fp16_trains_without_skipping_and_skips_an_overflow(tiny_llama):
    """fp16 steps do not overflow because a loss is a sum; a true overflow skips optimizer and schedule, and says so."""
    model = TransformersModel(tiny_llama, mixed_precision='fp16')
    model.set_optimizer('default', lr=1e-3)
    model.set_lr_scheduler('constant')
    rows = reference.random_rows(40)
    for start in range(0, 40, 4):
        model.forward_backward(inputs=rows[start : start + 4])
        assert math.isfinite(model.clip_grad_and_step())
    state = model._adapters.get()
    assert (state.step, state.skipped_steps) == (10, 0)
    assert state.scaler.get_scale() == 65536.0

    before, epoch = weights(model), state.lr_scheduler.last_epoch
    model.set_loss(lambda inputs, outputs: outputs['logps'].sum() * float('inf'))
    model.forward_backward(inputs=rows[:4])
    model.clip_grad_and_step()
    assert (state.step, state.skipped_steps, state.lr_scheduler.last_epoch) == (10, 1, epoch)
    assert same(before, weights(model))
    assert state.scaler.get_scale() == 32768.0


def test_two_precisions_side_by_side(tiny_llama):
    """CASES 28: fp32, bf16 and fp16 models in one process, one after the other and interleaved, each as it is alone."""
    rows, names = reference.random_rows(4), ('no', 'bf16', 'fp16')

    def run(models):
        for model in models:
            model.set_optimizer('SGD', lr=0.1)
        trace = []
        for _ in range(2):
            trace.append([model.forward_backward(inputs=rows)['loss'] for model in models])
            trace.append([model.clip_grad_and_step() for model in models])
        return [list(column) for column in zip(*trace, strict=True)]

    alone = [run([TransformersModel(tiny_llama, mixed_precision=name)])[0] for name in names]
    assert run([TransformersModel(tiny_llama, mixed_precision=name) for name in names]) == alone
    assert len({trace[0] for trace in alone}) == 3


@pytest.mark.parametrize('names', [['a'], ['a', 'b']])
def test_adapters_take_the_dtype_that_was_asked_for(tiny_llama, tmp_path, names):
    """CASES 18: bf16 asked for, parameters and saved tensors of the first and the second adapter are bf16."""
    from safetensors.torch import load_file

    model = TransformersModel(tiny_llama, mixed_precision='bf16', dtype=torch.bfloat16)
    for name in names:
        model.add_adapter_to_model(name, LoraConfig(r=2, target_modules=['q_proj']))
    assert {p.dtype for p in model.trainable_parameters(names[-1])} == {torch.bfloat16}
    folder = model.save('x', output_dir=tmp_path, adapter_name=names[-1])
    assert {t.dtype for t in load_file(f'{folder}/adapter_model.safetensors').values()} == {torch.bfloat16}


def test_step_without_backward_or_optimizer_says_what_to_call(model):
    """step() before any backward, or without an optimizer, is a named error with the way out."""
    with pytest.raises(StateError, match='set_optimizer'):
        model.step()
    model.set_optimizer('SGD', lr=0.1)
    with pytest.raises(StateError, match='forward_backward'):
        model.step()
    with pytest.raises(StateError, match='forward_backward'):
        model.clip_grad_and_step()


def test_backward_onto_used_gradients_is_refused(model):
    """After step() without zero_grad() another backward is refused: its gradients would mix with used ones."""
    model.set_optimizer('SGD', lr=0.1)
    rows = reference.random_rows(2)
    model.forward_backward(inputs=rows)
    model.step()
    with pytest.raises(StateError, match='zero_grad'):
        model.forward_backward(inputs=rows)
    model.zero_grad()
    model.forward_backward(inputs=rows)


@pytest.mark.parametrize('steps', [0, -1, 1.5, True, '2'])
def test_bad_accumulation_is_refused(model, steps):
    """gradient_accumulation_steps is an integer of at least 1."""
    with pytest.raises(ConfigError, match='gradient_accumulation_steps'):
        model.forward_backward(inputs=reference.random_rows(1), gradient_accumulation_steps=steps)


def test_a_plain_function_is_a_mean_of_one_micro_batch(model):
    """A function that returns a tensor counts once per micro-batch: the gradient is the mean over micro-batches."""
    rows = reference.random_rows(4)

    def mean_nll(inputs, outputs):
        return -outputs['logps'].sum() / (inputs['labels'] != -100).sum()

    model.set_loss(mean_nll)
    model.forward_backward(inputs=rows[:1], gradient_accumulation_steps=2)
    model.forward_backward(inputs=rows[1:])
    model.clip_grad_norm(max_grad_norm=float('inf'))
    got = model.model.lm_head.weight.grad
    other = TransformersModel(model.model_id, mixed_precision='no')
    parts = [reference.loss_sum(other.model.train(), part) for part in (rows[:1], rows[1:])]
    (sum(total / count for total, count in parts) / 2).backward()
    torch.testing.assert_close(got, other.model.lm_head.weight.grad, rtol=1e-5, atol=1e-6)
