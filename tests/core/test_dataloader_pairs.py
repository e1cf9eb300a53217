"""Rows that belong together stay so in the loader: pairs of a preference loss, a query and its documents."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_dataloader import flat, ids, make, mesh, rows
from twinkle.dataloader import DataLoader
from twinkle.errors import ConfigError, DataError


@given(pairs=st.integers(1, 20), per_rank=st.integers(1, 3), ranks=st.integers(1, 3), shuffle=st.booleans())
@settings(max_examples=60, deadline=None)
def test_pairs_stay_together(pairs, per_rank, ranks, shuffle):
    """Shuffled and divided among ranks, a pair keeps its order and goes to one rank; each comes once, and ranks take as many steps."""
    size = 2 * per_rank * ranks
    loaders = [make(2 * pairs, size, ranks, rows_together=2, shuffle=shuffle) for _ in range(ranks)]
    taken = [of_rank(loader, rank) for rank, loader in enumerate(loaders)]
    assert len({len(batches) for batches in taken}) == 1
    assert all(len(batch) % 2 == 0 and batch for batches in taken for batch in batches)
    trained = [i for batches in taken for i in flat(batches)]
    assert sorted(trained) == list(range(2 * pairs))
    for batches in taken:
        for batch in ids(batches):
            assert all(
                second == first + 1 and first % 2 == 0 for first, second in zip(batch[::2], batch[1::2], strict=True)
            )


def of_rank(loader, rank):
    """The batches that a rank is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('twinkle.dataloader.loader.this_rank', lambda: rank)
        return list(loader)


def test_pairs_that_lack_one_are_refused():
    """An odd number of rows, a batch size that would part a pair, and a stream that ends within one: each is said."""
    with pytest.raises(DataError, match='rows_together=2 does not divide the 5 rows'):
        make(5, 2, rows_together=2)
    with pytest.raises(ConfigError, match=r'multiple of rows_together=2 on each of 2 data rank.*4'):
        make(8, 6, 2, rows_together=2)
    with pytest.raises(ConfigError, match='rows_together=0'):
        make(8, 2, rows_together=0)
    with pytest.raises(DataError, match='lacks'):
        list(DataLoader(iter(rows(3)), 2, device_mesh=mesh(1), rows_together=2))
