"""Embeddings and values out of Transformers models: pooling, contrastive training, value models."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from peft import LoraConfig
from torch.nn import functional as F

from tests.helpers import reference
from tests.hf.test_packed import pack
from twinkle.errors import ConfigError, NotSupportedError, StateError
from twinkle.model import TransformersModel

ROWS = [{'input_ids': row['input_ids']} for row in reference.random_rows(6)]


@pytest.fixture(scope='module')
def tiny_bert(tmp_path_factory):
    """A random BertModel, without an output head."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp('bert')
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


def plain_embeddings(module, rows, how):
    """Row by row, without padding."""
    found = []
    for row in rows:
        hidden = module(input_ids=torch.tensor([row['input_ids']])).last_hidden_state[0]
        found.append({'mean': hidden.mean(0), 'cls': hidden[0], 'last': hidden[-1]}[how])
    return torch.stack(found)


@pytest.mark.parametrize('how', ['mean', 'cls', 'last'])
@pytest.mark.parametrize('family', ['bert', 'llama'])
def test_embeddings_equal_those_of_rows_alone(tiny_bert, tiny_llama, family, how):
    """Pooled hidden states of a padded batch equal plain Transformers' row by row, with a head and without, to 1e-5."""
    folder = tiny_bert if family == 'bert' else tiny_llama
    model = TransformersModel(folder, mixed_precision='no', pooling=how)
    plain = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain_embeddings(plain, ROWS, how)
    outputs = model.forward_only(inputs=ROWS, return_outputs=['embeddings'])
    assert outputs.keys() == {'embeddings'}
    torch.testing.assert_close(outputs['embeddings'], expected, rtol=1e-5, atol=1e-5)
    if family == 'llama':
        packed = model.forward_only(
            inputs=[pack(with_labels(ROWS[:4])), pack(with_labels(ROWS[4:]))], return_outputs=['embeddings']
        )
        torch.testing.assert_close(packed['embeddings'], expected, rtol=1e-5, atol=1e-5)


def with_labels(rows):
    return [{**row, 'labels': [*row['input_ids'][1:], -100]} for row in rows]


def test_the_default_pooling_is_the_models(tiny_bert, tiny_llama, tmp_path):
    """A Sentence Transformers folder says how it pools; else causal models take the last token, others the mean; one unknown is refused."""
    assert TransformersModel(tiny_bert, mixed_precision='no').pooling.how == 'mean'
    assert TransformersModel(tiny_llama, mixed_precision='no').pooling.how == 'last'
    transformers.BertModel.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    (tmp_path / '1_Pooling').mkdir()
    said = tmp_path / '1_Pooling' / 'config.json'
    said.write_text(json.dumps({'pooling_mode_cls_token': True, 'pooling_mode_mean_tokens': False}))
    assert TransformersModel(tmp_path, mixed_precision='no').pooling.how == 'cls'
    assert TransformersModel(tmp_path, mixed_precision='no', pooling='last').pooling.how == 'last'
    said.write_text(json.dumps({'pooling_mode_max_tokens': True}))
    with pytest.raises(ConfigError, match='pooling that is not known'):
        TransformersModel(tmp_path, mixed_precision='no')
    with pytest.raises(ConfigError, match="pooling='max'"):
        TransformersModel(tiny_bert, mixed_precision='no', pooling='max')


@pytest.mark.parametrize('family', ['bert', 'llama'])
@pytest.mark.parametrize('kind', ['full', 'lora'])
def test_infonce_trains_as_plain_pytorch(tiny_bert, tiny_llama, family, kind):
    """Loss and gradients of rows without labels equal cross entropy over cosine similarities by hand; two micro-batches add up."""
    folder = tiny_bert if family == 'bert' else tiny_llama
    model = TransformersModel(folder, mixed_precision='no', pooling='mean')
    if kind == 'lora':
        torch.manual_seed(0)
        model.add_adapter_to_model('a', LoraConfig(r=2, target_modules=['query', 'q_proj'], init_lora_weights=False))
    model.set_loss('infonce', temperature=0.1)
    model.add_metric('embedding')
    output = model.forward_backward(inputs=ROWS)
    named = dict(model._named_trainable('a' if kind == 'lora' else ''))
    grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    for p in named.values():
        p.grad = None
    base = model.adapters.base.train()
    body = base if family == 'bert' else base.model
    embedded = F.normalize(plain_embeddings(body, ROWS, 'mean'), dim=-1)
    scores = embedded[0::2] @ embedded[1::2].T / 0.1
    expected = F.cross_entropy(scores, torch.arange(3), reduction='sum')
    assert output['loss'] == pytest.approx(expected.item() / 3, rel=1e-5)
    (expected / 3).backward()  # the window's constant is its first micro-batch's count
    assert len(grads) > 1
    for name, p in named.items():
        if p.grad is not None and p.grad.abs().max() > 0:
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)
    numbers = model.calculate_metric()
    assert numbers['retrieval_accuracy'] == pytest.approx(float((scores.argmax(1) == torch.arange(3)).float().mean()))
    assert numbers['loss'] == pytest.approx(output['loss'])


def test_forward_only_evaluates_rows_without_labels(tiny_bert):
    """The loss and the metrics of a contrastive loss are computed without labels, apart from those of training."""
    model = TransformersModel(tiny_bert, mixed_precision='no')
    model.set_loss('infonce')
    model.add_metric('embedding')
    loss = model.forward_only(inputs=ROWS)['loss']
    assert model.forward_backward(inputs=ROWS)['loss'] == pytest.approx(loss, rel=1e-5)
    assert model.calculate_metric(is_training=False)['loss'] == pytest.approx(loss)


def test_encoders_refuse_packed_rows(tiny_bert):
    """Attention in both directions would mix packed samples: the error says so."""
    model = TransformersModel(tiny_bert, mixed_precision='no')
    with pytest.raises(NotSupportedError, match='both directions'):
        model.forward_only(inputs=[pack(with_labels(ROWS[:2]))], return_outputs=['embeddings'])


def test_values_come_from_a_value_model(tiny_llama):
    """A token classifier with one label gives values [B, T], and PPO's value loss trains it; a policy is told where values are from."""
    value_model = TransformersModel(
        tiny_llama, mixed_precision='no', model_cls='AutoModelForTokenClassification', num_labels=1
    )
    rows = with_labels(ROWS[:2])
    values = value_model.forward_only(inputs=rows, return_outputs=['values'])['values']
    plain = value_model.model.eval()
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([rows[0]['input_ids']])).logits[0, :, 0]
    torch.testing.assert_close(values[0, : len(expected)], expected, rtol=1e-5, atol=1e-5)

    def value_loss(inputs, outputs, returns):
        kept = inputs['labels'] != -100
        return ((outputs['values'] - returns)[kept] ** 2).mean()

    value_loss.requires = ('values',)
    value_model.set_loss(value_loss)
    value_model.set_optimizer('AdamW', lr=1e-2)
    losses = []
    for _ in range(10):
        losses.append(value_model.forward_backward(inputs=rows, returns=1.0)['loss'])
        value_model.clip_grad_and_step()
    assert losses[-1] < losses[0] / 2
    policy = TransformersModel(tiny_llama, mixed_precision='no')
    policy.set_loss('ppo', value_coef=0.5)
    with pytest.raises(StateError, match='AutoModelForTokenClassification'):
        policy.forward_backward(inputs=[{**row, 'advantages': 1.0} for row in rows])


def test_return_outputs_gives_what_is_named(tiny_llama):
    """Exactly the named keys, without a loss; an unknown name, and what the model does not have, are refused."""
    model = TransformersModel(tiny_llama, mixed_precision='no')
    rows = with_labels(ROWS[:2])
    outputs = model.forward_only(inputs=rows, return_outputs=('logps', 'entropies'))
    assert outputs.keys() == {'logps', 'entropies'}
    logits = model.forward_only(inputs=rows)['logits']
    labels = torch.tensor(rows[0]['labels'][:-1])
    expected = logits[0, : len(labels)].log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(outputs['logps'][0, : len(labels)], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match='logit'):
        model.forward_only(inputs=rows, return_outputs=['logit'])
    with pytest.raises(NotSupportedError, match='values'):
        model.forward_only(inputs=rows, return_outputs=['values'])
