"""`DataLoader`: global batches, of which each rank gets its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from twinkle.dataloader.fetching import ByPart, Fetched, Finish, Part, Stream, part_of
from twinkle.dataloader.order import epoch_order, epoch_size, global_batches, resume_point
from twinkle.device_mesh import DeviceMesh, default_device_mesh
from twinkle.errors import ConfigError, DataError
from twinkle.launcher import rank as this_rank
from twinkle.remote import remote_class, remote_function

__all__ = ['DataLoader']


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
        rows_together: rows that follow each other in the data and belong together, such as a chosen and a rejected answer: they are
            shuffled as one, and go to one rank.
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
        rows_together: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.device_mesh = device_mesh if device_mesh is not None else default_device_mesh()
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.rows_together = rows_together
        self._by_index = hasattr(dataset, '__getitem__') and hasattr(dataset, '__len__')
        self._workers: dict[str, Any] = {'num_workers': num_workers, 'prefetch_factor': prefetch_factor}
        self._collate = collate_fn
        self._next_epoch = 0
        self._skip = 0
        self._epoch = 0
        self._consumed_in_epoch = 0
        self._consumed_before = 0
        self._check()

    def _check(self) -> None:
        ranks = self.device_mesh.data_world_size
        size, together = self.batch_size, self.rows_together
        if not _is_integer(together) or together < 1:
            raise ConfigError(f'rows_together={together!r} must be an integer of at least 1.')
        if not _is_integer(size) or size < 1 or size % ranks:
            raise ConfigError(
                f'batch_size={size!r} counts rows over all data ranks and must be a positive multiple of their number, {ranks} '
                f'({self.device_mesh.describe()}).'
            )
        if size % (ranks * together):
            raise ConfigError(
                f'batch_size={size} must be a multiple of rows_together={together} on each of {ranks} data rank(s): {ranks * together}.'
            )
        for name, least in (('num_workers', 0), ('prefetch_factor', 1)):
            value = self._workers[name]
            if not (value is None and name == 'prefetch_factor') and (not _is_integer(value) or value < least):
                raise ConfigError(f'{name}={value!r} must be an integer of at least {least}.')
        if not _is_integer(self.seed):
            raise ConfigError(f'seed={self.seed!r} must be an integer.')
        if self._by_index:
            if not len(self.dataset):
                raise DataError('The data set is empty: there is nothing to load.')
            if len(self.dataset) % together:
                raise DataError(
                    f'rows_together={together} does not divide the {len(self.dataset)} rows: one lacks the others that it belongs to.'
                )
            if self.drop_last and len(self.dataset) < size:
                raise DataError(
                    f'drop_last leaves nothing: the data set has {len(self.dataset)} row(s), a batch {size}.'
                )
        elif not hasattr(self.dataset, '__iter__'):
            raise ConfigError(
                f'dataset is {type(self.dataset).__name__}; pass rows by index, or something that can be iterated.'
            )
        elif self.shuffle:
            raise ConfigError('shuffle=True needs a data set with a length; iterable data comes in its own order.')
        elif self._workers['num_workers'] > 1:
            raise ConfigError('num_workers may be 0 or 1 for iterable data: each worker would read the whole stream.')

    def __len__(self) -> int:
        """Global batches of a whole epoch."""
        if not self._by_index:
            raise TypeError('Iterable data has no length.')
        return -(-self._epoch_size() // self.batch_size)

    @remote_function(dispatch='all')
    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next `iter()` is. A resume point within that epoch stays, and so does one of a stream."""
        if not _is_integer(epoch) or epoch < 0:
            raise ConfigError(f'epoch={epoch!r} must be an integer of at least 0.')
        if epoch != self._next_epoch and (self._by_index or not self._skip):
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

        It goes by rows, so another batch size than before is fine; with `drop_last` only within the first epoch, since the batch size
        decides how many rows an epoch consumes. Streams are read from the start, and again where an epoch was over.

        Raises:
            ConfigError: not a number of rows.
        """
        if not _is_integer(consumed_train_samples) or consumed_train_samples < 0:
            raise ConfigError(f'consumed_train_samples={consumed_train_samples!r} must be an integer of at least 0.')
        if self._by_index:
            self._next_epoch, self._skip = resume_point(
                consumed_train_samples, len(self.dataset), self.batch_size, drop_last=self.drop_last
            )
            self._consumed_before = self._next_epoch * self._epoch_size()
        else:
            self._next_epoch, self._skip, self._consumed_before = 0, consumed_train_samples, 0
        self._epoch, self._consumed_in_epoch = self._next_epoch, self._skip

    def __iter__(self) -> Iterator[Any]:
        skip, epoch = self._skip, self._next_epoch
        if self._by_index:
            self._consumed_before = epoch * self._epoch_size()
        elif not skip:
            self._consumed_before += self._consumed_in_epoch
        self._epoch, self._consumed_in_epoch = epoch, skip
        self._next_epoch, self._skip = epoch + 1, 0
        epochs = 0
        for fetched in self._fetched(epoch, skip):
            if fetched.epochs != epochs:
                epochs = fetched.epochs
                self._epoch, self._next_epoch = epoch + epochs, epoch + epochs + 1
                self._consumed_before, self._consumed_in_epoch = fetched.passed, skip - fetched.passed
            self._consumed_in_epoch += fetched.size
            yield fetched.rows

    def _epoch_size(self) -> int:
        return epoch_size(len(self.dataset), self.batch_size, drop_last=self.drop_last)

    def _fetched(self, epoch: int, skip: int) -> Iterator[Fetched]:
        import torch

        # Workers seed themselves from this: the same rows are read with the same random numbers, in every run.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        # Asked here: a worker that is started, not forked, is in no process group.
        mesh, rank = self.device_mesh, this_rank()
        data: ByPart | Stream
        if self._by_index:
            order = epoch_order(
                len(self.dataset), shuffle=self.shuffle, seed=self.seed, epoch=epoch, together=self.rows_together
            )
            batches = global_batches(order, self.batch_size, drop_last=self.drop_last, skip=skip)
            together = self.rows_together
            data = ByPart(
                self.dataset,
                [
                    Part(len(batch), batch[part_of(len(batch), together, mesh, rank)], batch[:together])
                    for batch in batches
                ],
            )
        else:
            data = Stream(
                self.dataset,
                self.batch_size,
                drop_last=self.drop_last,
                skip=skip,
                mesh=mesh,
                rank=rank,
                together=self.rows_together,
            )
        workers = self._workers if self._workers['num_workers'] else {}
        finish: Any = Finish(self._collate, mesh.data_world_size, self.rows_together)
        yield from TorchDataLoader(data, batch_size=None, generator=generator, collate_fn=finish, **workers)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
