"""What happens in a loader's workers: a rank's rows of each global batch. Everything here can be pickled, for started workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchIterableDataset

from twinkle.data_format import IGNORE_INDEX
from twinkle.dataloader.order import epoch_size
from twinkle.device_mesh import DeviceMesh
from twinkle.errors import DataError

__all__ = ['ByPart', 'Fetched', 'Finish', 'Part', 'Stream', 'part_of']


@dataclass(frozen=True)
class Part:
    """One rank's rows of a global batch, by index.

    Attributes:
        size: rows of the whole batch.
        own: the indices of this rank's rows; may be none.
        first: the indices of the batch's first rows that belong together.
    """

    size: int
    own: Sequence[int]
    first: Sequence[int]


@dataclass(frozen=True)
class Fetched:
    """A rank's rows of one global batch, before and after they are collated.

    Attributes:
        size: rows of the whole batch.
        rows: this rank's rows or, where it has none, the first ones of the batch.
        own: whether they are this rank's.
        epochs, passed: whole epochs, and rows of them, that were passed over to get to a resume point.
    """

    size: int
    rows: Any
    own: bool
    epochs: int = 0
    passed: int = 0


def part_of(size: int, together: int, mesh: DeviceMesh, rank: int) -> slice:
    """A rank's rows of a batch, of which so many stay together."""
    groups = mesh.get_slice(size // together, rank)
    return slice(groups.start * together, groups.stop * together)


class ByPart(TorchDataset[Fetched]):
    """Fetches each of a rank's rows once."""

    def __init__(self, dataset: Any, parts: list[Part]) -> None:
        self.dataset, self.parts = dataset, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Fetched:
        part = self.parts[index]
        indices = part.own or part.first
        return Fetched(part.size, [self.dataset[i] for i in indices], bool(part.own))


class Stream(TorchIterableDataset[Fetched]):
    """Global batches of a stream, of which a rank takes its rows.

    Args:
        skip: rows that are over. Where a reading of the stream has fewer, the next one goes on, as epochs do.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        drop_last: bool,
        skip: int,
        mesh: DeviceMesh,
        rank: int,
        together: int = 1,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last, self.skip = dataset, batch_size, drop_last, skip
        self.mesh, self.rank, self.together = mesh, rank, together

    def __iter__(self) -> Iterator[Fetched]:
        epochs = passed = 0
        while True:
            rows = iter(self.dataset)
            skip = self.skip - passed
            skipped = sum(1 for _ in islice(rows, skip))
            seen, given = skipped, False
            while batch := list(islice(rows, self.batch_size)):
                seen += len(batch)
                if len(batch) == self.batch_size or not self.drop_last:
                    given = True
                    yield self._part(batch, epochs, passed)
            if given:
                return
            size = epoch_size(seen, self.batch_size, drop_last=self.drop_last)
            if not size:
                raise DataError(self._why_nothing(seen, epochs))
            epochs, passed = epochs + 1, min(passed + size, self.skip)

    def _part(self, batch: list[Any], epochs: int, passed: int) -> Fetched:
        if len(batch) % self.together:
            raise DataError(
                f'The stream ends in a batch of {len(batch)} rows, and rows_together={self.together} does not divide them: a row lacks '
                'the others that it belongs to.'
            )
        own = batch[part_of(len(batch), self.together, self.mesh, self.rank)]
        return Fetched(len(batch), own or batch[: self.together], bool(own), epochs, passed)

    def _why_nothing(self, seen: int, epochs: int) -> str:
        if seen:
            return f'drop_last leaves nothing: the stream has {seen} row(s), a batch {self.batch_size}.'
        where = f' behind {self.skip} consumed rows' if epochs else ''
        return (
            f'The stream has no rows{where}. An iterator can be read only once: for several epochs pass rows, or a function that makes '
            'them anew.'
        )


class Finish:
    """Collates what was fetched; a rank without rows of its own gets one in which nothing is trained."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None, ranks: int, together: int = 1) -> None:
        self.collate, self.ranks, self.together = collate, ranks, together

    def __call__(self, fetched: Fetched) -> Fetched:
        rows = fetched.rows
        if fetched.size < self.ranks * self.together:
            # Told on every rank, so that none waits for one that stopped.
            _check_labels(rows[0], fetched.size, self.ranks)
        if not fetched.own:
            rows = [{**row, 'labels': [IGNORE_INDEX] * len(row['labels'])} for row in rows]
        collated = rows if self.collate is None else self.collate(rows)
        return Fetched(fetched.size, collated, fetched.own, fetched.epochs, fetched.passed)


def _check_labels(row: Any, size: int, ranks: int) -> None:
    if not isinstance(row, Mapping) or 'labels' not in row:
        raise DataError(
            f'The last batch has {size} row(s) for {ranks} data ranks, and its rows are not encoded, so that the others can be given no '
            'untrained one: encode the data set first, or use drop_last=True.'
        )
