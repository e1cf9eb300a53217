"""Metrics are numbers over micro-batches, means over what was counted."""

from __future__ import annotations

import math

import pytest
import torch

from twinkle.data_format import LossOutput
from twinkle.metric import (
    Accuracy,
    CompletionRewardMetric,
    DPOMetric,
    EmbeddingMetric,
    GRPOMetric,
    LossMetric,
    TrainInfo,
    TrainMetric,
)

INFO = TrainInfo(step=3, lr=(0.1, 0.2), grad_norm=1.5)


def test_loss_is_a_mean_over_tokens():
    """CASES 1: one token at 4 and three at 1 make 1.75; nothing counted makes 0.0."""
    metric = LossMetric()
    assert metric.compute(metric.sums(), INFO)['loss'] == 0.0
    metric.update({}, {}, LossOutput(torch.tensor(4.0), 1))
    metric.update({}, {}, LossOutput(torch.tensor(3.0), torch.tensor(3)))
    metric.update({}, {}, None)
    assert metric.compute(metric.sums(), INFO) == {'loss': 1.75, 'num_tokens': 4.0}
    metric.reset()
    assert metric.compute(metric.sums(), INFO)['loss'] == 0.0


def test_sums_of_ranks_add_up():
    """CASES 2: rank 0 has the one token, rank 1 the three: their sums make 1.75."""
    ranks = []
    for value, count in ((4.0, 1), (3.0, 3)):
        metric = LossMetric()
        metric.update({}, {}, LossOutput(torch.tensor(value), count))
        ranks.append(metric.sums())
    total = {key: sum(rank[key] for rank in ranks) for key in ranks[0]}
    assert LossMetric().compute(total, INFO)['loss'] == 1.75


def test_accuracy_counts_labels_only():
    """-100 is neither right nor wrong."""
    metric = Accuracy()
    assert metric.compute(metric.sums(), INFO) == {'accuracy': 0.0}
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])
    metric.update({'labels': torch.tensor([[1, 1, -100]])}, {'logits': logits}, None)
    assert metric.compute(metric.sums(), INFO) == {'accuracy': 0.5}


def test_train_metric_gives_numbers_of_the_run():
    """Step, learning rate, norm, perplexity, speed and time; a huge loss is an infinite perplexity, not an error."""
    metric = TrainMetric()
    metric.begin()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    metric.update({'attention_mask': mask}, {}, LossOutput(torch.tensor(2.0), 1))
    numbers = metric.compute(metric.sums(), INFO)
    assert numbers['step'] == 3
    assert numbers['lr'] == 0.1
    assert numbers['grad_norm'] == 1.5
    assert numbers['perplexity'] == pytest.approx(math.exp(2.0))
    assert 0 < numbers['tokens_per_second'] < math.inf
    assert numbers['tokens_per_second'] * numbers['elapsed'] == pytest.approx(5, rel=0.5)
    metric.update({'attention_mask': mask}, {}, LossOutput(torch.tensor(1e5), 1))
    assert metric.compute(metric.sums(), INFO)['perplexity'] == math.inf
    assert 'grad_norm' not in metric.compute(metric.sums(), TrainInfo())


def test_metrics_of_losses_are_means_of_what_the_loss_adds_up():
    """Sums of several micro-batches and ranks make means over pairs, tokens, queries and rows."""
    metric = DPOMetric()
    for chosen, rejected in ((2.0, 1.0), (0.0, 3.0)):
        sums = {'chosen_rewards': chosen, 'rejected_rewards': rejected, 'right': float(chosen > rejected), 'pairs': 1.0}
        metric.update({}, {}, LossOutput(torch.tensor(0.0), 1, sums))
    assert metric.compute(metric.sums(), INFO) == {
        'chosen_rewards': 1.0,
        'rejected_rewards': 2.0,
        'reward_margin': -1.0,
        'reward_accuracy': 0.5,
    }
    policy = GRPOMetric()
    policy.update({}, {}, LossOutput(torch.tensor(0.0), 1, {'clipped': 1.0, 'ratio': 4.0, 'tokens': 4}))
    assert policy.compute(policy.sums(), INFO) == {'kl': 0.0, 'entropy': 0.0, 'clip_fraction': 0.25, 'ratio': 1.0}
    embedding = EmbeddingMetric()
    embedding.update({}, {}, LossOutput(torch.tensor(0.0), 1, {'positive': 1.5, 'hits': 1, 'queries': 2.0}))
    assert embedding.compute(embedding.sums(), INFO) == {'positive_similarity': 0.75, 'retrieval_accuracy': 0.5}
    rewards = CompletionRewardMetric()
    rewards.update({'rewards': [1.0, 3.0], 'labels': torch.tensor([[1, -100], [2, 3]])}, {}, None)
    assert rewards.compute(rewards.sums(), INFO) == {'reward': 2.0, 'reward_std': 1.0, 'completion_length': 1.5}
    for empty in (metric, policy, embedding, rewards):
        empty.reset()
        assert set(empty.compute(empty.sums(), INFO).values()) == {0.0}
