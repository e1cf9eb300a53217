"""Losses. Each returns a sum and a count; names are in the registry `losses`."""

from twinkle.loss.base import FunctionLoss, Loss, as_loss
from twinkle.loss.contrastive import InfonceLoss
from twinkle.loss.cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss
from twinkle.loss.distillation import GKDLoss
from twinkle.loss.mse import MSELoss
from twinkle.loss.policy import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, PPOLoss, SAPOLoss
from twinkle.loss.preference import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss

__all__ = [
    'BNPOLoss',
    'CISPOLoss',
    'CPOLoss',
    'ChunkedCrossEntropyLoss',
    'CrossEntropyLoss',
    'DPOLoss',
    'DRGRPOLoss',
    'FunctionLoss',
    'GKDLoss',
    'GRPOLoss',
    'GSPOLoss',
    'InfonceLoss',
    'Loss',
    'MSELoss',
    'ORPOLoss',
    'PPOLoss',
    'SAPOLoss',
    'SimPOLoss',
    'as_loss',
]
