"""`LazyDataset`: rows are preprocessed and encoded when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.pipeline import Encode, Keep, Transform, build_filter, build_preprocessor, build_template, fresh
from twinkle.dataset.reading import read_rows
from twinkle.errors import ConfigError, DataError, StateError
from twinkle.logging import progress
from twinkle.remote import remote_class, remote_function

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ['LazyDataset']

_Numbered = tuple[int, dict[str, Any]]


@remote_class(execute='first')
class LazyDataset:
    """Raw rows in memory, objects such as images included; each access does the work of one row.

    `filter` is carried out at once, since it decides how many rows there are. `encode` must give exactly one feature per row:
    truncation by `delete` or `split` changes the number of rows and is refused when it happens.

    Raises:
        DataError: an empty source, unreadable data, a row that is no dictionary.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None) -> None:
        self.template: Template | None = None
        self._rows: list[_Numbered] = []
        self._read = 0
        self._filters: list[tuple[int, Keep]] = []
        self._steps: list[Callable[[dict[str, Any], int], list[dict[str, Any]]]] = []
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)

    @remote_function(execute='first')
    def add_dataset(self, dataset_meta: DatasetMeta) -> None:
        """Read one more source; its rows come behind those there are, and go through the same steps and filters."""
        if not isinstance(dataset_meta, DatasetMeta):
            raise ConfigError(
                f'A data set is added by a DatasetMeta, not by {type(dataset_meta).__name__}: DatasetMeta(path_or_rows).'
            )
        rows = list(progress(read_rows(dataset_meta), desc=f'Reading {dataset_meta.name}', unit='row'))
        if not rows:
            raise DataError(f'{dataset_meta.name}: the data set is empty.')
        numbered = list(enumerate(rows, self._read))
        self._read += len(rows)
        for done, keep in self._filters:
            numbered = self._kept(numbered, keep, done)
        self._rows += numbered

    @remote_function(execute='first')
    def map(self, preprocessor: Any, **options: Any) -> None:
        """Put a preprocessor (a name, class, instance or function) at the end of the steps."""
        self._steps.append(Transform(build_preprocessor(preprocessor, options)))

    @remote_function(execute='first')
    def filter(self, filter: Any, **options: Any) -> None:
        """Keep the rows for which a filter is true after the steps so far. Done at once.

        Raises:
            DataError: none is left.
        """
        if not self._rows:
            raise StateError('Filtering: there are no rows. Add a data set first.')
        keep = Keep(build_filter(filter, options))
        self._rows = self._kept(self._rows, keep, len(self._steps))
        self._filters.append((len(self._steps), keep))

    @remote_function(execute='first')
    def set_template(self, template: Any = 'default', **options: Any) -> None:
        """Choose the template that `encode` uses."""
        self.template = build_template(template, options)

    @remote_function(execute='first')
    def encode(self) -> None:
        """Put encoding at the end of the steps.

        Raises:
            StateError: no template is set.
        """
        if self.template is None:
            raise StateError("encode() needs a template: call set_template('default', model_id=...) first.")
        self._steps.append(Encode(self.template))

    def _kept(self, rows: list[_Numbered], keep: Keep, done: int) -> list[_Numbered]:
        """The rows that a filter keeps behind the first `done` steps."""
        shown = progress(rows, desc='Filtering', unit='row')
        kept = [(index, row) for index, row in shown if keep(self._run(row, index, done), index)]
        if not kept:
            raise DataError(f'Filtering: no row is left of {len(rows)}.')
        return kept

    def _run(self, row: dict[str, Any], index: int, done: int | None = None) -> dict[str, Any]:
        current = fresh(row)
        for step in self._steps[:done]:
            results = step(current, index)
            if len(results) != 1:
                raise DataError(
                    f'Row {index} became {len(results)} rows when it was encoded. A LazyDataset gives one feature per row: use '
                    "truncation 'raise', 'left' or 'right', or a Dataset, which encodes ahead."
                )
            current = results[0]
        return current

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, row = self._rows[index]
        return self._run(row, number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))
