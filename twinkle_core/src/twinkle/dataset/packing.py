"""`PackingDataset` and `IterablePackingDataset`: several samples in each row, instead of pads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinkle.dataset.base import Dataset
from twinkle.dataset.iterable import IterableDataset
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.packs import Packing, token_count
from twinkle.dataset.table import unpack_row
from twinkle.errors import StateError
from twinkle.logging import progress
from twinkle.processor.joining import join_features
from twinkle.remote import remote_class, remote_function

__all__ = ['IterablePackingDataset', 'PackingDataset']

INTERVAL = 1000
"""Samples looked at together: about 99% full rows, in the order of the data but for some hundred rows."""


@remote_class(execute='first')
class PackingDataset(Dataset):
    """A `Dataset` whose encoded rows are packs: as many samples in each as go into `max_length` tokens.

    Before `encode()` it is a Dataset like any other. After it, length, index and iteration give packs, made by `pack_dataset()` or
    when first asked for. `position_ids` start again at 0 with each sample, whose last label is -100. Which samples go together
    depends on the data only. For losses over pairs of rows (DPO and its like), which stand in the data in turn, use a Dataset.

    Args:
        dataset_meta: the first source.
        packing_length: tokens of a full row; by default the template's `max_length`.
        packing_interval: samples looked at together: more of them fill rows better and are moved further.

    Raises:
        ConfigError: a length or interval that is no positive integer.
        MissingPackageError: the extra `packing` is not installed.
    """

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        *,
        packing_length: int | None = None,
        packing_interval: int = INTERVAL,
    ) -> None:
        self._packing = Packing(packing_length, packing_interval)
        self._encoded = False
        self._packs: list[list[int]] | None = None
        super().__init__(dataset_meta)

    @remote_function(execute='first')
    def add_dataset(self, dataset_meta: DatasetMeta) -> None:
        """Read one more source. What was packed is unpacked: encode again."""
        super().add_dataset(dataset_meta)
        self._encoded, self._packs = False, None

    @remote_function(execute='first')
    def encode(self, *, num_proc: int | None = None) -> None:
        """Turn all rows into features by the template. From now on rows are packs.

        Raises:
            StateError: no template is set, or nothing says how long a row is.
            DataError: a row that cannot be encoded, with its index; or none is left.
        """
        if self.template is not None:
            self._packing.length_for(self.template)  # told before the work, not after it
        super().encode(num_proc=num_proc)
        self._encoded = True

    @remote_function(execute='first')
    def pack_dataset(self) -> None:
        """Pack the encoded rows now. Rows that came with `input_ids` need no `encode()`.

        Raises:
            StateError: rows are not encoded, or nothing says how long a row is.
            DataError: a row that is longer than that, with its index.
        """
        if not self._tables:
            raise StateError('There is nothing to pack: add a data set first.')
        length = self._packing.length_for(self.template)
        self._join()
        rows = progress(super().__iter__(), desc='Packing', total=super().__len__(), unit='row')
        sizes = ((token_count(row, index, length), index) for index, row in enumerate(rows))
        self._packs = list(self._packing.together(sizes, length))
        self._encoded = True

    def _apply(self, *args: Any) -> None:
        super()._apply(*args)
        self._packs = None

    def _current(self) -> list[list[int]] | None:
        if self._encoded and self._packs is None:
            self.pack_dataset()
        return self._packs

    def __len__(self) -> int:
        packs = self._current()
        return super().__len__() if packs is None else len(packs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        packs = self._current()
        if packs is None:
            return super().__getitem__(index)
        if not -len(packs) <= index < len(packs):
            raise IndexError(f'row {index} of a data set of {len(packs)}')
        (table,) = self._tables
        return dict(join_features([unpack_row(table[i]) for i in packs[index]]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._current() is None:
            return super().__iter__()
        return (self[index] for index in range(len(self)))


@remote_class(execute='first')
class IterablePackingDataset(IterableDataset):
    """An `IterableDataset` whose rows, once `encode()` is among the steps, are packs of samples, as those of a `PackingDataset`.

    About `packing_interval` samples are held at a time. The packs are those that a PackingDataset makes of the same data.

    Args:
        dataset_meta: the first source.
        packing_length: tokens of a full row; by default the template's `max_length`.
        packing_interval: samples looked at together: more of them fill rows better and are moved further.

    Raises:
        ConfigError: a length or interval that is no positive integer.
        MissingPackageError: the extra `packing` is not installed.
    """

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        *,
        packing_length: int | None = None,
        packing_interval: int = INTERVAL,
    ) -> None:
        self._packing = Packing(packing_length, packing_interval)
        self._packed = False
        super().__init__(dataset_meta)

    @remote_function(execute='first')
    def encode(self) -> None:
        """Put encoding at the end of the steps. Rows are packs from now on; steps that follow still see single samples.

        Raises:
            StateError: no template is set, or nothing says how long a row is.
        """
        super().encode()
        self.pack_dataset()

    @remote_function(execute='first')
    def pack_dataset(self) -> None:
        """Let rows be packs, as `encode()` does. It is there for rows that come with `input_ids`.

        Raises:
            StateError: nothing says how long a row is; or, while rows are read, one that is not encoded.
        """
        self._packing.length_for(self.template)
        self._packed = True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = super().__iter__()
        if not self._packed:
            return rows
        length = self._packing.length_for(self.template)
        sizes = ((token_count(row, index, length), row) for index, row in enumerate(rows))
        return (dict(join_features(samples)) for samples in self._packing.together(sizes, length))
