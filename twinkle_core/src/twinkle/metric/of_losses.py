"""Metrics that report what a loss adds up beside itself (`LossOutput.metrics`), and rewards of completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from twinkle.data_format import IGNORE_INDEX
from twinkle.metric.base import Metric, TrainInfo

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle.data_format import LossOutput, ModelOutput

__all__ = ['CompletionRewardMetric', 'DPOMetric', 'EmbeddingMetric', 'GRPOMetric']


class _LossSums(Metric):
    """Adds up the sums of a loss, by name. A loss that has none of them leaves the metric empty."""

    needs_labels = False
    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}

    def update(self, inputs: Mapping[str, Any], outputs: ModelOutput, loss: LossOutput | None) -> None:
        for name in self.names:
            if loss is not None and name in loss.metrics:
                self._sums[name] = self._sums.get(name, 0.0) + loss.metrics[name]

    def sums(self) -> dict[str, float]:
        # Every rank gives every name, in one order, also a rank that has seen nothing.
        return {name: float(self._sums.get(name, 0.0)) for name in self.names}

    def reset(self) -> None:
        self._sums = {}


class DPOMetric(_LossSums):
    """`chosen_rewards`, `rejected_rewards`, `reward_margin` (means over pairs) and `reward_accuracy` of a preference loss."""

    names = ('chosen_rewards', 'rejected_rewards', 'right', 'pairs')

    def compute(self, sums: Mapping[str, float], info: TrainInfo) -> dict[str, float]:
        pairs = sums['pairs'] or 1.0
        chosen, rejected = sums['chosen_rewards'] / pairs, sums['rejected_rewards'] / pairs
        return {
            'chosen_rewards': chosen,
            'rejected_rewards': rejected,
            'reward_margin': chosen - rejected,
            'reward_accuracy': sums['right'] / pairs,
        }


class GRPOMetric(_LossSums):
    """`kl`, `entropy` (where the loss has them), `clip_fraction` and `ratio` of a policy loss, means over tokens."""

    names = ('kl', 'entropy', 'clipped', 'ratio', 'tokens')

    def compute(self, sums: Mapping[str, float], info: TrainInfo) -> dict[str, float]:
        tokens = sums['tokens'] or 1.0
        means = {name: sums[name] / tokens for name in ('kl', 'entropy', 'clipped', 'ratio')}
        return {
            'kl': means['kl'],
            'entropy': means['entropy'],
            'clip_fraction': means['clipped'],
            'ratio': means['ratio'],
        }


class EmbeddingMetric(_LossSums):
    """`positive_similarity` and `retrieval_accuracy` (the own document is the nearest) of a contrastive loss, means over queries."""

    names = ('positive', 'hits', 'queries')

    def compute(self, sums: Mapping[str, float], info: TrainInfo) -> dict[str, float]:
        queries = sums['queries'] or 1.0
        return {'positive_similarity': sums['positive'] / queries, 'retrieval_accuracy': sums['hits'] / queries}


class CompletionRewardMetric(Metric):
    """`reward`, `reward_std` (over n) and `completion_length` (labelled tokens) of rows that carry `rewards`, one per row."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}

    def update(self, inputs: Mapping[str, Any], outputs: ModelOutput, loss: LossOutput | None) -> None:
        if inputs.get('rewards') is None:
            return
        rewards = torch.as_tensor(inputs['rewards'], dtype=torch.float64).flatten()
        new = {
            'sum': rewards.sum(),
            'squares': rewards.square().sum(),
            'count': float(len(rewards)),
            'tokens': (inputs['labels'] != IGNORE_INDEX).sum(),
        }
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in new.items()}

    def sums(self) -> dict[str, float]:
        return {name: float(self._sums.get(name, 0.0)) for name in ('sum', 'squares', 'count', 'tokens')}

    def compute(self, sums: Mapping[str, float], info: TrainInfo) -> dict[str, float]:
        count = sums['count'] or 1.0
        mean = sums['sum'] / count
        variance = max(sums['squares'] / count - mean**2, 0.0)
        return {'reward': mean, 'reward_std': variance**0.5, 'completion_length': sums['tokens'] / count}

    def reset(self) -> None:
        self._sums = {}
