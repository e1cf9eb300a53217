"""The data loader: which rows each rank gets and when, workers, and going on where a run stopped."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tokenizers import tiny_tokenizer
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle.device_mesh import DeviceMesh
from twinkle.errors import ConfigError, DataError


def rows(n):
    """Encoded rows that know their number."""
    return [{'id': i, 'input_ids': [i, i], 'labels': [i, -100]} for i in range(n)]


def mesh(ranks):
    return DeviceMesh.from_sizes(world_size=ranks, dp_size=ranks, device_type='cpu')


def make(n, batch_size, ranks=1, **options):
    return DataLoader(rows(n), batch_size, device_mesh=mesh(ranks), **options)


def ids(batches):
    """The numbers of trained rows, batch by batch."""
    return [[row['id'] for row in batch if any(label != -100 for label in row['labels'])] for batch in batches]


def flat(batches):
    return [i for batch in ids(batches) for i in batch]


class Stream:
    """Rows by iteration only, anew each time."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(rows(self.n))


class Noted:
    """Writes down in a file which rows are fetched, in whichever process."""

    def __init__(self, n, path):
        self.rows, self.path = rows(n), str(path)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f'{index}\n'.encode())
        os.close(file)
        return self.rows[index]

    def fetched(self):
        with open(self.path) as file:
            return [int(line) for line in file]


def per_rank(ranks, build, read):
    """`read(build())` as each rank does it."""
    results = []
    for rank in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv('RANK', str(rank))
            patch.setenv('WORLD_SIZE', str(ranks))
            results.append(read(build()))
    return results


def joined(results):
    """Global batches out of those of all ranks."""
    assert len({len(batches) for batches in results}) == 1, 'ranks take different numbers of steps'
    return [[i for part in parts for i in part] for parts in zip(*results, strict=True)]


SIZES = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(st.just(ranks), st.integers(1, 4).map(lambda each: each * ranks))
)


# -- order -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, n=st.integers(1, 30), seed=st.integers(0, 5), shuffle=st.booleans(), drop_last=st.booleans())
def test_ranks_share_each_global_batch(sizes, n, seed, shuffle, drop_last):
    """Joined, the ranks' rows are the batches of one rank; every epoch has each row once, or all but a last batch that is not full."""
    ranks, batch_size = sizes
    if drop_last and n < batch_size:
        return
    options = {'shuffle': shuffle, 'seed': seed, 'drop_last': drop_last}
    read = lambda loader: [ids(loader) for _ in range(3)]  # noqa: E731
    alone = read(make(n, batch_size, **options))
    together = per_rank(ranks, lambda: make(n, batch_size, ranks, **options), read)
    loader = make(n, batch_size, **options)
    for epoch in range(3):
        assert joined([result[epoch] for result in together]) == alone[epoch]
        order = [i for batch in alone[epoch] for i in batch]
        assert len(order) == (n - n % batch_size if drop_last else n)
        assert len(set(order)) == len(order)
        assert all(len(batch) == batch_size for batch in alone[epoch][:-1])
        assert len(alone[epoch]) == len(loader)
        if not shuffle:
            assert order == list(range(len(order)))


def test_epochs_are_shuffled_anew_by_seed_and_epoch_alone():
    """Each epoch has another order; the same seed gives the same one, whatever random numbers were drawn; another seed another."""
    import random

    import torch

    loader = make(50, 5, shuffle=True, seed=1)
    first, second = flat(loader), flat(loader)
    assert first != second
    assert first != list(range(50))
    random.seed(9)
    torch.manual_seed(9)
    other = make(50, 10, shuffle=True, seed=1)
    assert [flat(other), flat(other)] == [first, second]
    assert flat(make(50, 5, shuffle=True, seed=2)) != first


def test_reading_leaves_the_programs_random_numbers_alone():
    """Iterating draws nothing from the global generators, so that training does not depend on how data is read."""
    import random

    import torch

    for workers in (0, 1):
        states = random.getstate(), torch.get_rng_state()
        list(make(4, 2, shuffle=True, num_workers=workers))
        assert random.getstate() == states[0]
        assert torch.equal(torch.get_rng_state(), states[1])


def test_set_epoch_chooses_the_next_epoch():
    """The order of any epoch can be asked for, and counting goes on from there."""
    loader = make(20, 4, shuffle=True)
    epochs = [flat(loader) for _ in range(4)]
    for epoch in (2, 0, 3):
        loader.set_epoch(epoch)
        assert flat(loader) == epochs[epoch]
        assert loader.get_state()['epoch'] == epoch
    loader.set_epoch(1)
    assert [flat(loader), flat(loader)] == [epochs[1], epochs[2]]
    for wrong in (-1, 0.5, True, None):
        with pytest.raises(ConfigError, match=f'epoch={wrong!r}'):
            loader.set_epoch(wrong)


def test_get_state_counts_rows_over_ranks_and_epochs():
    """After each batch it tells epoch, rows of the epoch, rows in all, and the seed: what was handed out, not what was read ahead."""
    for workers in (0, 1):
        loader = make(10, 4, seed=7, num_workers=workers)
        state = {'epoch': 0, 'consumed_in_epoch': 0, 'consumed_train_samples': 0, 'seed': 7}
        assert loader.get_state() == state
        seen = [
            (s['epoch'], s['consumed_in_epoch'], s['consumed_train_samples'])
            for _ in range(2)
            for _ in loader
            for s in [loader.get_state()]
        ]
        assert seen == [(0, 4, 4), (0, 8, 8), (0, 10, 10), (1, 4, 14), (1, 8, 18), (1, 10, 20)]
    assert per_rank(2, lambda: make(10, 4, 2), lambda loader: (len(list(loader)), loader.get_state()))[1] == (
        3,
        {'epoch': 0, 'consumed_in_epoch': 10, 'consumed_train_samples': 10, 'seed': 0},
    )


# -- the last batch ----------------------------------------------------------------------------------------------------


def test_ranks_without_rows_get_an_untrained_copy():
    """One row for three ranks: the first trains it, the others get it with nothing to train; the data set stays as it was."""
    data = rows(4)
    results = per_rank(3, lambda: DataLoader(data, 3, device_mesh=mesh(3)), lambda loader: list(loader)[-1])
    assert [[row['labels'] for row in batch] for batch in results] == [[[3, -100]], [[-100, -100]], [[-100, -100]]]
    assert [batch[0]['input_ids'] for batch in results] == [[3, 3]] * 3
    assert data == rows(4)


def test_a_stream_gives_untrained_copies_too():
    """The same for iterable data."""
    results = per_rank(3, lambda: DataLoader(Stream(4), 3, device_mesh=mesh(3)), ids)
    assert results == [[[0], [3]], [[1], []], [[2], []]]


def test_rows_that_are_not_encoded_cannot_stand_in():
    """All ranks are told, so that none waits for another; with drop_last, or rows enough, raw rows are fine."""
    raw = [{'text': str(i)} for i in range(4)]

    def read(loader):
        with pytest.raises(DataError, match=r'1 row\(s\) for 3 data ranks.*drop_last=True'):
            list(loader)
        return True

    for data in (raw, IterableDataset(DatasetMeta(raw))):
        assert per_rank(3, lambda data=data: DataLoader(data, 3, device_mesh=mesh(3)), read) == [True] * 3
        assert per_rank(3, lambda data=data: DataLoader(data, 3, device_mesh=mesh(3), drop_last=True), list) == [
            [[row]] for row in raw[:3]
        ]
    assert per_rank(2, lambda: DataLoader(raw, 2, device_mesh=mesh(2)), lambda x: len(list(x))) == [2, 2]


# -- going on ----------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    sizes=SIZES,
    n=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    stop=st.integers(0, 12),
    stream=st.booleans(),
    set_epoch=st.booleans(),
)
def test_a_resumed_run_is_the_rest_of_the_uninterrupted_one(sizes, n, shuffle, drop_last, stop, stream, set_epoch):
    """Stopped after any batch of any epoch, the batches that follow are those of the run that went on, and so are the counts."""
    ranks, batch_size = sizes
    if drop_last and n < batch_size:
        return

    def build():
        if stream:
            return DataLoader(Stream(n), batch_size, device_mesh=mesh(ranks), drop_last=drop_last)
        return make(n, batch_size, ranks, shuffle=shuffle, drop_last=drop_last)

    def follow(loader, epochs, note):
        for _ in range(epochs):
            for batch in loader:
                note.append((ids([batch]), loader.get_state()))
        return note

    steps = n // batch_size if drop_last else -(-n // batch_size)
    whole = stop // steps + 2

    def read(loader):
        full = follow(build(), whole, [])
        consumed = full[stop - 1][1]['consumed_train_samples'] if stop else 0
        loader.resume_from_checkpoint(consumed)
        assert loader.get_state()['consumed_train_samples'] == consumed
        if set_epoch:
            loader.set_epoch(stop // steps)
        rest = follow(loader, whole - stop // steps, [])
        assert [batch for batch, _ in rest] == [batch for batch, _ in full[stop:]]
        count = [state['consumed_train_samples'] for _, state in full[stop:]]
        assert [state['consumed_train_samples'] for _, state in rest] == count
        if not stream or not set_epoch:
            assert [state for _, state in rest] == [state for _, state in full[stop:]]
        return True

    assert all(per_rank(ranks, build, read))


def test_going_by_rows_not_steps():
    """CASES 10: 10 rows, batches of 2, 8 consumed: the remaining ids and the second epoch are those of the uninterrupted run."""
    whole = make(10, 2, shuffle=True, seed=3)
    first, second = flat(whole), flat(whole)
    loader = make(10, 2, shuffle=True, seed=3)
    loader.resume_from_checkpoint(8)
    assert [flat(loader), flat(loader)] == [first[8:], second]


@pytest.mark.parametrize('set_epoch', [False, True])
def test_resuming_in_a_later_epoch(set_epoch):
    """CASES 25: 2 epochs of 10, stopped at 14: rows 14 to 19 of the uninterrupted order, then whole epochs; also with set_epoch."""
    whole = make(10, 2, shuffle=True)
    order = [i for _ in range(3) for i in flat(whole)]
    loader = make(10, 2, shuffle=True)
    loader.resume_from_checkpoint(14)
    assert loader.get_state() == {'epoch': 1, 'consumed_in_epoch': 4, 'consumed_train_samples': 14, 'seed': 0}
    if set_epoch:
        loader.set_epoch(1)
    assert flat(loader) == order[14:20]
    assert flat(loader) == order[20:]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 25), consumed=st.integers(0, 60), size=st.integers(1, 9), ranks=st.integers(1, 3))
def test_another_batch_size_or_number_of_ranks_goes_on_at_the_same_row(n, consumed, size, ranks):
    """The rows behind the resume point come in the same order, each once, however they are batched and divided."""
    whole = make(n, 1, shuffle=True)
    order = [i for _ in range(consumed // n + 2) for i in flat(whole)]
    at = consumed // n

    def read(loader):
        loader.resume_from_checkpoint(consumed)
        return [ids(loader) for _ in range(2)]

    results = per_rank(ranks, lambda: make(n, size * ranks, ranks, shuffle=True), read)
    for epoch, (start, end) in enumerate([(consumed, (at + 1) * n), ((at + 1) * n, (at + 2) * n)]):
        batches = joined([result[epoch] for result in results])
        assert [i for batch in batches for i in batch] == order[start:end]


@pytest.mark.parametrize(('consumed', 'size'), [(3, 4), (6, 4), (7, 5), (9, 4), (10, 4)])
def test_drop_last_with_another_batch_size_keeps_its_epochs(consumed, size):
    """Only full batches come, none twice, and what is consumed stays what the next resume needs."""
    loader = make(10, size, drop_last=True)
    loader.resume_from_checkpoint(consumed)
    batches = [batch for _ in range(3) for batch in loader]
    assert all(len(batch) == size for batch in batches)
    again = make(10, size, drop_last=True)
    again.resume_from_checkpoint(loader.get_state()['consumed_train_samples'])
    assert flat(again) == flat(loader)


def test_an_iterator_that_is_too_short_for_its_resume_point_is_an_error():
    """A stream that can be read once cannot be resumed in its second epoch; nothing is yielded in silence."""
    loader = DataLoader(iter(rows(10)), 2, device_mesh=mesh(1))
    loader.resume_from_checkpoint(14)
    with pytest.raises(DataError, match=r'no rows behind 14 consumed rows.*only once'):
        list(loader)
    loader = DataLoader(iter(rows(4)), 2, device_mesh=mesh(1))
    assert flat(loader) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r'no rows.*only once'):
        list(loader)


@pytest.mark.parametrize('wrong', [-1, 2.0, True, None, '3'])
def test_a_resume_point_is_a_number_of_rows(wrong):
    """Anything else is named."""
    with pytest.raises(ConfigError, match='consumed_train_samples='):
        make(4, 2).resume_from_checkpoint(wrong)


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spawned():
    """Workers are started afresh, as on macOS and Windows, and lately on Linux."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method('spawn', force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize('workers', [0, 1, 2])
def test_workers_give_the_same_rows_and_fetch_each_once(workers, tmp_path):
    """However many processes read ahead, batches and states are the same, and no row is fetched twice."""
    data = Noted(23, tmp_path / 'fetched')
    loader = DataLoader(data, 4, device_mesh=mesh(1), shuffle=True, num_workers=workers, prefetch_factor=3)
    plain = make(23, 4, shuffle=True)
    assert ids(loader) == ids(plain)
    assert Counter(data.fetched()) == Counter(range(23))
    loader.resume_from_checkpoint(32)
    plain.resume_from_checkpoint(32)
    assert ids(loader) == ids(plain)
    assert len(data.fetched()) == 23 + 14


def test_each_rank_fetches_its_own_rows_only(tmp_path):
    """Over all ranks every row is fetched once."""
    data = Noted(12, tmp_path / 'fetched')
    per_rank(3, lambda: DataLoader(data, 6, device_mesh=mesh(3), shuffle=True), list)
    assert Counter(data.fetched()) == Counter(range(12))


@pytest.mark.parametrize('cls', [Dataset, LazyDataset, IterableDataset])
@pytest.mark.parametrize('workers', [0, 1])
def test_every_data_set_is_loaded(cls, workers):
    """Data sets of all kinds give the same encoded batches."""
    dataset = cls(DatasetMeta([{'text': 'you ' * (i + 1), 'reward': i} for i in range(5)]))
    dataset.set_template('default', tokenizer=tiny_tokenizer())
    dataset.encode()
    batches = list(DataLoader(dataset, 2, device_mesh=mesh(1), num_workers=workers))
    assert [[row['reward'] for row in batch] for batch in batches] == [[0, 1], [2, 3], [4]]
    assert [row for batch in batches for row in batch] == list(dataset)


def test_started_workers_give_the_same_rows(spawned, monkeypatch):
    """Workers that are spawned get data set, template and rank, also where only a process group, which they are not in, tells it."""
    monkeypatch.setattr('twinkle.dataloader.loader.this_rank', lambda: 1)
    dataset = Dataset(DatasetMeta([{'text': 'you ' * (i + 1), 'id': i} for i in range(7)]))
    dataset.set_template('default', tokenizer=tiny_tokenizer())
    dataset.encode()
    for data in (dataset, Stream(7)):
        loader = DataLoader(data, 4, device_mesh=mesh(2), num_workers=1)
        assert ids(loader) == [[2, 3], [6]]


@pytest.mark.parametrize('workers', [0, 1])
def test_errors_in_rows_keep_their_kind(workers):
    """What a row raises in a worker is what the loop sees, with the row."""
    dataset = LazyDataset(DatasetMeta([{'text': 'a'}, {'prompt': 'b'}]))
    dataset.set_template('default', tokenizer=tiny_tokenizer())
    dataset.encode()
    with pytest.raises(DataError, match='Row 1 has neither messages nor text'):
        list(DataLoader(dataset, 1, device_mesh=mesh(1), num_workers=workers))


@pytest.mark.parametrize('workers', [0, 1])
def test_streams_are_read_and_resumed(workers):
    """Iterable data comes in its own order, in each epoch, and goes on behind the rows that were consumed, in any epoch."""
    loader = DataLoader(Stream(7), 3, device_mesh=mesh(1), num_workers=workers)
    assert [ids(loader), ids(loader)] == [[[0, 1, 2], [3, 4, 5], [6]]] * 2
    assert loader.get_state() == {'epoch': 1, 'consumed_in_epoch': 7, 'consumed_train_samples': 14, 'seed': 0}
    loader.resume_from_checkpoint(10)
    assert [ids(loader), ids(loader)] == [[[3, 4, 5], [6]], [[0, 1, 2], [3, 4, 5], [6]]]
    assert loader.get_state() == {'epoch': 2, 'consumed_in_epoch': 7, 'consumed_train_samples': 21, 'seed': 0}
    dropping = DataLoader(Stream(7), 3, device_mesh=mesh(1), num_workers=workers, drop_last=True)
    assert [ids(dropping), ids(dropping)] == [[[0, 1, 2], [3, 4, 5]]] * 2


def test_collate_fn_makes_the_batches():
    """It gets this rank's rows, in workers too, stand-ins included."""
    for workers in (0, 1):
        results = per_rank(
            2, lambda w=workers: make(3, 2, 2, collate_fn=len, num_workers=w), lambda loader: list(loader)
        )
        assert results == [[1, 1], [1, 1]]


# -- what cannot work --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('data', 'batch_size', 'ranks', 'options', 'error', 'match'),
    [
        (rows(9), 3, 2, {}, ConfigError, r'batch_size=3 .*multiple of their number, 2 \(.*2'),
        (rows(9), 0, 1, {}, ConfigError, 'batch_size=0'),
        (rows(9), -2, 1, {}, ConfigError, 'batch_size=-2'),
        (rows(9), 2.0, 1, {}, ConfigError, 'batch_size=2.0'),
        (rows(9), True, 1, {}, ConfigError, 'batch_size=True'),
        (rows(9), 3, 1, {'num_workers': -1}, ConfigError, 'num_workers=-1 must be an integer of at least 0'),
        (rows(9), 3, 1, {'num_workers': None}, ConfigError, 'num_workers=None'),
        (rows(9), 3, 1, {'num_workers': 1, 'prefetch_factor': 0}, ConfigError, 'prefetch_factor=0'),
        (rows(9), 3, 1, {'seed': 'x'}, ConfigError, "seed='x'"),
        ([], 1, 1, {}, DataError, 'data set is empty'),
        (rows(3), 4, 1, {'drop_last': True}, DataError, r'3 row\(s\), a batch 4'),
        (Stream(3), 1, 1, {'shuffle': True}, ConfigError, 'shuffle=True needs a data set with a length'),
        (Stream(3), 1, 1, {'num_workers': 2}, ConfigError, 'num_workers may be 0 or 1'),
        (5, 1, 1, {}, ConfigError, 'dataset is int'),
    ],
)
def test_what_does_not_fit_is_refused_with_its_sizes(data, batch_size, ranks, options, error, match):
    """Sizes, workers and data that cannot work are named when the loader is made."""
    with pytest.raises(error, match=match):
        DataLoader(data, batch_size, device_mesh=mesh(ranks), **options)


def test_a_stream_that_gives_no_batch_is_an_error():
    """An empty stream, and one that is shorter than a batch under drop_last, say so; a stream has no length."""
    with pytest.raises(DataError, match='The stream has no rows'):
        list(DataLoader(Stream(0), 2, device_mesh=mesh(1)))
    with pytest.raises(DataError, match=r'the stream has 3 row\(s\), a batch 4'):
        list(DataLoader(Stream(3), 4, device_mesh=mesh(1), drop_last=True))
    with pytest.raises(TypeError, match='no length'):
        len(DataLoader(Stream(3), 1, device_mesh=mesh(1)))


def test_length_counts_global_batches():
    """It is the number of steps of a whole epoch, on every rank."""
    assert [len(make(10, size)) for size in (1, 3, 4, 10, 20)] == [10, 4, 3, 1, 1]
    assert [len(make(10, size, drop_last=True)) for size in (1, 3, 4, 10)] == [10, 3, 2, 1]
    assert per_rank(2, lambda: make(10, 4, 2), lambda loader: (len(loader), len(list(loader)))) == [(3, 3)] * 2


def test_without_a_mesh_all_running_ranks_read(monkeypatch):
    """By default the rows are divided over the processes of the launcher."""
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '1')
    assert ids(DataLoader(rows(4), 2)) == [[1], [3]]
