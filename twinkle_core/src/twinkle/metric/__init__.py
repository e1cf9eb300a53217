"""Metrics: numbers over micro-batches and ranks; names are in the registry `metrics`."""

from twinkle.metric.base import Metric, TrainInfo
from twinkle.metric.metrics import Accuracy, LossMetric, TrainMetric

__all__ = ['Accuracy', 'LossMetric', 'Metric', 'TrainInfo', 'TrainMetric']
