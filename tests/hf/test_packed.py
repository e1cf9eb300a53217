"""Packed rows through the model: samples do not see each other, in training and in forward_only."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from peft import LoraConfig

from tests.helpers import reference
from twinkle.errors import NotSupportedError
from twinkle.model import TransformersModel


def pack(rows):
    """Several rows as one, positions starting again with each."""
    return {
        'input_ids': [token for row in rows for token in row['input_ids']],
        'labels': [label for row in rows for label in row['labels']],
        'position_ids': [position for row in rows for position in range(len(row['input_ids']))],
    }


@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
def test_packed_samples_do_not_see_each_other(tiny_llama, attention):
    """CASES 7: [1,2,3] and [4,5] in one row give the logits that each gives alone, to 1e-5, with gradients and without."""
    model = TransformersModel(tiny_llama, mixed_precision='no', attn_implementation=attention)
    rows = [
        {'input_ids': [1, 2, 3], 'labels': [2, 3, -100]},
        {'input_ids': [4, 5], 'labels': [5, -100]},
        {'input_ids': [6, 7, 8, 9], 'labels': [7, 8, 9, -100]},
    ]
    batch = [pack(rows[:2]), pack(rows[1:])]
    assert batch[0]['position_ids'] == [0, 1, 2, 0, 1]
    for run in (model.forward, model.forward_only):
        alone = [run(inputs=[row])['logits'][0] for row in rows]
        packed = run(inputs=batch)['logits']
        torch.testing.assert_close(packed[0, :5], torch.cat(alone[:2]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed[1, :6], torch.cat(alone[1:]), rtol=1e-5, atol=1e-5)
    assert model.forward_backward(inputs=batch[:1])['num_tokens'] == 3


@pytest.mark.parametrize('kind', ['lora', 'full'])
def test_packed_and_padded_give_the_same_gradients(tiny_llama, kind):
    """Loss, norm and gradients of packed rows equal those of the same rows padded."""
    rows = reference.random_rows(9)
    results = []
    for inputs in (rows, [pack(rows[:4]), pack(rows[4:6]), pack(rows[6:])]):
        model = TransformersModel(tiny_llama, mixed_precision='no')
        if kind == 'lora':
            torch.manual_seed(0)
            model.add_adapter_to_model('a', LoraConfig(r=4, target_modules='all-linear', init_lora_weights=False))
        loss = model.forward_backward(inputs=inputs)['loss']
        norm = model.clip_grad_norm(max_grad_norm=float('inf'))
        name = 'a' if kind == 'lora' else ''
        results.append((loss, norm, [p.grad.clone() for p in model.trainable_parameters(name)]))
    (loss, norm, grads), (packed_loss, packed_norm, packed_grads) = results
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    assert packed_norm == pytest.approx(norm, rel=1e-5)
    for a, b in zip(grads, packed_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_layers_with_a_running_state_refuse_packed_rows(tiny_llama):
    """A linear-attention layer would carry its state into the next sample: the error names it; unpacked rows are fine."""
    model = TransformersModel(tiny_llama, mixed_precision='no')
    model.model.config.layer_types = ['linear_attention', 'full_attention']
    rows = reference.random_rows(2)
    with pytest.raises(NotSupportedError, match='linear_attention'):
        model.forward_only(inputs=pack(rows))
    assert isinstance(model.model, transformers.LlamaForCausalLM)
    model.forward_only(inputs=rows)


@pytest.mark.parametrize('kind', ['lora', 'full'])
def test_padding_free_gives_what_padding_gives(tiny_llama, kind):
    """The processor's `padding_free` changes neither loss nor gradients, and logits are those of rows alone, in one row."""
    rows = reference.random_rows(5)
    results = []
    for padding_free in (False, True):
        model = TransformersModel(tiny_llama, mixed_precision='no')
        model.set_processor('default', padding_free=padding_free)
        if kind == 'lora':
            torch.manual_seed(0)
            model.add_adapter_to_model('a', LoraConfig(r=4, target_modules='all-linear', init_lora_weights=False))
        logits = model.forward_only(inputs=rows)['logits']
        loss = model.forward_backward(inputs=rows)['loss']
        norm = model.clip_grad_norm(max_grad_norm=float('inf'))
        grads = [p.grad.clone() for p in model.trainable_parameters('a' if kind == 'lora' else '')]
        results.append((loss, norm, grads, logits))
    (loss, norm, grads, padded), (free_loss, free_norm, free_grads, free) = results
    keep = reference.collate(rows)['attention_mask'].bool()
    assert free.shape[:2] == (1, int(keep.sum()))
    torch.testing.assert_close(free[0], padded[keep], rtol=1e-5, atol=1e-5)
    assert free_loss == pytest.approx(loss, rel=1e-6)
    assert free_norm == pytest.approx(norm, rel=1e-5)
    for a, b in zip(grads, free_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_flash_attention_gets_packed_rows_as_one(tiny_llama, monkeypatch):
    """Its kernels tell samples apart in a batch of one row only: rows are laid end to end, and what comes out is by row again.

    The layout is run with another attention, which must give the same; the kernels need a GPU and were not run.
    """
    rows = reference.random_rows(6)
    batch = [pack(rows[:3]), pack(rows[3:5]), rows[5]]
    model = TransformersModel(tiny_llama, mixed_precision='no')
    wanted = ['logits', 'logps', 'entropies', 'hidden_states', 'embeddings']
    expected = model.forward_only(inputs=batch, return_outputs=wanted)
    seen = []
    real = torch.nn.Embedding.forward

    def watched(self, ids):
        seen.append(tuple(ids.shape))
        return real(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, 'forward', watched)
    monkeypatch.setattr('twinkle_hf.model.takes_one_row', lambda module: True)
    flat = model.forward_only(inputs=batch, return_outputs=wanted)
    width = expected['logps'].shape[1]
    assert seen == [(1, 3 * width)]
    lengths = [sum(len(row['input_ids']) for row in part) for part in (rows[:3], rows[3:5], rows[5:])]
    for key in wanted[:-1]:
        for index, length in enumerate(lengths):
            torch.testing.assert_close(flat[key][index, :length], expected[key][index, :length], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(flat['embeddings'], expected['embeddings'], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings('ignore')  # of PyTorch's compiler, about itself
@pytest.mark.skipif(shutil.which('g++') is None, reason='flex attention compiles its kernel with a C++ compiler')
def test_flex_attention_keeps_samples_apart(tiny_llama):
    """Packed rows through flex attention give the logits of rows alone in forward_only; training it on a CPU is refused."""
    rows = reference.random_rows(3)
    alone = TransformersModel(tiny_llama, mixed_precision='no')
    expected = torch.cat([alone.forward_only(inputs=[row])['logits'][0] for row in rows])
    model = TransformersModel(tiny_llama, mixed_precision='no', attn_implementation='flex_attention')
    packed = model.forward_only(inputs=[pack(rows)])['logits'][0]
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotSupportedError, match='flex_attention has no backward pass on a CPU'):
        model.forward_backward(inputs=[pack(rows)])
