"""Preference and policy losses through the model: the reference with the adapter disabled, padded and packed alike."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.helpers import reference
from twinkle.errors import DataError
from twinkle.model import TransformersModel

ROWS = reference.random_rows(6)


def lora():
    return LoraConfig(r=4, target_modules='all-linear', init_lora_weights=False)


def logp_sums(module, rows):
    """Summed log-probabilities of labels, one per row, from full logits."""
    batch = reference.collate(rows)
    logits = module(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
    each = F.cross_entropy(logits.flatten(0, 1), batch['labels'].flatten(), ignore_index=-100, reduction='none')
    return -each.view(batch['labels'].shape).sum(1)


@pytest.mark.parametrize('split', [[6], [2, 4]])
def test_dpo_takes_the_base_model_as_reference(tiny_llama, split):
    """Loss and gradients equal those by hand with PEFT's adapter disabled for the reference, however pairs are split."""
    torch.manual_seed(1)
    model = TransformersModel(tiny_llama, mixed_precision='no')
    model.add_adapter_to_model('a', lora())
    model.set_loss('dpo', beta=0.5)
    model.add_metric('dpo')
    torch.manual_seed(1)
    plain = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32), lora(), adapter_name='a'
    ).train()
    ours = logp_sums(plain, ROWS)
    with torch.no_grad(), plain.disable_adapter():
        base = logp_sums(plain.eval(), ROWS)
    ratio = ours - base
    losses = -F.logsigmoid(0.5 * (ratio[0::2] - ratio[1::2]))
    losses.mean().backward()

    start, total = 0, 0.0
    for size in split:
        output = model.forward_backward(inputs=ROWS[start : start + size], gradient_accumulation_steps=len(split))
        total += output['loss'] * output['num_tokens']
        start += size
    assert total / 3 == pytest.approx(float(losses.detach().mean()), rel=1e-5)
    model.clip_grad_norm(max_grad_norm=float('inf'))
    expected = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    for name, parameter in model._named_trainable('a'):
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
    assert model.calculate_metric()['reward_margin'] == pytest.approx(
        0.5 * float((ratio[0::2] - ratio[1::2]).detach().mean()), rel=1e-4, abs=1e-6
    )


def test_full_training_needs_the_reference_to_be_given(tiny_llama):
    """Without an adapter there is no base model to compare with: the error says what to pass, and passing it works."""
    model = TransformersModel(tiny_llama, mixed_precision='no')
    model.set_loss('dpo')
    with pytest.raises(DataError, match='ref_logps'):
        model.forward_backward(inputs=ROWS)
    given = [{**row, 'ref_logps': [-1.0] * len(row['input_ids'])} for row in ROWS]
    assert model.forward_backward(inputs=given)['num_tokens'] == 3


def test_grpo_raises_what_was_rewarded(tiny_llama):
    """A few steps with a positive advantage make the rewarded answers likelier, and the others less likely."""
    model = TransformersModel(tiny_llama, mixed_precision='no')
    model.set_loss('grpo')
    model.set_optimizer('default', lr=1e-3)
    rows = [{**row, 'advantages': 1.0 if index % 2 else -1.0} for index, row in enumerate(ROWS)]
    before = logp_sums(model.model.eval(), ROWS)
    for _ in range(5):
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step()
    change = (logp_sums(model.model.eval(), ROWS) - before).detach()
    assert change[1::2].min() > 0 > change[0::2].max()
