"""Adapters: outputs by adapter, files by adapter, names, folders, and that a refused call changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers import reference
from twinkle.errors import (
    CheckpointError,
    ConfigError,
    DuplicateAdapterError,
    NameNotAllowedError,
    StateError,
    UnknownAdapterError,
)
from twinkle.model import TransformersModel

ROWS = reference.random_rows(4)


def lora(**options):
    return LoraConfig(r=4, target_modules=['q_proj', 'down_proj'], init_lora_weights=False, **options)


@pytest.fixture
def model(tiny_llama):
    return TransformersModel(tiny_llama, mixed_precision='no')


def real(output):
    keep = reference.collate(ROWS)['attention_mask'].bool()
    return output['logits'].detach()[keep]


def test_each_adapter_gives_its_own_outputs_as_plain_peft(model, tiny_llama):
    """CASES 27: outputs differ by adapter and equal plain PEFT's, in both directions of switching."""
    torch.manual_seed(0)
    for name in 'ab':
        model.add_adapter_to_model(name, lora())
    torch.manual_seed(0)
    plain = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32), lora(), adapter_name='a'
    )
    plain.add_adapter('b', lora())
    batch = reference.collate(ROWS)
    keep = batch.pop('attention_mask').bool()
    outputs = {}
    for name in 'aba':
        plain.set_adapter(name)
        with torch.no_grad():
            expected = plain.eval()(input_ids=batch['input_ids'], attention_mask=keep.long()).logits[keep]
        outputs[name] = real(model.forward_only(inputs=ROWS, adapter_name=name))
        torch.testing.assert_close(outputs[name], expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(outputs['a'], outputs['b'], atol=1e-3)


def test_saving_one_adapter_leaves_out_its_namesake(model, tmp_path):
    """CASES 12: saving foo writes only foo's tensors, and foobar is the same to the bit afterwards."""
    for name in ('foo', 'foobar'):
        model.add_adapter_to_model(name, lora())
    before = model.get_state_dict(adapter_name='foobar')
    folder = model.save('x', output_dir=tmp_path, adapter_name='foo')
    saved = load_file(f'{folder}/adapter_model.safetensors')
    foo = model.get_state_dict(adapter_name='foo')
    assert saved.keys() == foo.keys()
    assert not any('foo' in key for key in saved)
    assert all(torch.equal(saved[key], foo[key]) for key in foo)
    after = model.get_state_dict(adapter_name='foobar')
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_trained_adapter_opens_in_plain_peft(model, tiny_llama, tmp_path):
    """CASES 21: after one step the saved lora_B is non-zero, equals memory, and plain PEFT gives the same logits from it."""
    model.add_adapter_to_model('a', LoraConfig(r=4, target_modules='all-linear'))
    model.set_optimizer('default', lr=1e-2)
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    folder = model.save('x', output_dir=tmp_path)
    saved = load_file(f'{folder}/adapter_model.safetensors')
    assert all(value.abs().sum() > 0 for key, value in saved.items() if 'lora_B' in key)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32), folder
    ).eval()
    batch = reference.collate(ROWS)
    with torch.no_grad():
        expected = plain(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
    torch.testing.assert_close(real(model.forward_only(inputs=ROWS)), expected[batch['attention_mask'].bool()])


def test_an_adapter_comes_back_from_its_folder(model, tiny_llama, tmp_path):
    """add_adapter_to_model takes a saved adapter's folder, and load() puts one into an adapter that exists."""
    model.add_adapter_to_model('a', lora())
    folder = model.save('x', output_dir=tmp_path)
    expected = real(model.forward_only(inputs=ROWS))
    other = TransformersModel(tiny_llama, mixed_precision='no')
    other.add_adapter_to_model('first', lora())
    other.add_adapter_to_model('again', folder)
    assert torch.equal(real(other.forward_only(inputs=ROWS, adapter_name='again')), expected)
    assert not torch.equal(real(other.forward_only(inputs=ROWS, adapter_name='first')), expected)
    other.load(folder, adapter_name='first')
    assert torch.equal(real(other.forward_only(inputs=ROWS, adapter_name='first')), expected)


def test_loading_what_does_not_fit_is_refused_whole(model, tmp_path):
    """An adapter of another rank is refused by load(), and the adapter is what it was."""
    model.add_adapter_to_model('a', lora())
    folder = model.save('x', output_dir=tmp_path)
    model.add_adapter_to_model('b', LoraConfig(r=2, target_modules=['q_proj', 'down_proj']))
    before = model.get_state_dict(adapter_name='b')
    with pytest.raises(CheckpointError, match='shapes'):
        model.load(folder, adapter_name='b')
    assert all(torch.equal(before[k], v) for k, v in model.get_state_dict(adapter_name='b').items())


def test_full_weights_keep_tied_embeddings(tiny_llama_tied, tmp_path):
    """CASES 14: with tied embeddings, what is saved loads as tied, with equal logits, here and in plain Transformers."""
    model = TransformersModel(tiny_llama_tied, mixed_precision='no')
    model.set_optimizer('default', lr=1e-2)
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    folder = model.save('x', output_dir=tmp_path)
    expected = real(model.forward_only(inputs=ROWS))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert plain.lm_head.weight.data_ptr() == plain.model.embed_tokens.weight.data_ptr()
    batch = reference.collate(ROWS)
    with torch.no_grad():
        logits = plain(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
    torch.testing.assert_close(logits[batch['attention_mask'].bool()], expected)
    fresh = TransformersModel(tiny_llama_tied, mixed_precision='no')
    fresh.load(folder)
    assert torch.equal(real(fresh.forward_only(inputs=ROWS)), expected)
    assert fresh.model.lm_head.weight.data_ptr() == fresh.model.model.embed_tokens.weight.data_ptr()


def test_an_omitted_name_means_the_enclosing_or_the_only_adapter(model):
    """Left out, adapter_name is the enclosing one, else the only one, else an error that lists them; contexts nest and unwind."""
    model.add_adapter_to_model('a', lora())
    only = real(model.forward_only(inputs=ROWS))
    model.add_adapter_to_model('b', lora())
    with pytest.raises(UnknownAdapterError, match=r"\['a', 'b'\]"):
        model.forward_only(inputs=ROWS)
    with model.adapter('a'):
        assert torch.equal(real(model.forward_only(inputs=ROWS)), only)
        with pytest.raises(RuntimeError, match='inside'), model.adapter('b'):
            assert not torch.equal(real(model.forward_only(inputs=ROWS)), only)
            raise RuntimeError('inside')
        assert torch.equal(real(model.forward_only(inputs=ROWS)), only)
    with pytest.raises(UnknownAdapterError, match="Unknown adapter 'c'"):
        model.forward_backward(inputs=ROWS, adapter_name='c')


def test_a_pending_backward_survives_another_adapters_forward(model):
    """forward(a), then all of b's step, then backward(a): a's gradients are those of its pass alone."""
    for name in 'ab':
        model.add_adapter_to_model(name, lora())
    model.forward_backward(inputs=ROWS, adapter_name='a')
    expected = [p.grad.clone() for p in model.trainable_parameters('a')]
    for parameter in model.trainable_parameters('a'):
        parameter.grad = None
    model._adapters.get('a').window = model._adapters.get('a').window.next()
    model.forward(inputs=ROWS, adapter_name='a')
    model.calculate_loss(adapter_name='a')
    model.forward_backward(inputs=ROWS, adapter_name='b')
    model.backward(adapter_name='a')
    got = [p.grad for p in model.trainable_parameters('a')]
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(got, expected, strict=True))


def test_refused_adapters_leave_no_trace(model):
    """A duplicate, a bad name, a target that matches nothing, another PEFT type: named errors, the module as it was."""
    plain = [n for n, _ in model.model.named_modules()]
    with pytest.raises(ConfigError, match='no_such_layer'):
        model.add_adapter_to_model('a', LoraConfig(target_modules=['no_such_layer']))
    assert [n for n, _ in model.model.named_modules()] == plain
    assert all(p.requires_grad for p in model.model.parameters())
    with pytest.raises(ConfigError, match='LoraConfig'):
        model.add_adapter_to_model('a', {'r': 8})
    config = lora()
    untouched = copy.deepcopy(config)
    model.add_adapter_to_model('a', config)
    assert config == untouched
    modules = [n for n, _ in model.model.named_modules()]
    for name in ('', 'a.b', '../x', 'a b', 3):
        with pytest.raises(NameNotAllowedError):
            model.add_adapter_to_model(name, lora())
    with pytest.raises(DuplicateAdapterError, match="'a'"):
        model.add_adapter_to_model('a', lora())
    with pytest.raises(ValueError, match='IA3'):
        model.add_adapter_to_model('b', IA3Config(target_modules=['q_proj'], feedforward_modules=[]))
    with pytest.raises(ConfigError, match='gradient_accumulation_steps'):
        model.add_adapter_to_model('b', lora(), gradient_accumulation_steps=0)
    with pytest.raises(ConfigError, match='no_such_layer'):
        model.add_adapter_to_model('b', LoraConfig(target_modules=['no_such_layer']))
    assert [n for n, _ in model.model.named_modules()] == modules
    assert {p.requires_grad for p in model.trainable_parameters('a')} == {True}


def test_adapters_after_full_training_has_begun_are_refused(model):
    """Adapters freeze the base: adding one to a model that is trained in full is refused."""
    model.set_optimizer('default')
    with pytest.raises(StateError, match='base model itself is being trained'):
        model.add_adapter_to_model('a', lora())


def test_other_peft_types_train(model):
    """IA3, as another PEFT type, trains its own parameters and nothing else."""
    model.add_adapter_to_model(
        'a', IA3Config(target_modules=['q_proj', 'down_proj'], feedforward_modules=['down_proj'])
    )
    model.set_optimizer('default', lr=1e-2)
    base = model.model.base_model.model.model.embed_tokens.weight.clone()
    before = model.get_state_dict()
    model.forward_backward(inputs=ROWS)
    model.clip_grad_and_step()
    after = model.get_state_dict()
    assert all(not torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(base, model.model.base_model.model.model.embed_tokens.weight)


def test_training_leaves_the_callers_rows_alone(model):
    """CASES 26: what was passed in compares equal afterwards."""
    rows = copy.deepcopy(ROWS)
    model.forward_backward(inputs=rows)
    model.forward_only(inputs=rows[0])
    assert rows == ROWS
