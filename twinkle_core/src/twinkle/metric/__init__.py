"""Metrics: numbers over micro-batches and ranks; names are in the registry `metrics`."""

from twinkle.metric.base import Metric, TrainInfo
from twinkle.metric.metrics import Accuracy, LossMetric, TrainMetric
from twinkle.metric.of_losses import CompletionRewardMetric, DPOMetric, EmbeddingMetric, GRPOMetric

__all__ = [
    'Accuracy',
    'CompletionRewardMetric',
    'DPOMetric',
    'EmbeddingMetric',
    'GRPOMetric',
    'LossMetric',
    'Metric',
    'TrainInfo',
    'TrainMetric',
]
