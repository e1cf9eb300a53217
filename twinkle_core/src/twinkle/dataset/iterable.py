"""`IterableDataset`: a stream of rows that is never held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.pipeline import Encode, Keep, Transform, build_filter, build_preprocessor, build_template, fresh
from twinkle.dataset.reading import read_rows
from twinkle.errors import ConfigError, DataError, StateError
from twinkle.remote import remote_class, remote_function

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ['IterableDataset']

_ONCE = ' An iterator can be read only once: for several epochs pass a function that makes it.'


@remote_class(execute='first')
class IterableDataset:
    """Rows of one or several sources, one after the other, each step done as a row comes by. It has no length.

    A source that can be read once only (an iterator) gives one epoch; a file, a list or a function gives as many as are asked for.

    Raises:
        DataError: while rows are read: an empty source (which an iterator is after one epoch), unreadable data, a row that is no
            dictionary, or no row that is left behind the filters.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None) -> None:
        self.template: Template | None = None
        self._metas: list[DatasetMeta] = []
        self._steps: list[Callable[[dict[str, Any], int], list[dict[str, Any]]]] = []
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)

    @remote_function(execute='first')
    def add_dataset(self, dataset_meta: DatasetMeta) -> None:
        """Put one more source behind those there are."""
        if not isinstance(dataset_meta, DatasetMeta):
            raise ConfigError(
                f'A data set is added by a DatasetMeta, not by {type(dataset_meta).__name__}: DatasetMeta(path_or_rows).'
            )
        self._metas.append(dataset_meta)

    @remote_function(execute='first')
    def map(self, preprocessor: Any, **options: Any) -> None:
        """Put a preprocessor (a name, class, instance or function) at the end of the steps."""
        self._steps.append(Transform(build_preprocessor(preprocessor, options)))

    @remote_function(execute='first')
    def filter(self, filter: Any, **options: Any) -> None:
        """Put a filter at the end of the steps."""
        self._steps.append(Keep(build_filter(filter, options)))

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

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._metas:
            raise StateError('There are no rows: add a data set first.')
        index, kept = 0, False
        for meta in self._metas:
            before = index
            for row in read_rows(meta):
                for new in self._through(row, index):
                    kept = True
                    yield new
                index += 1
            if index == before:
                raise DataError(
                    f'{meta.name}: the data set is empty.{_ONCE if isinstance(meta.dataset_id, Iterator) else ""}'
                )
        if not kept:
            raise DataError(f'{"+".join(meta.name for meta in self._metas)}: no row is left of {index}.')

    def _through(self, row: dict[str, Any], index: int) -> list[dict[str, Any]]:
        current = [fresh(row)]
        for step in self._steps:
            current = [new for old in current for new in step(old, index)]
        return current
