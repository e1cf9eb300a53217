"""The default optimizer and schedules against PyTorch and Transformers."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from torch import nn

from twinkle.errors import ConfigError
from twinkle.lr_scheduler import ConstantScheduler, CosineWarmupScheduler, LinearWarmupScheduler
from twinkle.optimizer import DefaultOptimizer


def sgd(lr=2.0):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def walk(scheduler, steps):
    """The learning rate that each optimizer step is taken with."""
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]['lr'])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(('warmup', 'total'), [(0, 10), (2, 10), (5, 7), (3, 3)])
def test_cosine_and_linear_equal_transformers(warmup, total):
    """Every step, beyond the end of the schedule too."""
    pairs = [
        (
            CosineWarmupScheduler(sgd(), total, warmup),
            transformers.get_cosine_schedule_with_warmup(sgd(), warmup, total),
        ),
        (
            LinearWarmupScheduler(sgd(), total, warmup),
            transformers.get_linear_schedule_with_warmup(sgd(), warmup, total),
        ),
        (ConstantScheduler(sgd(), warmup), transformers.get_constant_schedule_with_warmup(sgd(), warmup)),
    ]
    for mine, theirs in pairs:
        assert walk(mine, total + 3) == pytest.approx(walk(theirs, total + 3), rel=1e-12, abs=1e-15)


def test_cosine_factors_of_the_closed_form():
    """CASES 9: warm-up 2 of 10 gives 0, .5, 1, .96194, .85355; a floor raises the end."""
    assert walk(CosineWarmupScheduler(sgd(1.0), 10, 2), 5) == pytest.approx([0, 0.5, 1, 0.96194, 0.85355], abs=5e-6)
    assert walk(CosineWarmupScheduler(sgd(1.0), 4, 0, min_lr_ratio=0.1), 5)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    'make',
    [
        lambda o: CosineWarmupScheduler(o, 9, 2),
        lambda o: LinearWarmupScheduler(o, 9, 2),
        lambda o: ConstantScheduler(o, 3),
    ],
)
def test_state_is_json_and_goes_on_exactly(make):
    """A schedule resumed from its state, written as JSON, gives the remaining learning rates."""
    whole = walk(make(sgd()), 9)
    first = make(sgd())
    walk(first, 4)
    state = json.loads(json.dumps(first.state_dict()))
    second = make(sgd())
    second.load_state_dict(state)
    second.optimizer.param_groups[0]['lr'] = first.optimizer.param_groups[0]['lr']
    assert walk(second, 5) == whole[4:]


@pytest.mark.parametrize(
    ('make', 'says'),
    [
        (lambda: CosineWarmupScheduler(sgd(), 0), 'num_training_steps=0'),
        (lambda: CosineWarmupScheduler(sgd(), 5, 6), 'num_warmup_steps=6'),
        (lambda: LinearWarmupScheduler(sgd(), 5, -1), 'num_warmup_steps=-1'),
        (lambda: CosineWarmupScheduler(sgd(), 5, min_lr_ratio=2), 'min_lr_ratio=2'),
        (lambda: ConstantScheduler(sgd(), -1), 'num_warmup_steps=-1'),
        (lambda: CosineWarmupScheduler(sgd(), 10, 0.1), r'num_warmup_steps=0\.1 .*share'),
        (lambda: LinearWarmupScheduler(sgd(), '10'), "num_training_steps='10'"),
        (lambda: DefaultOptimizer([]), 'no parameters'),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(make, says):
    """The message names the value."""
    with pytest.raises(ConfigError, match=says):
        make()


def test_default_optimizer_is_adamw_with_decay_on_matrices_only():
    """Steps equal PyTorch's AdamW with two groups made by hand."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    other = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    other.load_state_dict(model.state_dict())
    mine = DefaultOptimizer(model.named_parameters(), lr=0.1, weight_decay=0.5)
    decaying = [other[0].weight]
    rest = [other[0].bias, other[1].weight, other[1].bias]
    theirs = torch.optim.AdamW(
        [{'params': decaying, 'weight_decay': 0.5}, {'params': rest, 'weight_decay': 0.0}], lr=0.1
    )
    for _ in range(5):
        x = torch.randn(3, 4)
        for module, optimizer in ((model, mine), (other, theirs)):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert math.isclose(mine.defaults['lr'], 0.1)
