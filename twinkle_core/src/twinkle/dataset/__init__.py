"""Data sets: rows from files, folders, hubs and objects, preprocessed and encoded ahead, at access, or as a stream."""

from twinkle.dataset.base import Dataset
from twinkle.dataset.iterable import IterableDataset
from twinkle.dataset.lazy import LazyDataset
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.packing import IterablePackingDataset, PackingDataset

__all__ = ['Dataset', 'DatasetMeta', 'IterableDataset', 'IterablePackingDataset', 'LazyDataset', 'PackingDataset']
