"""Losses from log-probabilities made at the head: exact for every kind of head, and without logits."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import LoraConfig
from torch import nn

from tests.helpers import reference
from twinkle.model import TransformersModel

ROWS = reference.random_rows(6)
SIZES = {
    'vocab_size': 64,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
}


def gemma2():
    return transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5, attn_implementation='eager')


def cohere():
    return transformers.CohereConfig(**SIZES, logit_scale=0.25)


def granite():
    return transformers.GraniteConfig(**SIZES, logits_scaling=4.0)


def gpt2():
    return transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )


def llama_tied():
    return transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)


@pytest.fixture
def built(request):
    torch.manual_seed(0)
    model = TransformersModel(config=request.param(), mixed_precision='no')
    return model


@pytest.mark.parametrize('built', [gemma2, cohere, granite, gpt2, llama_tied], indirect=True)
@pytest.mark.parametrize('chunk_bytes', [1, 2**20], ids=['many chunks', 'one chunk'])
def test_loss_and_gradients_equal_those_of_full_logits(monkeypatch, built, chunk_bytes):
    """For soft-capped, scaled, tied and plain heads, loss and gradients are those of cross entropy on the model's own logits."""
    monkeypatch.setattr('twinkle.loss.linear.CHUNK_BYTES', chunk_bytes)
    loss = built.forward_backward(inputs=ROWS)['loss']
    built.clip_grad_norm(max_grad_norm=float('inf'))
    got = {n: p.grad.clone() for n, p in built.model.named_parameters()}
    built.model.zero_grad()
    total, count = reference.loss_sum(built.model, ROWS)
    (total / count).backward()
    assert loss == pytest.approx(float(total.detach()) / count, rel=1e-6)
    for name, parameter in built.model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_lora_on_the_head_is_exact():
    """An adapter on lm_head changes the log-probabilities of the loss, forward and backward."""
    torch.manual_seed(0)
    model = TransformersModel(config=transformers.LlamaConfig(**SIZES), mixed_precision='no')
    model.add_adapter_to_model('a', LoraConfig(r=4, target_modules=['q_proj', 'lm_head'], init_lora_weights=False))
    loss = model.forward_backward(inputs=ROWS)['loss']
    model.clip_grad_norm(max_grad_norm=float('inf'))
    got = [p.grad.clone() for p in model.trainable_parameters('a')]
    for parameter in model.trainable_parameters('a'):
        parameter.grad = None
    total, count = reference.loss_sum(model.model, ROWS)
    (total / count).backward()
    assert loss == pytest.approx(float(total.detach()) / count, rel=1e-6)
    for mine, parameter in zip(got, model.trainable_parameters('a'), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-7)


def test_an_unknown_change_after_the_head_falls_back_to_logits_and_says_so(caplog):
    """A model that alters its logits in a way that is not known is found by the probe; its loss is still exact."""

    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits**2
            return output

    torch.manual_seed(0)
    model = TransformersModel(config=transformers.LlamaConfig(**SIZES), model_cls=Shifted, mixed_precision='no')
    with caplog.at_level('INFO', logger='twinkle_hf'):
        loss = model.forward_backward(inputs=ROWS)['loss']
    total, count = reference.loss_sum(model.model, ROWS)
    assert loss == pytest.approx(float(total.detach()) / count, rel=1e-6)
    assert 'full logits' in caplog.text


@pytest.mark.parametrize('trained', ['full', 'lora'])
def test_training_makes_no_logits_unless_asked(monkeypatch, trained):
    """No tensor of batch x sequence x vocabulary exists in forward or backward of training, and one does when logits are asked for."""
    monkeypatch.setattr('twinkle.loss.linear.CHUNK_BYTES', 2**20)
    model = TransformersModel(config=transformers.LlamaConfig(**{**SIZES, 'vocab_size': 4099}), mixed_precision='no')
    if trained == 'lora':
        model.add_adapter_to_model('a', LoraConfig(r=2, target_modules=['q_proj']))
    rows = reference.random_rows(64, low=60, high=64)
    biggest = _largest_vocab_tensor(model, rows)
    assert biggest < 64 * 60 * 4099 // 4
    assert _largest_vocab_tensor(model, rows, return_logits=True) >= 64 * 60 * 4099
    assert 'logits' not in model.forward_backward(inputs=ROWS)


def _largest_vocab_tensor(model, rows, **options):
    """The most elements of any tensor with a vocabulary dimension that an operator returns."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(value, torch.Tensor) and value.ndim and 4099 in value.shape:
                    Watch.largest = max(Watch.largest, value.numel())
            return out

    with Watch():
        model.forward_backward(inputs=rows, **options)
    return Watch.largest


def test_the_head_is_itself_again_after_an_exception(tiny_llama):
    """A loss or module that raises leaves no stand-in behind: the next forward is as before."""
    model = TransformersModel(tiny_llama, mixed_precision='no')
    expected = model.forward_only(inputs=ROWS)['logits']
    handle = model.model.model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError('boom')))
    with pytest.raises(RuntimeError, match='boom'):
        model.forward_backward(inputs=ROWS)
    handle.remove()
    assert 'forward' not in model.model.lm_head.__dict__
    assert isinstance(model.model.lm_head, nn.Linear)
    assert torch.equal(model.forward_only(inputs=ROWS)['logits'], expected)


def test_the_probe_draws_nothing_from_the_random_state():
    """Looking at the head once does not shift dropout: two models, one probed before seeding, agree to the bit."""
    config = transformers.LlamaConfig(**SIZES, attention_dropout=0.5)
    losses = []
    for early in (True, False):
        torch.manual_seed(0)
        model = TransformersModel(config=config, mixed_precision='no')
        if early:
            model.forward_backward(inputs=ROWS)
            model.set_optimizer('SGD', lr=0.0)
            model.clip_grad_and_step()
        torch.manual_seed(1)
        losses.append(model.forward_backward(inputs=ROWS)['loss'])
    assert losses[0] == losses[1]


@pytest.mark.parametrize('split', [[6], [1, 5], [2, 2, 2]])
def test_router_losses_are_means_over_micro_batches(split):
    """A mixture of experts: its router loss, weighted as Transformers does, is averaged over micro-batches, never over tokens."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, router_aux_loss_coef=0.1,
        output_router_logits=True,
    )  # fmt: skip
    model = TransformersModel(config=config, mixed_precision='no')
    start, parts = 0, []
    for size in split:
        parts.append(ROWS[start : start + size])
        start += size
    for part in parts:
        model.forward_backward(inputs=part, gradient_accumulation_steps=len(parts))
    model.clip_grad_norm(max_grad_norm=float('inf'))
    got = {n: p.grad.clone() for n, p in model.model.named_parameters()}
    model.model.zero_grad()
    sums = [reference.loss_sum(model.model, part) for part in parts]
    total = sum(value for value, _ in sums) / sum(count for _, count in sums)
    for part in parts:
        batch = reference.collate(part)
        output = model.model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask'])
        total = total + 0.1 * output.aux_loss / len(parts)
    total.backward()
    for name, parameter in model.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-6)
