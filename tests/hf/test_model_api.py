"""Constructing the model, bad input, evaluation, metrics, patches, the summary."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from peft import LoraConfig

from tests.helpers import reference
from twinkle import DeviceMesh
from twinkle.errors import (
    ConfigError,
    DataError,
    InvalidPartError,
    MeshError,
    NotSupportedError,
    SourceError,
    StateError,
    UnknownNameError,
)
from twinkle.model import TransformersModel
from twinkle.patch import Patch

ROWS = reference.random_rows(4)


@pytest.fixture
def model(tiny_llama):
    return TransformersModel(tiny_llama, mixed_precision='no')


@pytest.mark.parametrize('model_cls', [None, 'AutoModelForCausalLM', 'LlamaForCausalLM', transformers.LlamaForCausalLM])
def test_model_class_by_class_name_or_default(tiny_llama, model_cls):
    """A class, its name, an Auto class or nothing lead to the architecture of the config."""
    assert (
        type(TransformersModel(tiny_llama, model_cls=model_cls, mixed_precision='no').model)
        is transformers.LlamaForCausalLM
    )


def test_config_alone_gives_random_weights_and_stays_as_it_is():
    """Without model_id a config builds a model of that size, and is not changed."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    before = config.to_dict()
    model = TransformersModel(config=config, mixed_precision='no')
    assert model.model.config.vocab_size == 64
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ('options', 'error', 'says'),
    [
        ({}, ConfigError, 'model_id'),
        ({'model_id': './no/such/folder'}, SourceError, 'no/such/folder'),
        ({'model_cls': 'NoSuchModel'}, ConfigError, 'NoSuchModel'),
        ({'model_cls': 3}, ConfigError, 'model_cls=3'),
        ({'config': {'hidden_size': 3}}, ConfigError, 'PretrainedConfig'),
        ({'mixed_precision': 'fp32'}, ConfigError, "'no', 'bf16', 'fp16', 'fp8'"),
        ({'mixed_precision': 'fp8'}, NotSupportedError, 'NVIDIA'),
        ({'mixed_precision': 'no', 'dtype': torch.bfloat16}, ConfigError, 'bf16'),
        ({'mixed_precision': 'fp16', 'dtype': 'float16'}, ConfigError, 'unscaled'),
        ({'mixed_precision': 'fp16', 'grad_scaler_config': {'no_such': 1}}, ConfigError, 'init_scale'),
        ({'mixed_precision': 'no', 'grad_scaler_config': {'init_scale': 1.0}}, ConfigError, 'fp16'),
        ({'strategy': 'zero3'}, ConfigError, 'native_fsdp'),
        ({'fsdp_config': {}}, NotSupportedError, 'fsdp_config'),
        (
            {'device_mesh': DeviceMesh.from_sizes(world_size=2, pp_size=2, device_type='cpu')},
            MeshError,
            'twinkle-megatron',
        ),
        ({'device_mesh': DeviceMesh.from_sizes(dp_size=2, device_type='cpu')}, MeshError, 'torchrun'),
        ({'device_mesh': DeviceMesh.from_sizes(cp_size=2, device_type='cpu')}, MeshError, 'ulysses_size'),
        (
            {'device_mesh': DeviceMesh.from_sizes(world_size=1, sequence_parallel=True, device_type='cpu')},
            MeshError,
            'ulysses_size or tp_size',
        ),
        ({'ddp_config': {}}, NotSupportedError, 'ddp_config'),
        ({'memory_efficient_init': True}, NotSupportedError, 'memory_efficient_init'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_options_are_refused_with_the_way_out(tiny_llama, options, error, says):
    """Each option that cannot work is a named error that says what can."""
    if options and 'model_id' not in options:
        options = {'model_id': tiny_llama, **options}
    with pytest.raises(error, match=says):
        TransformersModel(**{'mixed_precision': 'no', **options})


@pytest.mark.parametrize(
    ('setter', 'value', 'error'),
    [
        ('set_loss', 'cross_entrpy', UnknownNameError),
        ('set_loss', 3, InvalidPartError),
        ('set_loss', Patch, InvalidPartError),
        ('set_optimizer', 'AdmaW', UnknownNameError),
        ('set_optimizer', [], InvalidPartError),
        ('set_template', 3.0, InvalidPartError),
        ('set_processor', object(), InvalidPartError),
        ('add_metric', 'acuracy', UnknownNameError),
        ('add_metric', torch.nn.Linear, InvalidPartError),
        ('apply_patch', 'no_such', UnknownNameError),
        ('apply_patch', 5, InvalidPartError),
    ],
)
def test_setters_refuse_what_is_not_of_their_kind(model, setter, value, error):
    """A wrong type or an unknown name for a setter is a named error."""
    with pytest.raises(error):
        getattr(model, setter)(value)


def test_a_misspelt_loss_is_suggested_and_nothing_changes(model):
    """CASES 20: set_loss('cross_entrpy') suggests cross_entropy and keeps the loss that was set."""
    model.set_loss('mse')
    kept = model._adapters.get().loss
    with pytest.raises(UnknownNameError, match='cross_entropy'):
        model.set_loss('cross_entrpy')
    assert model._adapters.get().loss is kept


def test_schedule_without_optimizer_and_optimizer_without_parameters_are_refused(model):
    """Order matters where it must: a schedule needs an optimizer, an optimizer needs parameters."""
    with pytest.raises(StateError, match='set_optimizer'):
        model.set_lr_scheduler('default', num_training_steps=3)
    model.model.requires_grad_(False)
    with pytest.raises(StateError, match='frozen'):
        model.set_optimizer('default')


@pytest.mark.parametrize(
    ('inputs', 'error'),
    [
        ([], DataError),
        ('text', DataError),
        (None, DataError),
        ([[1, 2, 3]], DataError),
        ([{'messages': [{'role': 'user', 'content': 'hi'}]}], StateError),
        ([{'input_ids': [1, 2], 'labels': [1]}], DataError),
    ],
)
def test_inputs_that_cannot_be_run_are_refused(model, inputs, error):
    """Nothing, a string, a row that is no dictionary, an unencoded row without a template, labels of another length."""
    with pytest.raises(error):
        model.forward_backward(inputs=inputs)


def test_calls_in_the_wrong_order_say_the_right_one(model):
    """calculate_loss without forward, backward without loss, backward after forward_only."""
    with pytest.raises(StateError, match='forward'):
        model.calculate_loss()
    with pytest.raises(StateError, match='calculate_loss'):
        model.backward()
    model.forward_only(inputs=ROWS)
    with pytest.raises(StateError, match='forward_only'):
        model.backward()


def test_forward_only_leaves_mode_and_gradients_alone(model):
    """forward_only runs in evaluation mode without gradients, and the module is in the mode it was in before."""
    model.model.train()
    output = model.forward_only(inputs=ROWS)
    assert not output['logits'].requires_grad
    assert model.model.training
    assert output['loss'] == pytest.approx(model.calculate_loss())
    model.model.eval()
    model.forward_only(inputs=ROWS)
    assert not model.model.training


def test_metrics_of_training_and_evaluation_accumulate_apart(model):
    """calculate_metric gives means over tokens since the last call, apart for training and forward_only, and starts anew."""
    model.add_metric('accuracy')
    model.set_optimizer('SGD', lr=0.5)
    losses, counts = [], []
    for start in (0, 1):
        output = model.forward_backward(inputs=ROWS[start::2])
        losses.append(output['loss'] * output['num_tokens'])
        counts.append(output['num_tokens'])
    model.clip_grad_and_step(gradient_accumulation_steps=2)
    evaluated = model.forward_only(inputs=ROWS)
    training, evaluation = model.calculate_metric(), model.calculate_metric(is_training=False)
    assert training['loss'] == pytest.approx(sum(losses) / sum(counts), rel=1e-6)
    assert training['lr'] == 0.5
    assert training['step'] == 1
    assert training['grad_norm'] > 0
    assert evaluation['loss'] == pytest.approx(evaluated['loss'], rel=1e-6)
    batch = reference.collate(ROWS)
    keep = batch['labels'] != -100
    right = (evaluated['logits'].argmax(-1) == batch['labels'])[keep].double().mean()
    assert evaluation['accuracy'] == pytest.approx(float(right), rel=1e-6)
    assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in training.values())
    assert model.calculate_metric()['loss'] == 0.0


@pytest.mark.parametrize('how', ['option', 'patch'])
@pytest.mark.parametrize('kind', ['lora', 'full'])
def test_gradient_checkpointing_changes_no_number(tiny_llama, how, kind):
    """Loss and gradient norm with recomputed activations equal those without."""
    results = []
    for on in (False, True):
        options = {'gradient_checkpointing': True} if on and how == 'option' else {}
        model = TransformersModel(tiny_llama, mixed_precision='no', **options)
        if kind == 'lora':
            torch.manual_seed(0)
            model.add_adapter_to_model('a', LoraConfig(r=2, target_modules=['q_proj'], init_lora_weights=False))
        if on and how == 'patch':
            model.apply_patch('gradient_checkpointing')
        if on:
            assert any(getattr(module, 'gradient_checkpointing', False) for module in model.model.modules())
        loss = model.forward_backward(inputs=ROWS)['loss']
        results.append((loss, model.clip_grad_norm(max_grad_norm=float('inf'))))
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert results[0][1] > 0


def test_patches_in_place_and_in_place_of(model):
    """A function may patch in place or return another module; after an adapter only in place."""
    model.apply_patch(lambda module: setattr(module, 'patched', True))
    assert model.model.patched
    other = transformers.LlamaForCausalLM(model.model.config)
    model.apply_patch(lambda module: other)
    assert model.model is other
    model.add_adapter_to_model('a', LoraConfig(r=2, target_modules=['q_proj']))
    with pytest.raises(StateError, match='before add_adapter'):
        model.apply_patch(lambda module: other)


def test_train_configs_read_well(model):
    """The summary names adapter, parameters, optimizer, schedule, loss, template, accumulation and precision."""
    model.add_adapter_to_model('sft', LoraConfig(r=2, target_modules=['q_proj']), gradient_accumulation_steps=4)
    model.set_optimizer('default', lr=1e-4)
    model.set_lr_scheduler('default', num_training_steps=10)
    model.set_loss('cross_entropy')
    text = model.get_train_configs()
    trainable = sum(p.numel() for p in model.trainable_parameters('sft'))
    for part in (
        'sft',
        f'{trainable:,}',
        'lr=0.0001',
        'CosineWarmupScheduler',
        'CrossEntropyLoss',
        '4 micro-batch',
        'fp32',
    ):
        assert part in text


def test_trajectories_train_when_a_template_is_set():
    """With a template, messages go straight to the model."""
    from tests.helpers.tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = TransformersModel(config=config, mixed_precision='no')
    model.set_template('default', tokenizer=tokenizer)
    rows = [{'messages': [{'role': 'user', 'content': 'who are you'}, {'role': 'assistant', 'content': 'a star'}]}]
    output = model.forward_backward(inputs=rows)
    assert output['num_tokens'] > 0
    assert math.isfinite(output['loss'])


def test_a_mesh_of_one_under_a_launcher_of_two_is_refused(tiny_llama, monkeypatch):
    """Two processes that would each train a copy of their own are told so, with the sizes."""
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(MeshError, match='1 process'):
        TransformersModel(
            tiny_llama, mixed_precision='no', device_mesh=DeviceMesh.from_sizes(world_size=1, device_type='cpu')
        )
