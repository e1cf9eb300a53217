"""A run that stops and goes on equals one that never stopped; checkpoints that do not fit are refused whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig

from tests.helpers import reference
from twinkle.dataloader import DataLoader
from twinkle.errors import CheckpointError, NameNotAllowedError, StateError
from twinkle.model import TransformersModel

ROWS = reference.random_rows(10)


@pytest.fixture(scope='module')
def with_dropout(tmp_path_factory):
    """A tiny Llama whose attention drops at random, so that the random state matters."""
    folder = tmp_path_factory.mktemp('dropout')
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def build(source, kind, precision='no', accumulation=2, rows=ROWS):
    """A model set up for training, and its loader."""
    torch.manual_seed(5)
    model = TransformersModel(source, mixed_precision=precision)
    if kind == 'lora':
        config = LoraConfig(r=4, target_modules='all-linear', lora_dropout=0.1)
        model.add_adapter_to_model('a', config, gradient_accumulation_steps=accumulation)
    model.set_optimizer('default', lr=1e-2)
    model.set_lr_scheduler('default', num_warmup_steps=2, num_training_steps=40)
    return model, DataLoader(rows, batch_size=2, shuffle=True, seed=3)


def batches(loader, epochs):
    for _ in range(epochs):
        yield from loader


def train(model, stream, loader, steps, accumulation=2):
    losses = []
    for batch in stream:
        losses.append(model.forward_backward(inputs=batch, gradient_accumulation_steps=accumulation)['loss'])
        model.clip_grad_and_step()
        if len(losses) == steps:
            break
    return losses


@pytest.mark.parametrize('precision', ['no', 'fp16'])
@pytest.mark.parametrize('kind', ['lora', 'full'])
def test_resume_equals_the_run_that_was_never_stopped(with_dropout, tmp_path, kind, precision):
    """CASES 10, 25: 30 steps over 2 shuffled epochs against 13, a resume, and 17: losses to the bit; schedule, scaler, dropout."""
    rows = reference.random_rows(60)
    model, loader = build(with_dropout, kind, precision, rows=rows)
    straight = train(model, batches(loader, 2), loader, 60)
    assert model._adapters.get().step + model._adapters.get().skipped_steps == 30

    model, loader = build(with_dropout, kind, precision, rows=rows)
    first = train(model, batches(loader, 2), loader, 26)
    folder = model.save(
        'half',
        output_dir=tmp_path,
        save_optimizer=True,
        consumed_train_samples=loader.get_state()['consumed_train_samples'],
    )
    skipped = model._adapters.get().skipped_steps
    torch.manual_seed(999)
    model, loader = build(with_dropout, kind, precision, rows=rows)
    torch.manual_seed(998)
    state = model.resume_from_checkpoint(folder)
    assert state == {'cur_step': 13 - skipped, 'consumed_train_samples': 52, 'gradient_accumulation_steps': 2}
    loader.resume_from_checkpoint(state['consumed_train_samples'])
    assert first + train(model, batches(loader, 2), loader, 34) == straight


def test_resuming_weights_only_leaves_training_state_as_it_is(with_dropout, tmp_path):
    """resume_only_model takes weights and nothing else."""
    model, loader = build(with_dropout, 'lora')
    train(model, loader, loader, 4)
    folder = model.save('x', output_dir=tmp_path)
    other, _ = build(with_dropout, 'lora')
    assert other.resume_from_checkpoint(folder, resume_only_model=True)['cur_step'] == 2
    assert other._adapters.get().step == 0
    mine, theirs = other.get_state_dict(), model.get_state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    with pytest.raises(CheckpointError, match='training_state'):
        other.resume_from_checkpoint(folder)


def test_training_state_in_the_middle_of_a_window_is_refused(with_dropout, tmp_path):
    """Gradients are not part of a checkpoint: the error names flush; weights alone can always be saved."""
    model, _ = build(with_dropout, 'lora')
    model.forward_backward(inputs=ROWS[:2])
    with pytest.raises(StateError, match='flush=True'):
        model.save('x', output_dir=tmp_path, save_optimizer=True)
    assert not (tmp_path / 'x').exists()
    assert Path(model.save('x', output_dir=tmp_path)).is_dir()
    model.clip_grad_and_step(flush=True)
    model.save('y', output_dir=tmp_path, save_optimizer=True)
    assert (tmp_path / 'latest').read_text().strip() == 'y'


def test_a_checkpoint_of_another_setup_is_refused_and_changes_nothing(with_dropout, tmp_path):
    """No optimizer here, or one of another shape: refused before weights are touched."""
    model, loader = build(with_dropout, 'lora')
    train(model, loader, loader, 4)
    folder = model.save('x', output_dir=tmp_path, save_optimizer=True)
    torch.manual_seed(1)
    bare = TransformersModel(with_dropout, mixed_precision='no')
    bare.add_adapter_to_model('a', LoraConfig(r=4, target_modules='all-linear'))
    before = bare.get_state_dict()
    with pytest.raises(CheckpointError, match='optimizer'):
        bare.resume_from_checkpoint(folder)
    bare.set_optimizer('SGD', lr=1.0)
    with pytest.raises(CheckpointError, match='lr_scheduler'):
        bare.resume_from_checkpoint(folder)
    assert all(torch.equal(before[key], value) for key, value in bare.get_state_dict().items())


def test_a_failure_while_saving_keeps_the_older_checkpoint(with_dropout, tmp_path, monkeypatch):
    """CASES 11: an error while the optimizer state is written leaves the older checkpoint intact, and `latest` on it."""
    model, loader = build(with_dropout, 'lora')
    train(model, loader, loader, 4)
    model.save('old', output_dir=tmp_path, save_optimizer=True)
    expected = model.get_state_dict()
    train(model, loader, loader, 2)

    def broken(*_):
        raise OSError('disk on fire')

    monkeypatch.setattr('twinkle.checkpoint.save_state', broken)
    for name in ('new', 'old'):
        with pytest.raises(OSError, match='disk on fire'):
            model.save(name, output_dir=tmp_path, save_optimizer=True)
    monkeypatch.undo()
    other, _ = build(with_dropout, 'lora')
    other.resume_from_checkpoint(tmp_path)
    assert all(torch.equal(expected[key], value) for key, value in other.get_state_dict().items())
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ['old']


@pytest.mark.parametrize('name', ['../out', 'a/b', '.hidden', 'latest', ''])
def test_names_stay_within_the_output_folder(with_dropout, tmp_path, name):
    """A name that would leave output_dir, or that means something else there, is refused."""
    model, _ = build(with_dropout, 'lora')
    with pytest.raises(NameNotAllowedError):
        model.save(name, output_dir=tmp_path / 'out')


def test_keep_last_rotates(with_dropout, tmp_path):
    """Only the newest checkpoints stay; the default name counts optimizer steps."""
    model, loader = build(with_dropout, 'lora', accumulation=1)
    names = []
    for batch in loader:
        model.forward_backward(inputs=batch, gradient_accumulation_steps=1)
        model.clip_grad_and_step()
        names.append(Path(model.save(output_dir=tmp_path, keep_last=2)).name)
    assert names == [f'checkpoint-{step}' for step in range(1, 6)]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == names[-2:]


def test_a_full_checkpoint_is_itself_a_model(with_dropout, tmp_path):
    """The folder of a full-parameter run is a model_id, for Twinkle and for Transformers."""
    model, loader = build(with_dropout, 'full')
    train(model, loader, loader, 2)
    folder = model.save('x', output_dir=tmp_path, save_optimizer=True)
    expected = model.forward_only(inputs=ROWS[:2])['logits']
    assert torch.equal(
        TransformersModel(folder, mixed_precision='no').forward_only(inputs=ROWS[:2])['logits'], expected
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.model.parameters(), strict=True))
