"""Many tenants on one base model: each computes what plain PEFT alone computes, and nothing of it leaks to the others."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.helpers import reference
from twinkle import checkpoint
from twinkle.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DuplicateAdapterError,
    NameNotAllowedError,
    NotSupportedError,
    StateError,
    UnknownAdapterError,
)
from twinkle.model import MultiLoraTransformersModel

LR = 1e-2
CONFIGS = {
    'plain': {'r': 4, 'lora_alpha': 8, 'target_modules': 'all-linear'},
    'rslora': {'r': 8, 'lora_alpha': 3, 'use_rslora': True, 'target_modules': ['q_proj', 'down_proj']},
    'patterns': {'r': 2, 'target_modules': r'.*layers\.1\..*(k|v)_proj', 'rank_pattern': {'k_proj': 6}, 'alpha_pattern': {'v_proj': 5}},
    'dropout': {'r': 4, 'lora_dropout': 0.3, 'target_modules': ['v_proj', 'up_proj']},
}  # fmt: skip


def config(name: str) -> LoraConfig:
    return LoraConfig(init_lora_weights='gaussian', **CONFIGS[name])


@pytest.fixture
def model(tiny_llama):
    return MultiLoraTransformersModel(model_id=tiny_llama, mixed_precision='no', max_loras=4, max_r=8)


def rows_of(seed: int, count: int = 3):
    return reference.random_rows(count, seed=seed)


class Alone:
    """One tenant by hand: plain PEFT, its own random numbers, AdamW."""

    def __init__(self, source, name, seed):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        torch.manual_seed(seed)
        self.module = get_peft_model(base, config(name), adapter_name=name, autocast_adapter_dtype=False).train()
        self.name = name
        self.state = torch.get_rng_state()
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR)

    def backward(self, rows):
        torch.set_rng_state(self.state)
        total, count = reference.loss_sum(self.module, rows)
        self.state = torch.get_rng_state()
        (total / count).backward()
        return float(total.detach()) / count

    def step(self):
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def weights(self):
        return {
            name.replace(f'.{self.name}.', '.'): p.detach()
            for name, p in self.module.named_parameters()
            if p.requires_grad
        }


def acquire(model, name, seed):
    torch.manual_seed(seed)
    slot = model.multi_lora.acquire_lora(name, config(name))
    model.set_optimizer('AdamW', lr=LR, adapter_name=name)
    return slot


def step(model, name, seed):
    loss = model.forward_backward(inputs=rows_of(seed), adapter_name=name)['loss']
    return loss, model.clip_grad_and_step(adapter_name=name)


def state_of(model, name):
    weights = model.get_state_dict(adapter_name=name)
    return {key: value.clone() for key, value in weights.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# -- what a tenant computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('slot', [0, 3])
@pytest.mark.parametrize('name', CONFIGS)
def test_a_tenant_equals_plain_peft_alone(model, tiny_llama, name, slot):
    """Losses, norms and gradients to 1e-6, weights after 10 steps to 1e-2 x lr, in any slot, with neighbours that train in between."""
    others = [other for other in CONFIGS if other != name][: max(slot, 1)]
    for seed, other in enumerate(others):
        if slot:
            acquire(model, other, 50 + seed)
    alone = Alone(tiny_llama, name, 7)
    held = acquire(model, name, 7)
    if not slot:
        acquire(model, others[0], 50)
    assert held == f'lora_{slot}'
    assert model.get_state_dict(adapter_name=name).keys() == alone.weights().keys()
    for turn in range(10):
        expected = alone.backward(rows_of(turn))
        loss = model.forward_backward(inputs=rows_of(turn), adapter_name=name)['loss']
        assert loss == pytest.approx(expected, rel=1e-6)
        model.clip_grad_norm(adapter_name=name, max_grad_norm=float('inf'))
        mine = dict(model._named_trainable(name))
        for key, value in alone.module.named_parameters():
            if value.requires_grad:
                grad = mine[key.replace(f'.{name}.', '.')].grad
                torch.testing.assert_close(grad, value.grad, rtol=1e-5, atol=1e-6)
        norm = model.clip_grad_and_step(adapter_name=name)
        assert norm == pytest.approx(alone.step(), rel=1e-5)
        step(model, others[0], 100 + turn)
    weights = model.get_state_dict(adapter_name=name)
    assert max(float((weights[key] - value).abs().max()) for key, value in alone.weights().items()) <= 1e-2 * LR


def test_outputs_differ_by_tenant_and_the_base_model_is_as_it_was(model, tiny_llama):
    """CASES 27: each tenant's logits are its own, and without LoRA they are the base model's, before and after."""
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    rows = rows_of(1, 1)
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([rows[0]['input_ids']])).logits
    seen = []
    for seed, name in enumerate(CONFIGS):
        acquire(model, name, seed)
        step(model, name, 3)
        seen.append(model.forward_only(inputs=rows, adapter_name=name)['logits'])
        bare = model.forward_only(inputs=rows, adapter_name=name, disable_lora=True)['logits']
        torch.testing.assert_close(bare, expected, rtol=1e-5, atol=1e-6)
    assert all(not torch.allclose(a, b, atol=1e-4) for i, a in enumerate(seen) for b in seen[:i])


# -- nothing leaks -------------------------------------------------------------------------------------------------------


def test_others_steps_change_nothing_of_a_tenant(tiny_llama):
    """CASES 13: trained alone or between steps of others, in turn and in fused batches, losses and weights are equal to the bit."""
    results = []
    for crowded in (False, True):
        model = MultiLoraTransformersModel(model_id=tiny_llama, mixed_precision='no', max_loras=4, max_r=8)
        acquire(model, 'dropout', 5)
        losses = []
        if crowded:
            for seed, name in enumerate(('plain', 'patterns')):
                acquire(model, name, 60 + seed)
        for turn in range(6):
            losses.append(model.forward_backward(inputs=rows_of(turn), adapter_name='dropout')['loss'])
            if crowded:
                step(model, 'plain', 30 + turn)
                names = ['plain', 'patterns', 'patterns']
                model.forward_backward(inputs=rows_of(40 + turn), adapter_name=names)
                model.clip_grad_and_step(adapter_name=['plain', 'patterns'])
            model.clip_grad_and_step(adapter_name='dropout')
        results.append(
            (losses, state_of(model, 'dropout'), model._adapters.get('dropout').optimizer.state_dict()['state'])
        )
    (losses, weights, adam), (crowded_losses, crowded_weights, crowded_adam) = results
    assert losses == crowded_losses
    assert same(weights, crowded_weights)
    assert all(torch.equal(adam[i]['exp_avg_sq'], crowded_adam[i]['exp_avg_sq']) for i in adam)


def test_idle_tenants_do_not_move(model):
    """CASES 13, 24: while one trains, weights, gradients and Adam's state of others stay to the bit."""
    for seed, name in enumerate(CONFIGS):
        acquire(model, name, seed)
        step(model, name, seed)
    model.forward_backward(inputs=rows_of(9), adapter_name='rslora')
    before = {name: state_of(model, name) for name in CONFIGS}
    grads = [p.grad.clone() for p in model.trainable_parameters('rslora')]
    for turn in range(3):
        step(model, 'plain', turn)
    assert all(same(before[name], state_of(model, name)) for name in CONFIGS if name != 'plain')
    assert not same(before['plain'], state_of(model, 'plain'))
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.trainable_parameters('rslora'), strict=True))


def test_a_released_slot_is_as_new(model, tiny_llama):
    """The next tenant in it starts as plain PEFT with its seed, whatever was there before, and trains as alone."""
    acquire(model, 'plain', 1)
    for turn in range(3):
        step(model, 'plain', turn)
    model.multi_lora.release_lora('plain')
    assert all(not layer.down.any() and not layer.up.any() for layer in model._slots.layers.values())
    assert all(not layer._layer._forward_hooks for layer in model._slots.layers.values())
    alone = Alone(tiny_llama, 'patterns', 4)
    assert acquire(model, 'patterns', 4) == 'lora_0'
    assert same(state_of(model, 'patterns'), {key: value.clone() for key, value in alone.weights().items()})
    for turn in range(3):
        loss, norm = step(model, 'patterns', turn)
        assert loss == pytest.approx(alone.backward(rows_of(turn)), rel=1e-6)
        assert norm == pytest.approx(alone.step(), rel=1e-5)


# -- one pass for many ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('padding_free', [False, True])
@pytest.mark.parametrize('counts', [(2, 2, 2), (1, 3, 2)], ids=['even', 'uneven'])
def test_a_fused_pass_equals_each_alone(model, tiny_llama, counts, padding_free):
    """Loss, count, metrics, norm and weights of each tenant, of other ranks and losses, in one pass, are those of plain PEFT alone."""
    names = ['plain', 'rslora', 'patterns']
    alone = {}
    for seed, name in enumerate(names):
        alone[name] = Alone(tiny_llama, name, seed)
        acquire(model, name, seed)
        model.set_processor('default', padding_free=padding_free, adapter_name=name)
    for turn in range(4):
        rows = {name: rows_of(10 * turn + i, count) for i, (name, count) in enumerate(zip(names, counts, strict=True))}
        mixed = [(name, row) for name in names for row in rows[name]]
        mixed = mixed[::2] + mixed[1::2]
        results = model.forward_backward(inputs=[row for _, row in mixed], adapter_name=[name for name, _ in mixed])
        norms = model.clip_grad_and_step(adapter_name=names)
        assert list(norms) == names
        for name in names:
            own = [row for owner, row in mixed if owner == name]
            assert results[name]['loss'] == pytest.approx(alone[name].backward(own), rel=1e-5)
            assert results[name]['num_tokens'] == sum(label != -100 for row in own for label in row['labels'])
            assert norms[name] == pytest.approx(alone[name].step(), rel=1e-5)
            assert model.calculate_metric(adapter_name=name)['loss'] == pytest.approx(results[name]['loss'])
    for name in names:
        weights = model.get_state_dict(adapter_name=name)
        assert (
            max(float((weights[key] - value).abs().max()) for key, value in alone[name].weights().items()) <= 1e-2 * LR
        )


def test_each_tenant_has_its_own_loss_and_window(model):
    """One by cross entropy, one by DPO with its reference, one by a function; windows of other lengths end apart."""
    for seed, name in enumerate(('plain', 'rslora', 'patterns')):
        acquire(model, name, seed)
    model.set_loss('dpo', adapter_name='rslora', beta=0.5)

    def spread(inputs, outputs):
        return outputs['logits'].float().var()

    model.set_loss(spread, adapter_name='patterns')
    rows = {'plain': rows_of(1, 2), 'rslora': rows_of(2, 4), 'patterns': rows_of(3, 1)}
    expected = {name: model.forward_only(inputs=own, adapter_name=name).get('loss') for name, own in rows.items()}
    flat = [(name, row) for name, own in rows.items() for row in own]
    results = model.forward_backward(
        inputs=[row for _, row in flat], adapter_name=[name for name, _ in flat], gradient_accumulation_steps=1
    )
    assert results['plain']['loss'] == pytest.approx(expected['plain'], rel=1e-5)
    assert results['patterns']['loss'] == pytest.approx(expected['patterns'], rel=1e-4)
    assert results['rslora']['loss'] == pytest.approx(0.6931, abs=0.3)
    model.clip_grad_and_step(adapter_name=['plain', 'rslora'])
    assert model._adapters.get('patterns').step == 0
    assert model._adapters.get('plain').step == model._adapters.get('rslora').step == 1
    evaluated = model.forward_only(inputs=[row for _, row in flat], adapter_name=[name for name, _ in flat])
    single = model.forward_only(inputs=rows['plain'], adapter_name='plain')
    torch.testing.assert_close(evaluated['plain']['logits'], single['logits'], rtol=1e-4, atol=1e-5)
    assert evaluated['plain']['loss'] == pytest.approx(single['loss'], rel=1e-5)


def test_dropout_in_a_fused_pass_is_the_tenants_own(tiny_llama):
    """What a tenant with dropout draws does not depend on its neighbours in the batch."""
    losses = []
    for neighbour in ('plain', 'patterns'):
        model = MultiLoraTransformersModel(model_id=tiny_llama, mixed_precision='no', max_loras=4, max_r=8)
        acquire(model, 'dropout', 5)
        acquire(model, neighbour, 6)
        step(model, 'dropout', 0)  # B is zero before
        rows = rows_of(1, 4)
        runs = [
            model.forward_backward(inputs=rows, adapter_name=['dropout', 'dropout', neighbour, neighbour])['dropout'][
                'loss'
            ]
            for _ in range(2)
        ]
        assert runs[0] != runs[1]
        losses.append(runs)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_fused_pass_is_all_or_nothing(model):
    """A tenant whose gradients are normalised already refuses, and no other tenant's gradients have moved; bad lists are told."""
    for seed, name in enumerate(('plain', 'rslora')):
        acquire(model, name, seed)
    step(model, 'plain', 1)
    model.forward_backward(inputs=rows_of(1), adapter_name='rslora')
    model.clip_grad_norm(adapter_name='rslora')
    with pytest.raises(StateError, match='rslora'):
        model.forward_backward(inputs=rows_of(2, 2), adapter_name=['plain', 'rslora'])
    assert all(p.grad is None for p in model.trainable_parameters('plain'))
    with pytest.raises(DataError, match='2 tenants for 3 rows'):
        model.forward_backward(inputs=rows_of(2, 3), adapter_name=['plain', 'rslora'])
    with pytest.raises(UnknownAdapterError, match='nobody'):
        model.forward_backward(inputs=rows_of(2, 2), adapter_name=['plain', 'nobody'])
    with pytest.raises(UnknownAdapterError, match='nobody'):
        model.clip_grad_and_step(adapter_name=['plain', 'nobody'])
    with pytest.raises(DataError, match='list of rows'):
        model.forward_backward(inputs=rows_of(2, 1)[0], adapter_name=['plain'])


# -- coming and going ----------------------------------------------------------------------------------------------------


def test_slots_and_names(model):
    """Full, too large, taken, reserved, unknown: each error says who holds what, changes nothing, and leaves the slot free."""
    given = config('plain')
    before = copy.deepcopy(given.to_dict())
    model.multi_lora.acquire_lora('plain', given)
    assert given.to_dict() == before
    for name in ('b', 'c', 'd'):
        model.add_adapter_to_model(name, config('rslora'))
    with pytest.raises(RuntimeError, match=r"all 4 are held \(lora_0: 'plain' r=4, .*max_loras"):
        model.multi_lora.acquire_lora('e', config('plain'))
    model.multi_lora.release_lora('b')
    with pytest.raises(RuntimeError, match='rank 9, and slots have max_r=8'):
        model.multi_lora.acquire_lora('e', LoraConfig(r=4, target_modules=['q_proj'], rank_pattern={'q_proj': 9}))
    with pytest.raises(DuplicateAdapterError, match="'plain' has slot lora_0"):
        model.multi_lora.acquire_lora('plain', config('plain'))
    with pytest.raises(NameNotAllowedError, match='names of slots'):
        model.multi_lora.acquire_lora('lora_1', config('plain'))
    with pytest.raises(UnknownAdapterError, match='nobody'):
        model.multi_lora.release_lora('nobody')
    with pytest.raises(UnknownAdapterError, match="'lora_0' is the name of a slot"):
        model.forward_only(inputs=rows_of(1), adapter_name='lora_0')
    with pytest.raises(ConfigError, match='no_such'):
        model.multi_lora.acquire_lora('e', LoraConfig(r=2, target_modules=['no_such']))
    assert [t.tenant_adapter_name for t in model.multi_lora.tenants] == ['plain', 'c', 'd']
    assert model.multi_lora.acquire_lora('e', config('plain')) == 'lora_1'


@pytest.mark.parametrize(
    'options',
    [{'use_dora': True}, {'bias': 'all'}, {'modules_to_save': ['lm_head']}, {'init_lora_weights': 'pissa'}, {'target_modules': ['lm_head']},
     {'target_modules': ['embed_tokens']}, {'trainable_token_indices': [1]}],
    ids=lambda options: next(iter(options.items()))[1].__repr__(),
)  # fmt: skip
def test_what_a_slot_cannot_do_is_refused(model, options):
    """With the reason, and the slot is free again."""
    with pytest.raises(NotSupportedError):
        model.multi_lora.acquire_lora('a', LoraConfig(**{'r': 2, 'target_modules': ['q_proj'], **options}))
    assert len(model.multi_lora) == 0
    assert acquire(model, 'plain', 0) == 'lora_0'


def test_targets_that_match_nothing_are_reported(model, caplog):
    """An entry of a list that no layer matches is told; PEFT would say nothing."""
    model.multi_lora.acquire_lora('a', LoraConfig(r=2, target_modules=['q_proj', 'query']))
    assert "target_modules 'query' match nothing" in caplog.text


def test_contexts_mean_tenants(model):
    """Within one, an omitted name and the slot's name are the tenant; they nest and are restored after exceptions."""
    for seed, name in enumerate(('plain', 'rslora')):
        acquire(model, name, seed)
    rows = rows_of(1)
    logits = {name: model.forward_only(inputs=rows, adapter_name=name)['logits'] for name in ('plain', 'rslora')}
    with pytest.raises(UnknownAdapterError, match='several adapters'):
        model.forward_only(inputs=rows)
    with model.multi_lora.adapter('plain') as outer:
        assert torch.equal(model.forward_only(inputs=rows)['logits'], logits['plain'])
        with pytest.raises(ZeroDivisionError), model.multi_lora.adapter('rslora') as inner:
            assert torch.equal(model.forward_only(inputs=rows)['logits'], logits['rslora'])
            assert torch.equal(model.forward_only(inputs=rows, adapter_name=inner)['logits'], logits['rslora'])
            assert torch.equal(model.forward_only(inputs=rows, adapter_name=outer)['logits'], logits['plain'])
            1 / 0
        assert torch.equal(model.forward_only(inputs=rows, adapter_name=outer)['logits'], logits['plain'])
    with pytest.raises(UnknownAdapterError):
        model.forward_only(inputs=rows, adapter_name=outer)
    with model.adapter('rslora'):
        batch = reference.collate(rows)
        with torch.no_grad():
            direct = model.model.eval()(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
    keep = batch['attention_mask'].bool()
    torch.testing.assert_close(direct[keep], logits['rslora'][keep])


def test_rows_are_limited_by_max_length(tiny_llama):
    """The error names tenant, row and length."""
    model = MultiLoraTransformersModel(model_id=tiny_llama, mixed_precision='no', max_length=5)
    model.multi_lora.acquire_lora('plain', config('plain'))
    rows = [
        {'input_ids': [1, 2], 'labels': [2, -100]},
        {'input_ids': list(range(1, 8)), 'labels': [2, *range(3, 8), -100]},
    ]
    with pytest.raises(DataError, match="Row 1 of tenant 'plain' has 7 tokens, more than max_length=5"):
        model.forward_backward(inputs=rows)


# -- files ---------------------------------------------------------------------------------------------------------------


def test_files_are_plain_peft_of_the_tenants_own_rank(model, tiny_llama, tmp_path):
    """CASES 12, 21: saved, loaded by plain PEFT and by another tenant, it gives the same outputs; the merge is PEFT's."""
    for seed, name in enumerate(('patterns', 'plain')):
        acquire(model, name, seed)
        step(model, name, seed)
    rows = rows_of(3)
    expected = model.forward_only(inputs=rows, adapter_name='patterns')['logits']
    folder = model.save('p', tmp_path, adapter_name='patterns')
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder).eval()
    assert {p.shape[0] for n, p in loaded.named_parameters() if 'lora_A' in n} == {2, 6}
    assert all(p.abs().sum() > 0 for n, p in loaded.named_parameters() if 'lora_B' in n)
    batch = reference.collate(rows)
    keep = batch['attention_mask'].bool()
    with torch.no_grad():
        found = loaded(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
    torch.testing.assert_close(found[keep], expected[keep], rtol=1e-5, atol=1e-5)
    model.add_adapter_to_model('again', folder)
    assert torch.equal(model.forward_only(inputs=rows, adapter_name='again')['logits'], expected)
    merged = model.save('m', tmp_path, adapter_name='patterns', merge_lora=True)
    theirs = loaded.merge_and_unload().state_dict()
    mine = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
    assert all(torch.equal(theirs[key], value) for key, value in mine.items())
    with pytest.raises(CheckpointError, match="does not fit tenant 'plain'"):
        model.load(folder, adapter_name='plain')


def test_a_tenant_resumes_exactly_while_others_go_on(model, tmp_path):
    """In another slot, with dropout, while a neighbour trains: the losses of the run that was never stopped."""
    acquire(model, 'dropout', 5)
    acquire(model, 'plain', 6)
    for turn in range(3):
        step(model, 'dropout', turn)
    folder = model.save('half', tmp_path, adapter_name='dropout', save_optimizer=True)
    expected = [step(model, 'dropout', turn) for turn in range(3, 6)]
    others = [step(model, 'plain', turn) for turn in range(2)]
    model.multi_lora.release_lora('dropout')
    acquire(model, 'rslora', 9)
    acquire(model, 'dropout', 77)
    assert model.multi_lora.get('dropout').adapter_name == 'lora_2'
    torch.manual_seed(123)
    process = checkpoint.rng_state()['torch']
    model.resume_from_checkpoint(folder, adapter_name='dropout')
    assert torch.equal(checkpoint.rng_state()['torch'], process)
    found = []
    for turn in range(3, 6):
        found.append(step(model, 'dropout', turn))
        step(model, 'plain', 10 + turn)
    assert found == expected
    assert len(others) == 2
