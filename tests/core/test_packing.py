"""Packing: which samples go together, the rows they make, and data sets of such rows."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tokenizers import tiny_tokenizer
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, IterablePackingDataset, PackingDataset
from twinkle.dataset.packs import Packing
from twinkle.device_mesh import DeviceMesh
from twinkle.errors import (
    ConfigError,
    DataError,
    MissingPackageError,
    NotSupportedError,
    SampleTooLongError,
    StateError,
)
from twinkle.processor import InputProcessor
from twinkle.processor.joining import join_features

KINDS = [PackingDataset, IterablePackingDataset]


def sample(n, first=1, **extra):
    """An encoded row of n tokens, of which all but the first are learned."""
    ids = list(range(first, first + n))
    return {'input_ids': ids, 'labels': [*ids[1:], -100], 'attention_mask': [1] * n, 'length': n, **extra}


def rows_of(lengths):
    """Encoded rows whose tokens tell which row they are of."""
    return [sample(n, first=1000 * index) for index, n in enumerate(lengths)]


def packed(cls, rows, length, **options):
    dataset = cls(DatasetMeta(rows), packing_length=length, **options)
    dataset.pack_dataset()
    return dataset


def apart(pack):
    """The tokens of each sample of a packed row, and their labels."""
    starts = [i for i, position in enumerate(pack['position_ids']) if position == 0]
    ends = [*starts[1:], len(pack['position_ids'])]
    return [(pack['input_ids'][start:end], pack['labels'][start:end]) for start, end in zip(starts, ends, strict=True)]


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


# -- which samples go together -----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, room=st.integers(0, 20), interval=st.integers(1, 15))
def test_every_sample_is_packed_once_and_no_group_is_too_long(lengths, room, interval):
    """For any lengths, row length and interval; samples of a group keep their order, and a second run gives the same groups."""
    length = max(lengths) + room
    packing = Packing(length, interval)
    groups = list(packing.together(((n, i) for i, n in enumerate(lengths)), length))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= length for group in groups)
    assert all(group and group == sorted(group) for group in groups)
    assert groups == list(packing.together(((n, i) for i, n in enumerate(lengths)), length))
    if interval >= len(lengths):  # more than half full, but for one
        assert sum(2 * sum(lengths[i] for i in group) <= length for group in groups) <= 1
        assert len(groups) <= max(1, 2 * sum(lengths) / length + 1)


@pytest.mark.parametrize(('length', 'full'), [(512, 0.98), (2048, 0.99), (8192, 0.98)])
def test_rows_are_nearly_full(length, full):
    """On lengths as chats have them (log-normal), the default interval leaves 1-2% of the tokens to pads."""
    from twinkle.dataset.packing import INTERVAL

    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 10_000).astype(int).clip(2, length).tolist()
    groups = list(Packing(None, INTERVAL).together(((n, n) for n in lengths), length))
    assert sum(lengths) / (len(groups) * length) > full


def test_a_stream_is_packed_with_few_samples_in_hand():
    """Packs come before the stream is over: little more than an interval is read ahead."""
    read = []

    def endless():
        while True:
            read.append(1)
            yield (3, len(read))

    groups = Packing(None, 8).together(endless(), 10)
    for _ in range(30):
        assert len(next(groups)) == 3
    assert len(read) <= 30 * 3 + 8 + 3


# -- the row they make -------------------------------------------------------------------------------------------------


def test_positions_start_again_and_no_sample_learns_the_next():
    """CASES 7: [1,2,3] and [4,5] make positions [0,1,2,0,1] and 3 targets."""
    pack = join_features([sample(3), sample(2, first=4)])
    assert pack == {
        'input_ids': [1, 2, 3, 4, 5],
        'labels': [2, 3, -100, 5, -100],
        'attention_mask': [1] * 5,
        'position_ids': [0, 1, 2, 0, 1],
        'length': 5,
    }
    careless = {'input_ids': [1, 2], 'labels': [2, 9]}
    assert join_features([careless, {'input_ids': [4, 5]}])['labels'] == [2, -100, -100, -100]
    assert 'labels' not in join_features([{'input_ids': [1]}, {'input_ids': [2]}])


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS)
def test_packed_rows_come_apart_again(lengths):
    """Positions alone tell the samples, of one token too; a pack is packed again like its samples; nothing given is changed."""
    rows = rows_of(lengths)
    before = copy.deepcopy(rows)
    pack = join_features(rows)
    assert apart(pack) == [(row['input_ids'], row['labels']) for row in rows]
    assert join_features([join_features(rows[:3]), *rows[3:]]) == pack
    assert rows == before


@pytest.mark.parametrize('as_array', [list, np.array, torch.tensor])
def test_left_out_tokens_are_dropped(as_array):
    """Pads on the left, on the right or within do not come along, nor what belongs to them; lists and tensors alike."""
    row = {
        'input_ids': [9, 1, 2, 9],
        'labels': [9, 2, 9, 9],
        'attention_mask': [0, 1, 1, 0],
        'old_logps': [9.0, 0.5, 0.0, 9.0],
    }
    pack = join_features([{key: as_array(value) for key, value in row.items()}, {**sample(1), 'old_logps': [0.25]}])
    assert pack['input_ids'] == [1, 2, 1]
    assert pack['labels'] == [2, -100, -100]
    assert pack['old_logps'] == [0.5, 0.0, 0.25]
    assert pack['position_ids'] == [0, 1, 0]


def test_loss_weights_are_spread_and_filled():
    """A weight of a whole sample counts for each of its tokens, per-token ones stay, none is 1; advantages are spread, too."""
    pack = join_features([sample(2, loss_weights=0.5), sample(2, loss_weights=[0.1, 0.2]), sample(1)])
    assert pack['loss_weights'] == [0.5, 0.5, 0.1, 0.2, 1.0]
    pack = join_features(
        [sample(2, advantages=1.5), sample(1, advantages=np.float32(-1)), sample(2, advantages=[1, 2])]
    )
    assert pack['advantages'] == [1.5, 1.5, -1.0, 1, 2]
    assert join_features([sample(2, advantages=1.5), sample(1)])['advantages'] == [1.5, None]


def test_other_columns_become_lists_by_sample():
    """Rewards and names stay with their samples, top-k of a teacher with its tokens, images follow one another."""
    a = sample(2, reward=0.1, id='a', teacher_topk_ids=[[1, 2], [3, 4]], images=['x.png', 'y.png'], meta={'k': 1})
    b = sample(1, reward=0.2, teacher_topk_ids=[[5, 6]], images=['z.png'], pixel_values=torch.ones(1, 3, 2, 2))
    c = sample(1, reward=0.3, teacher_topk_ids=[[7, 8]], pixel_values=torch.zeros(2, 3, 2, 2))
    pack = join_features([a, b, c])
    assert pack['reward'] == [0.1, 0.2, 0.3]
    assert pack['id'] == ['a', None, None]
    assert pack['meta'] == [{'k': 1}, None, None]
    assert pack['teacher_topk_ids'] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert pack['images'] == ['x.png', 'y.png', 'z.png']
    assert pack['pixel_values'].shape == (3, 3, 2, 2)
    assert join_features([sample(1, pixel_values=[[1.0]]), sample(1, pixel_values=[[2.0]])])['pixel_values'] == [
        [1],
        [2],
    ]


@pytest.mark.parametrize(
    ('row', 'error', 'match'),
    [
        ({'input_ids': [1, 2], 'labels': [2]}, DataError, '2 input_ids and 1 labels'),
        ({'input_ids': [1, 2], 'labels': 3}, DataError, '2 input_ids and labels=3'),
        ({'input_ids': [1, 2], 'position_ids': [1, 2]}, DataError, 'position_ids start at 1'),
        ({'input_ids': [1, 2], 'position_ids': [[0, 1]] * 3}, NotSupportedError, 'position_ids.*several dimensions'),
        ({'input_ids': [1, 2], 'image_grid_thw': [[1, 2, 2]]}, NotSupportedError, 'image_grid_thw.*Use a Dataset'),
        ({'input_ids': [1, 2], 'loss_weights': [1.0]}, DataError, 'loss_weights of a packed row'),
    ],
)
def test_rows_that_cannot_be_packed_say_why(row, error, match):
    """Each with the rule that it breaks."""
    with pytest.raises(error, match=match):
        join_features([sample(2), row])


@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
def test_a_model_that_goes_by_positions_computes_each_sample_as_if_alone(attention, tiny_llama):
    """CASES 7: without a mask Transformers keeps samples apart by these positions: logits of each equal unpacked ones, pads behind."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation=attention).train()
    samples = [sample(n, first=first) for n, first in ((3, 1), (2, 4), (1, 9), (5, 20), (4, 40))]
    packs = [join_features(samples[:3]), join_features(samples[3:])]
    batch = InputProcessor()(packs)
    assert batch['input_ids'].shape == (2, 9)
    logits = model(input_ids=batch['input_ids'], position_ids=batch['position_ids'], use_cache=False).logits
    together = [*logits[0, :6].split([3, 2, 1]), *logits[1].split([5, 4])]
    for row, found in zip(samples, together, strict=True):
        alone = model(input_ids=torch.tensor([row['input_ids']]), use_cache=False).logits[0]
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


# -- data sets ---------------------------------------------------------------------------------------------------------

TEXTS = [{'text': 'you ' * (1 + n * 7 % 11), 'id': n} for n in range(60)]


def encoded(cls, rows=TEXTS, *, max_length=24, interval=16, **options):
    dataset = cls(DatasetMeta(rows), packing_interval=interval)
    dataset.set_template('default', tokenizer=tiny_tokenizer(), max_length=max_length, **options)
    dataset.encode()
    return dataset


@pytest.mark.parametrize('cls', KINDS)
def test_encoded_rows_are_packs_of_the_templates_length(cls):
    """Samples are those that a Dataset encodes, each once, in rows of at most max_length tokens; the data stays as it was."""
    rows = copy.deepcopy(TEXTS)
    packs = list(encoded(cls, rows))
    assert rows == TEXTS
    plain = Dataset(DatasetMeta(rows))
    plain.set_template('default', tokenizer=tiny_tokenizer(), max_length=24)
    plain.encode()
    by_id = {row['id']: (row['input_ids'], row['labels']) for row in plain}
    found = [(i, part) for pack in packs for i, part in zip(pack['id'], apart(pack), strict=True)]
    assert sorted(i for i, _ in found) == list(range(60))
    assert all(part == by_id[i] for i, part in found)
    assert all(len(pack['input_ids']) == pack['length'] <= 24 for pack in packs)
    assert len(packs) < 60


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, interval=st.integers(1, 15))
def test_ahead_and_as_a_stream_packs_are_the_same(lengths, interval):
    """The same rows in the same order, however often they are read, by index or one after the other."""
    rows = rows_of(lengths)
    ahead, stream = (packed(cls, rows, 14, packing_interval=interval) for cls in KINDS)
    assert list(ahead) == list(stream) == list(stream) == [ahead[i] for i in range(len(ahead))]
    assert ahead[-1] == ahead[len(ahead) - 1]
    with pytest.raises(IndexError):
        ahead[len(ahead)]


def test_before_encoding_rows_are_rows():
    """What is not encoded can be looked at, mapped and filtered; packs follow what changes behind them."""
    dataset = PackingDataset(DatasetMeta(TEXTS), packing_interval=16)
    assert (len(dataset), dataset[3], list(dataset)) == (60, TEXTS[3], TEXTS)
    dataset.set_template('default', tokenizer=tiny_tokenizer(), max_length=24)
    dataset.encode()
    whole = len(dataset)
    dataset.filter(lambda row: row['id'] < 20)
    assert sorted(i for pack in dataset for i in pack['id']) == list(range(20))
    assert len(dataset) < whole
    dataset.map(lambda row: {**row, 'id': -row['id']})
    assert max(i for pack in dataset for i in pack['id']) == 0
    dataset.add_dataset(DatasetMeta([{'text': 'you', 'id': 7}]))
    assert len(dataset) == 21
    dataset.encode()
    assert sum(len(pack['id']) for pack in dataset) == 21


def test_several_sources_are_packed_together():
    """Mixed or one after the other, encoded elsewhere too; steps after encoding see single samples, in a stream as well."""
    for cls in KINDS:
        dataset = cls(DatasetMeta(rows_of([3, 3])), packing_length=9)
        dataset.add_dataset(DatasetMeta([sample(3, first=50)]))
        dataset.pack_dataset()
        dataset.map(lambda row: {**row, 'n': len(row['input_ids'])})
        (pack,) = dataset
        assert pack['n'] == [3, 3, 3]


@pytest.mark.parametrize('cls', KINDS)
def test_packing_needs_a_length_that_fits(cls):
    """No length, a row that is too long for it, and values that are none: each says what to set."""
    with pytest.raises(StateError, match=r'set_template\(\.\.\., max_length=.*packing_length'):
        encoded(cls, max_length=None)
    with pytest.raises(StateError, match='packing_length'):
        packed(cls, rows_of([3]), None)
    with pytest.raises(DataError, match='Encoded row 1 has 5 tokens, and a packed row takes 1 to 4: set max_length'):
        list(packed(cls, rows_of([3, 5]), 4))
    with pytest.raises(DataError, match='Encoded row 0 has 0 tokens'):
        list(packed(cls, [{'input_ids': [1], 'attention_mask': [0]}], 4))
    with pytest.raises(SampleTooLongError, match='Row 0'):
        list(encoded(cls, [{'text': 'you ' * 50}]))
    for options in (
        {'packing_length': 0},
        {'packing_length': 2.5},
        {'packing_interval': None},
        {'packing_interval': True},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            cls(DatasetMeta(TEXTS), **options)


@pytest.mark.parametrize('cls', KINDS)
def test_packing_goes_by_encoded_rows(cls):
    """Rows that are not encoded, no rows, and no template are errors of order."""
    with pytest.raises(StateError, match=r"Row 0 is not encoded \(columns: \['id', 'text'\]\): call encode\(\)"):
        list(packed(cls, TEXTS, 24))
    with pytest.raises(StateError, match='set_template'):
        cls(DatasetMeta(TEXTS), packing_length=24).encode()
    with pytest.raises(StateError, match='add a data set first'):
        dataset = cls(packing_length=24)
        dataset.pack_dataset()
        list(dataset)


@pytest.mark.parametrize('cls', KINDS)
def test_without_the_library_the_extra_is_named(cls, monkeypatch):
    """It is told when the data set is made, not after encoding."""
    monkeypatch.setitem(sys.modules, 'binpacking', None)
    with pytest.raises(MissingPackageError, match=r"pip install 'twinkle-core\[packing\]'"):
        cls(DatasetMeta(TEXTS))


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('cls', KINDS)
def test_packs_are_loaded_shared_and_resumed_as_rows_are(cls, workers, monkeypatch):
    """Two ranks take each pack once, in the same number of steps; a resumed run goes on with the packs that were left."""
    mesh = DeviceMesh.from_sizes(world_size=2, dp_size=2, device_type='cpu')
    monkeypatch.setenv('WORLD_SIZE', '2')
    dataset = encoded(cls)
    by_rank = []
    for rank in (0, 1):
        monkeypatch.setenv('RANK', str(rank))
        loader = DataLoader(dataset, 4, device_mesh=mesh, num_workers=workers)
        whole = list(loader)
        loader.resume_from_checkpoint(8)
        assert list(loader) == whole[2:]
        by_rank.append(whole)
    trained = [
        row for parts in zip(*by_rank, strict=True) for part in parts for row in part if set(row['labels']) != {-100}
    ]
    assert trained == list(dataset)


# -- joined by the processor ---------------------------------------------------------------------------------------------


def test_padding_free_joins_the_rows_of_a_batch():
    """The batch is one row of all tokens; per token, per sample and per pack given values keep their samples."""
    rows = [sample(3, advantages=1.0, rewards=0.5), sample(2, first=7, advantages=-1.0, rewards=2.0)]
    before = copy.deepcopy(rows)
    batch = InputProcessor(padding_free=True)(rows)
    assert rows == before
    assert batch['input_ids'].tolist() == [[1, 2, 3, 7, 8]]
    assert batch['position_ids'].tolist() == [[0, 1, 2, 0, 1]]
    assert batch['advantages'].tolist() == [[1.0, 1.0, 1.0, -1.0, -1.0]]
    assert batch['rewards'].tolist() == [0.5, 2.0]
    assert batch['attention_mask'].sum() == 5
    pack = join_features(rows)
    again = InputProcessor(padding_free=True)([pack, sample(2, first=4, advantages=0.0, rewards=3.0)])
    assert again['rewards'].tolist() == [0.5, 2.0, 3.0]


def test_what_packs_give_per_sample_is_one_list():
    """Packs of different numbers of samples, padded: `sample_weights` has one entry per sample, in their order."""
    first = join_features([sample(3, sample_weights=1.0), sample(2, sample_weights=2.0), sample(2, sample_weights=3.0)])
    batch = InputProcessor()([first, sample(4, sample_weights=4.0)])
    assert batch['sample_weights'].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert batch['input_ids'].shape == (2, 7)


def test_padding_free_rounds_up_and_refuses_what_is_padded():
    """`pad_to_multiple_of` pads the one row's end; a dictionary of padded tensors is refused; rows keep their limit."""
    batch = InputProcessor(padding_free=True, pad_to_multiple_of=4)([sample(3), sample(2)])
    assert batch['input_ids'].shape == (1, 8)
    with pytest.raises(DataError, match='padded already'):
        InputProcessor(padding_free=True)({'input_ids': torch.ones(2, 3, dtype=torch.long)})
    assert InputProcessor(padding_free=True, max_length=3)([sample(3), sample(3)])['input_ids'].shape == (1, 6)
    with pytest.raises(DataError, match='max_length=3'):
        InputProcessor(padding_free=True, max_length=3)([sample(4)])
    with pytest.raises(ConfigError, match='padding_free'):
        InputProcessor(padding_free='yes')
