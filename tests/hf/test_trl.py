"""SFT and DPO against TRL's trainers: the same tiny Llama, rows and SGD (fp32, CPU), losses, gradients and weights side by side.

Both sides count the same way: SFT is the mean over the labels of all micro-batches of a step, DPO the mean over its pairs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.helpers import reference
from twinkle.model import TransformersModel

trl = pytest.importorskip('trl')

STEPS, ACCUMULATION, ROWS, PAIRS, VOCAB, EOS = 3, 2, 4, 3, 64, 2
# Small enough that rounding is not amplified from step to step.
LR = 0.01
EXACT = 1e-5
WEIGHTS = 1e-6


@dataclass
class Trace:
    """Each micro-batch's part of its step's loss; before each optimizer step the gradients; the weights at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def lora():
    """B is random too, so that the policy differs from the reference at the first step."""
    return LoraConfig(r=4, lora_alpha=8, target_modules='all-linear', init_lora_weights=False)


def trainable(module):
    return {n: p for n, p in module.named_parameters() if p.requires_grad}


def gradients_of(module):
    return {n: p.grad.detach().clone() for n, p in trainable(module).items()}


def weights_of(module):
    return {n: p.detach().clone() for n, p in trainable(module).items()}


def word(token):
    """Of one length, or the end would be found within other words."""
    return f'w{token:02}'


def text(ids):
    return ' '.join(map(word, ids))


def tokenizer():
    """A word for each token; 0 pads and 2 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word(i): i for i in range(VOCAB)}, unk_token=word(1)))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=word(0), unk_token=word(1), eos_token=word(EOS))


def run_trl(kind, tiny_llama, folder, data, *, size, use_lora, lr=LR, **options):
    """Train with TRL. Gives its trace, the weights before the first step, and the trainer."""
    from datasets import Dataset

    trace = Trace()

    class Read(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            trace.gradients.append(gradients_of(model))

    class Trainer(getattr(trl, f'{kind}Trainer')):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)  # of which the backward pass was, divided already
            trace.losses.append(float(loss))
            return loss

    args = getattr(trl, f'{kind}Config')(
        output_dir=str(folder),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=lr,
        lr_scheduler_type='constant',
        optim='sgd',
        max_grad_norm=0.0,
        train_sampling_strategy='sequential',
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to=[],
        save_strategy='no',
        logging_strategy='no',
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
        peft_config=lora() if use_lora else None,
        callbacks=[Read()],
    )
    start = weights_of(trainer.model)
    trainer.train()
    trace.weights = weights_of(trainer.model)
    return trace, start, trainer


def run_twinkle(tiny_llama, rows, *, size, start, use_lora, loss=None, lr=LR):
    """Train with Twinkle, from TRL's weights."""
    model = TransformersModel(tiny_llama, mixed_precision='no')
    if use_lora:
        model.add_adapter_to_model('default', lora())
    parameters = trainable(model.model)
    assert parameters.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
    if loss:
        name, options = loss
        model.set_loss(name, **options)
    model.set_optimizer('SGD', lr=lr)
    trace = Trace()
    windows = [rows[i : i + size * ACCUMULATION] for i in range(0, len(rows), size * ACCUMULATION)]
    for window in windows:
        micro = [
            model.forward_backward(inputs=window[i : i + size], gradient_accumulation_steps=ACCUMULATION)
            for i in range(0, len(window), size)
        ]
        total = sum(m['num_tokens'] for m in micro)
        trace.losses += [m['loss'] * m['num_tokens'] / total for m in micro]
        model.clip_grad_norm(max_grad_norm=float('inf'))
        trace.gradients.append(gradients_of(model.model))
        model.step()
        model.zero_grad()
    trace.weights = weights_of(model.model)
    return trace


def assert_equal(ours, theirs, start, scale=1.0):
    """Losses and gradients are `scale` times TRL's, by parameter and by norm, the weights the same; and weights have moved."""
    assert len(ours.losses) == len(theirs.losses) == STEPS * ACCUMULATION
    assert len(ours.gradients) == len(theirs.gradients) == STEPS
    assert ours.losses == pytest.approx([scale * x for x in theirs.losses], rel=EXACT)
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert mine.keys() == other.keys()
        other = {name: scale * gradient for name, gradient in other.items()}
        norms = [float(torch.nn.utils.get_total_norm(list(each.values()))) for each in (mine, other)]
        assert norms[1] > 1e-3
        assert norms[0] == pytest.approx(norms[1], rel=EXACT)
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=EXACT, atol=EXACT * float(other[name].abs().max()))
    assert max(float((ours.weights[n] - theirs.weights[n]).abs().max()) for n in start) <= WEIGHTS
    assert max(float((theirs.weights[n] - start[n]).abs().max()) for n in start) > 1e3 * WEIGHTS


@pytest.mark.parametrize('use_lora', [False, True], ids=['full', 'lora'])
def test_sft_equals_trl(tiny_llama, tmp_path, use_lora):
    """Three SGD steps of two micro-batches of rows of unequal length: the mean is over the step's labels on both sides."""
    rows = reference.random_rows(STEPS * ACCUMULATION * ROWS)
    counts = [sum(t != -100 for r in rows[i : i + ROWS] for t in r['labels']) for i in range(0, len(rows), ROWS)]
    assert all(a != b for a, b in zip(counts[::2], counts[1::2], strict=True))
    # TRL's model shifts labels itself.
    data = [{'input_ids': r['input_ids'], 'labels': [-100, *r['labels'][:-1]]} for r in rows]
    theirs, start, _ = run_trl('SFT', tiny_llama, tmp_path, data, size=ROWS, use_lora=use_lora)
    ours = run_twinkle(tiny_llama, rows, size=ROWS, start=start, use_lora=use_lora)
    assert_equal(ours, theirs, start)


def preferences(shortest=2, longest=10):
    """Prompts with a chosen and a rejected answer, as ids; answers are of so many tokens, their end included."""
    rng = random.Random(1)

    def ids(low, high):
        return [rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high))]

    def answer():
        return [*ids(shortest - 1, longest - 1), EOS]

    return [
        {'prompt_ids': ids(2, 6), 'chosen_ids': answer(), 'rejected_ids': answer()}
        for _ in range(STEPS * ACCUMULATION * PAIRS)
    ]


def interleaved(pairs, mean_of_tokens):
    """Twinkle's rows: chosen and rejected in turn, labels shifted. The weights 1 / length turn sums over an answer into means."""
    rows = []
    for pair in pairs:
        for side in ('chosen_ids', 'rejected_ids'):
            prompt, answer = pair['prompt_ids'], pair[side]
            labels = [*[-100] * (len(prompt) - 1), *answer, -100]
            row = {'input_ids': [*prompt, *answer], 'labels': labels}
            if mean_of_tokens:
                row['loss_weights'] = [1 / len(answer)] * len(labels)
            rows.append(row)
    return rows


BETA, SMOOTHING = 0.3, 0.2
# Twinkle's options, TRL's options.
DPO = {
    'sigmoid': ({}, {'loss_type': ['sigmoid']}),
    # TRL has the unbiased `robust` = ((1 - e) A - e B) / (1 - 2 e), A = -log sigmoid(beta h), B = -log sigmoid(-beta h). The smoothed
    # loss (1 - e) A + e B of Twinkle is that mix of TRL's losses: 2 (1 - e) A - (1 - 2 e) robust.
    'smoothed': (
        {'label_smoothing': SMOOTHING},
        {
            'loss_type': ['sigmoid', 'robust'],
            'loss_weights': [2 * (1 - SMOOTHING), -(1 - 2 * SMOOTHING)],
            'label_smoothing': SMOOTHING,
        },
    ),
    'hinge': ({'loss_type': 'hinge'}, {'loss_type': ['hinge']}),
    # TRL's h is of means over an answer's tokens, Twinkle's of sums, as in the paper: with the weights 1 / length they are the same.
    'ipo': ({'loss_type': 'ipo'}, {'loss_type': ['ipo']}),
}


def run_trl_dpo(tiny_llama, folder, pairs, **options):
    """TRL tokenises by itself: to the ids that Twinkle is given."""
    data = [
        {'prompt': text(p['prompt_ids']), **{side: ' ' + text(p[f'{side}_ids']) for side in ('chosen', 'rejected')}}
        for p in pairs
    ]
    theirs, start, trainer = run_trl('DPO', tiny_llama, folder, data, size=PAIRS, use_lora=True, **options)
    assert [{key: row[key] for key in pairs[0]} for row in trainer.train_dataset] == pairs
    return theirs, start


@pytest.mark.parametrize('case', DPO)
def test_dpo_equals_trl(tiny_llama, tmp_path, case):
    """Three SGD steps of DPO with LoRA, the reference being the base model, answers of unequal length."""
    options, trl_options = DPO[case]
    pairs = preferences()
    theirs, start = run_trl_dpo(tiny_llama, tmp_path, pairs, beta=BETA, **trl_options)
    rows = interleaved(pairs, mean_of_tokens=case == 'ipo')
    loss = ('dpo', {'beta': BETA, **options})
    ours = run_twinkle(tiny_llama, rows, size=2 * PAIRS, start=start, use_lora=True, loss=loss)
    assert_equal(ours, theirs, start)


def test_ipo_of_sums_equals_trl_rescaled(tiny_llama, tmp_path):
    """With answers all of L tokens, Twinkle's ipo of sums at beta / L is L^2 times TRL's ipo of means at beta."""
    length = 5
    pairs = preferences(length, length)
    lr = LR / length**2
    theirs, start = run_trl_dpo(tiny_llama, tmp_path, pairs, beta=BETA, loss_type=['ipo'], lr=LR)
    rows = interleaved(pairs, mean_of_tokens=False)
    loss = ('dpo', {'beta': BETA / length, 'loss_type': 'ipo'})
    ours = run_twinkle(tiny_llama, rows, size=2 * PAIRS, start=start, use_lora=True, loss=loss, lr=lr)
    assert_equal(ours, theirs, start, scale=length**2)
