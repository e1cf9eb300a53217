"""`Dataset`: rows in a table, prepared ahead of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.pipeline import Encode, Keep, Transform, build_filter, build_preprocessor, build_template
from twinkle.dataset.reading import read_rows
from twinkle.dataset.table import iterate, make_table, map_table, unpack_row
from twinkle.errors import ConfigError, DataError, StateError
from twinkle.logging import progress
from twinkle.remote import remote_class, remote_function

if TYPE_CHECKING:
    import datasets

    from twinkle.template import Template

__all__ = ['Dataset']


@remote_class(execute='first')
class Dataset:
    """Rows from one or several sources, preprocessed and encoded ahead of training.

    `map` and `filter` act on the source that they name (by default the one added last) until sources are mixed or encoded; several
    sources that were not mixed are joined one after the other. Rows are kept as JSON: what they hold comes back as it was, but tuples
    as lists, and numbers of NumPy as plain ones.

    Args:
        dataset_meta: the first source. More come with `add_dataset`.

    Raises:
        DataError: an empty source, unreadable data, a row that is no dictionary.
        SourceError: no such file, folder or address.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None) -> None:
        self.template: Template | None = None
        self._tables: list[datasets.Dataset] = []
        self._names: list[str] = []
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)

    # -- sources ---------------------------------------------------------------------------------------------------------------

    @remote_function(execute='first')
    def add_dataset(self, dataset_meta: DatasetMeta) -> None:
        """Read one more source."""
        if not isinstance(dataset_meta, DatasetMeta):
            raise ConfigError(
                f'A data set is added by a DatasetMeta, not by {type(dataset_meta).__name__}: DatasetMeta(path_or_rows).'
            )
        rows = progress(read_rows(dataset_meta), desc=f'Reading {dataset_meta.name}', unit='row')
        table = make_table(rows)
        if not len(table):
            raise DataError(f'{dataset_meta.name}: the data set is empty.')
        self._tables.append(table)
        self._names.append(dataset_meta.name)

    @remote_function(execute='first')
    def mix_dataset(
        self,
        interleave: bool = True,
        *,
        probabilities: Sequence[float] | None = None,
        seed: int = 0,
        stopping_strategy: Literal['first_exhausted', 'all_exhausted'] = 'first_exhausted',
    ) -> None:
        """Make one of several sources: row by row in turn (or by `probabilities`), or one after the other.

        Raises:
            ConfigError: probabilities that are not one per source, do not sum to 1, or are given where nothing is interleaved;
                another stopping strategy than these two.
        """
        import datasets

        if not self._tables:
            raise StateError('There is nothing to mix: add a data set first.')
        if stopping_strategy not in ('first_exhausted', 'all_exhausted'):
            raise ConfigError(f"stopping_strategy={stopping_strategy!r} must be 'first_exhausted' or 'all_exhausted'.")
        if probabilities is not None:
            if not interleave:
                raise ConfigError('probabilities are for interleave=True; with False each source comes as a whole.')
            if len(probabilities) != len(self._tables) or not all(p >= 0 for p in probabilities):
                raise ConfigError(
                    f'probabilities={list(probabilities)} must be one per source, and there are {len(self._tables)}.'
                )
            if abs(sum(probabilities) - 1) > 1e-6:
                raise ConfigError(f'probabilities={list(probabilities)} sum to {sum(probabilities):g}, not 1.')
        if interleave and len(self._tables) > 1:
            mixed = datasets.interleave_datasets(
                self._tables,
                probabilities=None if probabilities is None else list(probabilities),
                seed=seed,
                stopping_strategy=stopping_strategy,
            )
        else:
            mixed = datasets.concatenate_datasets(self._tables)
        self._tables, self._names = [mixed], ['+'.join(self._names)]

    # -- preparing -------------------------------------------------------------------------------------------------------------

    @remote_function(execute='first')
    def map(self, preprocessor: Any, *, source: int | None = None, num_proc: int | None = None, **options: Any) -> None:
        """Every row through a preprocessor: a name, class, instance or function. Options go to a class or are bound to a function.

        Args:
            source: which source, by the order they were added; by default the last.
            num_proc: processes to work with.
        """
        part = build_preprocessor(preprocessor, options)
        self._apply(Transform(part), 'Preprocessing', source, num_proc)

    @remote_function(execute='first')
    def filter(self, filter: Any, *, source: int | None = None, num_proc: int | None = None, **options: Any) -> None:
        """Keep the rows for which a filter (a name, class, instance or function) is true.

        Raises:
            DataError: none is left.
        """
        self._apply(Keep(build_filter(filter, options)), 'Filtering', source, num_proc)

    @remote_function(execute='first')
    def set_template(self, template: Any = 'default', **options: Any) -> None:
        """Choose the template that `encode` uses: a name, class or instance; options such as `model_id`, `max_length`."""
        self.template = build_template(template, options)

    @remote_function(execute='first')
    def encode(self, *, num_proc: int | None = None) -> None:
        """Turn all rows into features by the template.

        Raises:
            StateError: no template is set.
            DataError: a row that cannot be encoded, with its index; or none is left.
        """
        if self.template is None:
            raise StateError("encode() needs a template: call set_template('default', model_id=...) first.")
        self._join()
        self._apply(Encode(self.template), 'Encoding', None, num_proc)

    def _apply(self, step: Callable[..., Any], desc: str, source: int | None, num_proc: int | None) -> None:
        if not self._tables:
            raise StateError(f'{desc}: there are no rows. Add a data set first.')
        index = len(self._tables) - 1 if source is None else source
        if not 0 <= index < len(self._tables):
            raise ConfigError(f'source={source!r}: there are sources 0 to {len(self._tables) - 1}.')
        table = map_table(self._tables[index], step, desc=desc, num_proc=num_proc)
        if not len(table):
            raise DataError(f'{desc} {self._names[index]}: no row is left of {len(self._tables[index])}.')
        self._tables[index] = table

    def _join(self) -> None:
        if len(self._tables) > 1:
            self.mix_dataset(interleave=False)

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f'row {index} of a data set of {length}')
        index %= length
        for table in self._tables:
            if index < len(table):
                return unpack_row(table[index])
            index -= len(table)
        raise AssertionError('unreachable')

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for table in self._tables:
            yield from iterate(table)
