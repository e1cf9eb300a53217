"""The data loader: global batches in an order that all ranks share."""

from twinkle.dataloader.loader import DataLoader

__all__ = ['DataLoader']
