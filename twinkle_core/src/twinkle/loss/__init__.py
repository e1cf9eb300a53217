"""Losses. Each returns a sum and a count; names are in the registry `losses`."""

from twinkle.loss.base import FunctionLoss, Loss, as_loss
from twinkle.loss.cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss
from twinkle.loss.mse import MSELoss

__all__ = ['ChunkedCrossEntropyLoss', 'CrossEntropyLoss', 'FunctionLoss', 'Loss', 'MSELoss', 'as_loss']
