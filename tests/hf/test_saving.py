"""Saving in the background, and saving merged weights."""

from __future__ import annotations

import json

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers import reference
from tests.helpers.models import tiny_llama_dir
from twinkle import checkpoint, initialize
from twinkle.errors import CheckpointError, ConfigError, NotSupportedError
from twinkle.hookspecs import hookimpl
from twinkle.model import TransformersModel
from twinkle.plugins import get_hooks

ROWS = reference.random_rows(4)


def lora(**options):
    return LoraConfig(**{'r': 4, 'target_modules': 'all-linear', 'init_lora_weights': False, **options})


def trained(folder, kind, steps=2):
    """A model after some steps, on the way to more."""
    torch.manual_seed(0)
    model = TransformersModel(folder, mixed_precision='no')
    if kind == 'lora':
        model.add_adapter_to_model('a', lora(lora_dropout=0.1))
    model.set_optimizer('AdamW', lr=0.01)
    model.set_lr_scheduler('default', num_warmup_steps=1, num_training_steps=20)
    for _ in range(steps):
        step(model)
    return model


def step(model):
    loss = model.forward_backward(inputs=ROWS)['loss']
    model.clip_grad_and_step()
    return loss


# -- in the background ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['lora', 'full'])
def test_a_background_save_holds_what_was_there_when_it_was_asked_for(tiny_llama, tmp_path, kind):
    """Training goes on while it is written; the files equal those of a save that blocks, and the run resumes from it exactly."""
    model = trained(tiny_llama, kind)
    sync = model.save('sync', tmp_path / 'sync', save_optimizer=True, consumed_train_samples=8)
    random_state = checkpoint.rng_state()
    background = model.save('sync', tmp_path / 'async', save_optimizer=True, consumed_train_samples=8, async_save=True)
    expected = [step(model) for _ in range(3)]
    checkpoint.wait_for_saves(tmp_path / 'async')
    for name in ('model.safetensors', 'adapter_model.safetensors', 'training_state.safetensors'):
        if not (tmp_path / 'sync' / 'sync' / name).exists():
            continue
        one, other = (load_file(f'{folder}/{name}') for folder in (sync, background))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    checkpoint.set_rng_state(random_state)
    again = trained(tiny_llama, kind, steps=0)
    assert again.resume_from_checkpoint(background)['consumed_train_samples'] == 8
    assert [step(again) for _ in range(3)] == expected


def test_what_goes_wrong_in_the_background_is_told(tiny_llama, tmp_path, monkeypatch):
    """An error while writing is raised by the next save, by wait_for_saves, and at the end of a run; the older one stays."""
    model = trained(tiny_llama, 'lora', steps=1)
    model.save('first', tmp_path)
    real = checkpoint.states.save_file

    def full(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    for end in (lambda: model.save('third', tmp_path), lambda: checkpoint.wait_for_saves()):
        monkeypatch.setattr('twinkle.checkpoint.states.save_file', full)
        model.save('second', tmp_path, save_optimizer=True, async_save=True)
        with pytest.raises(CheckpointError, match=r'second.*No space left'):
            end()
        monkeypatch.setattr('twinkle.checkpoint.states.save_file', real)
        assert checkpoint.latest_checkpoint(tmp_path).name == 'first'
    with pytest.raises(CheckpointError, match='No space left'):
        with initialize(output_dir=tmp_path / 'run'):
            monkeypatch.setattr('twinkle.checkpoint.states.save_file', full)
            model.save('second', tmp_path, save_optimizer=True, async_save=True)


def test_plugins_are_told_of_complete_checkpoints(tiny_llama, tmp_path):
    """The hook `checkpoint_saved` is called with the path and the optimizer step, for both ways of saving."""
    seen = []

    class Watcher:
        @hookimpl
        def checkpoint_saved(self, path, step):
            seen.append((path, step, (tmp_path / 'latest').read_text().strip()))

    manager, watcher = get_hooks(), Watcher()
    manager.register(watcher)
    try:
        model = trained(tiny_llama, 'lora', steps=1)
        first = model.save('one', tmp_path)
        step(model)
        second = model.save(None, tmp_path, async_save=True)
        checkpoint.wait_for_saves(tmp_path)
    finally:
        manager.unregister(watcher)
    assert seen == [(first, 1, 'one'), (second, 2, 'checkpoint-2')]


# -- merged --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'use_rslora': True, 'lora_alpha': 7},
        {'use_dora': True},
        {'target_modules': ['q_proj', 'embed_tokens']},
        {'target_modules': ['v_proj'], 'modules_to_save': ['lm_head']},
        {'rank_pattern': {'q_proj': 2}, 'alpha_pattern': {'down_proj': 3}},
    ],
    ids=['lora', 'rslora', 'dora', 'embedding', 'modules_to_save', 'patterns'],
)
@pytest.mark.parametrize('async_save', [False, True])
def test_merged_weights_equal_pefts_merge(tiny_llama, tmp_path, options, async_save):
    """The files equal, to the bit, what PEFT merges from the saved adapter; the model and its other adapter stay as they were."""
    torch.manual_seed(0)
    model = TransformersModel(tiny_llama, mixed_precision='no')
    model.add_adapter_to_model('a', lora(**options))
    model.add_adapter_to_model('b', lora())
    before = {key: value.clone() for key, value in model.model.state_dict().items()}
    outputs = model.forward_only(inputs=ROWS, adapter_name='a')['logits']
    adapter = model.save('adapter', tmp_path, adapter_name='a')
    merged = model.save('merged', tmp_path, adapter_name='a', merge_lora=True, async_save=async_save)
    checkpoint.wait_for_saves(tmp_path)
    after = model.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert expected.keys() == found.state_dict().keys()
    assert all(torch.equal(expected[key], value) for key, value in found.state_dict().items())
    plain = TransformersModel(merged, mixed_precision='no').forward_only(inputs=ROWS)['logits']
    torch.testing.assert_close(plain, outputs, rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / 'merged' / 'trainer_state.json').read_text())['adapter_name'] == 'a'


def test_merging_says_what_it_cannot_do(tiny_llama, tmp_path):
    """No adapter, training state beside merged weights, and adapters that PEFT cannot merge are refused; nothing is written."""
    model = TransformersModel(tiny_llama, mixed_precision='no')
    with pytest.raises(ConfigError, match='no adapter to merge'):
        model.save('x', tmp_path, merge_lora=True)
    model.add_adapter_to_model('a', PrefixTuningConfig(num_virtual_tokens=2, task_type='CAUSAL_LM'))
    with pytest.raises(NotSupportedError, match='cannot merge'):
        model.save('x', tmp_path, merge_lora=True)
    with pytest.raises(ConfigError, match='save_optimizer'):
        model.save('x', tmp_path, merge_lora=True, save_optimizer=True)
    assert not list(tmp_path.iterdir())


def test_tied_embeddings_stay_tied_in_a_background_save(tmp_path):
    """CASES 14 for a snapshot: the loaded model is tied, and its logits are equal."""
    model = TransformersModel(tiny_llama_dir(tmp_path / 'tied', tie=True), mixed_precision='no')
    logits = model.forward_only(inputs=ROWS)['logits']
    folder = model.save('x', tmp_path / 'out', async_save=True)
    checkpoint.wait_for_saves()
    again = TransformersModel(folder, mixed_precision='no')
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert torch.equal(again.forward_only(inputs=ROWS)['logits'], logits)


def test_an_adapter_on_a_tied_weight_is_not_merged(tmp_path):
    """Merged, it would change the output head too: refused, with the layer; one on other layers of that model is merged."""
    source = tiny_llama_dir(tmp_path / 'tied', tie=True)
    model = TransformersModel(source, mixed_precision='no')
    with pytest.warns(UserWarning, match='tie'):
        model.add_adapter_to_model('a', lora(target_modules=['embed_tokens']))
    with pytest.raises(NotSupportedError, match=r'embed_tokens, whose weight is tied'):
        model.save('x', tmp_path / 'out', merge_lora=True)
    other = TransformersModel(source, mixed_precision='no')
    other.add_adapter_to_model('a', lora(target_modules=['q_proj']))
    expected = other.forward_only(inputs=ROWS)['logits']
    merged = TransformersModel(other.save('m', tmp_path / 'out', merge_lora=True), mixed_precision='no')
    torch.testing.assert_close(merged.forward_only(inputs=ROWS)['logits'], expected, rtol=1e-4, atol=1e-5)


def test_other_kinds_of_adapters_merge_too(tiny_llama, tmp_path):
    """IA3 is merged by PEFT as LoRA is."""
    model = TransformersModel(tiny_llama, mixed_precision='no')
    model.add_adapter_to_model(
        'a', IA3Config(target_modules=['k_proj', 'v_proj'], feedforward_modules=[], init_ia3_weights=False)
    )
    expected = model.forward_only(inputs=ROWS)['logits']
    merged = TransformersModel(model.save('m', tmp_path, merge_lora=True), mixed_precision='no')
    torch.testing.assert_close(merged.forward_only(inputs=ROWS)['logits'], expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_that_plain_peft_saved_with_embeddings_is_read(tiny_llama, tmp_path):
    """PEFT writes the base model's embedding beside a LoRA on it: equal to ours it is dropped, another one is refused."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    plain = get_peft_model(base, lora(target_modules=['q_proj', 'embed_tokens']))
    plain.save_pretrained(tmp_path / 'plain', save_embedding_layers=True)
    model = TransformersModel(tiny_llama, mixed_precision='no')
    model.add_adapter_to_model('a', str(tmp_path / 'plain'))
    batch = reference.collate(ROWS)
    with torch.no_grad():
        expected = plain.eval()(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
    keep = batch['attention_mask'].bool()
    torch.testing.assert_close(model.forward_only(inputs=ROWS)['logits'][keep], expected[keep], rtol=1e-5, atol=1e-5)
    other = TransformersModel(tiny_llama, mixed_precision='no')
    with torch.no_grad():
        other.model.model.embed_tokens.weight[0, 0] += 1
    with pytest.raises(CheckpointError, match='another base'):
        other.add_adapter_to_model('a', str(tmp_path / 'plain'))
