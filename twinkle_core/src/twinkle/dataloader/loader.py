"""`DataLoader`: global batches, of which each rank gets its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchIterableDataset

from twinkle.data_format import IGNORE_INDEX
from twinkle.dataloader.order import epoch_order, epoch_size, global_batches
from twinkle.device_mesh import DeviceMesh
from twinkle.errors import ConfigError, DataError
from twinkle.remote import remote_class, remote_function

__all__ = ['DataLoader']

Row = Mapping[str, Any]


@remote_class(execute='first')
class DataLoader:
    """Batches of a data set, in an order that seed and epoch decide and that all ranks share.

    `batch_size` counts rows over all data-parallel ranks; each rank is given its part. Each `iter()` is the next epoch, shuffled
    anew. A last batch with fewer rows than data ranks gives the ranks without one a row in which nothing is trained, so that all
    ranks take the same number of steps and no number changes.

    Args:
        dataset: rows by index, or iterable. Rows may be encoded or not: they are passed on as they are.
        batch_size: rows per step over all data ranks; a multiple of their number.
        device_mesh: which ranks read which rows; by default the runtime's.
        shuffle, seed: another order in every epoch. Not for iterable data, which comes in its own order.
        num_workers: processes that read ahead; at most 1 for iterable data.
        drop_last: leave out a last batch that is not full.
        prefetch_factor: batches that each worker reads ahead.
        collate_fn: what makes a batch of a list of rows; by default the list itself, which a model takes as `inputs`.

    Raises:
        ConfigError: sizes that do not fit the mesh or each other.
        DataError: an empty data set.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        device_mesh: DeviceMesh | None = None,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        drop_last: bool = False,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        from twinkle.runtime import default_device_mesh

        self.dataset = dataset
        self.batch_size = batch_size
        self.device_mesh = device_mesh if device_mesh is not None else default_device_mesh()
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._by_index = hasattr(dataset, '__getitem__') and hasattr(dataset, '__len__')
        self._workers: dict[str, Any] = {
            'num_workers': num_workers,
            'prefetch_factor': prefetch_factor if num_workers else None,
        }
        self._collate = collate_fn or _as_it_is
        self._next_epoch = 0
        self._skip = 0
        self._epoch = 0
        self._consumed_in_epoch = 0
        self._consumed_before = 0
        self._check()

    def _check(self) -> None:
        ranks = self.device_mesh.data_world_size
        size = self.batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % ranks:
            raise ConfigError(
                f'batch_size={size!r} counts rows over all data ranks and must be a positive multiple of their number, {ranks} '
                f'({self.device_mesh.describe()}).'
            )
        if self._workers['num_workers'] < 0:
            raise ConfigError(f'num_workers={self._workers["num_workers"]!r} must be at least 0.')
        if self._by_index:
            if not len(self.dataset):
                raise DataError('The data set is empty: there is nothing to load.')
            if self.drop_last and len(self.dataset) < size:
                raise DataError(
                    f'drop_last leaves nothing: the data set has {len(self.dataset)} row(s), a batch {size}.'
                )
        elif self.shuffle:
            raise ConfigError('shuffle=True needs a data set with a length; iterable data comes in its own order.')
        elif self._workers['num_workers'] > 1:
            raise ConfigError('num_workers may be 0 or 1 for iterable data: each worker would read the whole stream.')

    def __len__(self) -> int:
        """Global batches of a whole epoch."""
        if not self._by_index:
            raise TypeError('Iterable data has no length.')
        return -(-epoch_size(len(self.dataset), self.batch_size, drop_last=self.drop_last) // self.batch_size)

    @remote_function(dispatch='all')
    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next `iter()` is."""
        if epoch < 0:
            raise ConfigError(f'epoch={epoch!r} must be at least 0.')
        self._next_epoch, self._skip = epoch, 0

    @remote_function(dispatch='all', collect='first')
    def get_state(self) -> dict[str, int]:
        """Where the loader is: `epoch`, `consumed_in_epoch` and `consumed_train_samples` (over all epochs and ranks), `seed`."""
        return {
            'epoch': self._epoch,
            'consumed_in_epoch': self._consumed_in_epoch,
            'consumed_train_samples': self._consumed_before + self._consumed_in_epoch,
            'seed': self.seed,
        }

    @remote_function(dispatch='all')
    def resume_from_checkpoint(self, consumed_train_samples: int) -> None:
        """Go on behind so many rows: the next `iter()` gives the rest of that epoch, later ones are whole.

        It goes by rows, so another batch size than before is fine.
        """
        if (
            isinstance(consumed_train_samples, bool)
            or not isinstance(consumed_train_samples, int)
            or consumed_train_samples < 0
        ):
            raise ConfigError(f'consumed_train_samples={consumed_train_samples!r} must be an integer of at least 0.')
        if self._by_index:
            size = epoch_size(len(self.dataset), self.batch_size, drop_last=self.drop_last)
            self._next_epoch, self._skip = divmod(consumed_train_samples, size)
        else:
            self._next_epoch, self._skip = 0, consumed_train_samples
        self._consumed_before = consumed_train_samples - self._skip
        self._epoch, self._consumed_in_epoch = self._next_epoch, self._skip

    def __iter__(self) -> Iterator[Any]:
        skip, epoch = self._skip, self._next_epoch
        if self._by_index:
            self._consumed_before = epoch * epoch_size(len(self.dataset), self.batch_size, drop_last=self.drop_last)
        elif epoch != self._epoch:
            self._consumed_before += self._consumed_in_epoch
        self._epoch, self._consumed_in_epoch = epoch, skip
        self._next_epoch, self._skip = epoch + 1, 0
        for size, batch in self._batches(epoch, skip):
            self._consumed_in_epoch += size
            yield batch

    def _batches(self, epoch: int, skip: int) -> Iterator[tuple[int, Any]]:
        import torch

        # Workers seed themselves from this: the same rows are read with the same random numbers, in every run.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        options: dict[str, Any] = {**self._workers, 'generator': generator, 'collate_fn': self._finish}
        if not self._by_index:
            stream = _Stream(self.dataset, self.batch_size, self.drop_last, skip)
            yield from TorchDataLoader(stream, batch_size=None, **options)
            return
        order = epoch_order(len(self.dataset), shuffle=self.shuffle, seed=self.seed, epoch=epoch)
        batches = list(global_batches(order, self.batch_size, drop_last=self.drop_last, skip=skip))
        mine = [_Part(batch, batch[self.device_mesh.get_slice(len(batch))]) for batch in batches]
        yield from TorchDataLoader(_ByPart(self.dataset, mine), batch_size=None, **options)

    def _finish(self, fetched: tuple[int, list[Any], Any]) -> tuple[int, Any]:
        """The rows of this rank out of what was fetched, collated."""
        size, rows, stand_in = fetched
        if rows is None:
            rows = stand_in[self.device_mesh.get_slice(len(stand_in))]
            stand_in = stand_in[0]
        return size, self._collate(rows or [_untrained(stand_in)])


class _Part:
    """One rank's rows of a global batch, by index."""

    def __init__(self, batch: Sequence[int], own: Sequence[int]) -> None:
        self.size, self.own, self.first = len(batch), own, batch[0]


class _ByPart(TorchDataset[Any]):
    """Fetches each of a rank's rows once."""

    def __init__(self, dataset: Any, parts: list[_Part]) -> None:
        self.dataset, self.parts = dataset, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> tuple[int, list[Any], Any]:
        part = self.parts[index]
        rows = [self.dataset[i] for i in part.own]
        return part.size, rows, None if rows else self.dataset[part.first]


class _Stream(TorchIterableDataset[Any]):
    """Global batches of a stream; each rank takes its rows of them."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, skip: int) -> None:
        self.dataset, self.batch_size, self.drop_last, self.skip = dataset, batch_size, drop_last, skip

    def __iter__(self) -> Iterator[tuple[int, Any, list[Any]]]:
        rows = islice(iter(self.dataset), self.skip, None)
        while batch := list(islice(rows, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield len(batch), None, batch


def _as_it_is(rows: list[Any]) -> list[Any]:
    return rows


def _untrained(row: Row) -> dict[str, Any]:
    """A copy of a row in which nothing is trained.

    Raises:
        DataError: the row is not encoded, so that it has no labels to blank.
    """
    if 'labels' not in row:
        raise DataError(
            'The last batch has fewer rows than there are data ranks, and its rows are not encoded: encode the data set first, or use '
            'drop_last=True.'
        )
    return {**row, 'labels': [IGNORE_INDEX] * len(row['labels'])}
