"""InputProcessor: rows to tensors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from twinkle.errors import ConfigError, DataError
from twinkle.processor import InputProcessor

ROWS = [
    {'input_ids': [5, 6, 2], 'labels': [6, 2, -100]},
    {'input_ids': [5, 2], 'labels': [2, -100]},
]


def test_rows_are_right_padded():
    """Ids, labels, mask and positions of unequal rows; the true end token stays a target though pad == eos."""
    batch = InputProcessor(pad_token_id=2)(ROWS)
    assert batch['input_ids'].tolist() == [[5, 6, 2], [5, 2, 2]]
    assert batch['labels'].tolist() == [[6, 2, -100], [2, -100, -100]]
    assert batch['attention_mask'].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch['position_ids'].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_inputs_stay_as_they_are():
    """Neither rows nor a dictionary of tensors change, and nothing is shared with numpy behind the caller's back."""
    rows = copy.deepcopy(ROWS)
    InputProcessor()(rows)
    assert rows == ROWS
    tensors = {'input_ids': torch.tensor([[1, 2]])}
    InputProcessor()(tensors)
    assert list(tensors) == ['input_ids']


def test_one_row_and_tensors_as_rows():
    """A single feature is a batch of one; rows may hold tensors or arrays."""
    one = InputProcessor()(ROWS[0])
    assert one['input_ids'].tolist() == [[5, 6, 2]]
    tensors = [{key: torch.tensor(value) for key, value in row.items()} for row in ROWS]
    arrays = [{key: np.asarray(value) for key, value in row.items()} for row in ROWS]
    want = InputProcessor()(ROWS)
    for rows in (tensors, arrays):
        got = InputProcessor()(rows)
        assert all(torch.equal(got[key], want[key]) for key in want)
    assert torch.equal(InputProcessor()(tensors[0])['labels'], one['labels'])


def test_pad_to_multiple_of():
    """The width is rounded up."""
    batch = InputProcessor(pad_to_multiple_of=8)(ROWS)
    assert batch['input_ids'].shape == batch['labels'].shape == (2, 8)


def test_own_positions_and_masks_are_kept():
    """Rows with positions of their own (packed) keep them; a mask of theirs gives the positions."""
    rows = [{**ROWS[0], 'position_ids': [0, 1, 0]}, ROWS[1]]
    assert InputProcessor()(rows)['position_ids'].tolist() == [[0, 1, 0], [0, 1, 0]]
    rows = [{**ROWS[0], 'attention_mask': [0, 1, 1]}, ROWS[1]]
    batch = InputProcessor()(rows)
    assert batch['attention_mask'].tolist() == [[0, 1, 1], [1, 1, 0]]
    assert batch['position_ids'].tolist() == [[0, 0, 1], [0, 1, 1]]


def test_loss_weights():
    """Weights per token, one for a whole row, or none (1); padding weighs 0."""
    rows = [{**ROWS[0], 'loss_weights': [0.5, 2.0, 0.0]}, {**ROWS[1], 'loss_weights': 3.0}, ROWS[1]]
    weights = InputProcessor()(rows)['loss_weights']
    assert weights.tolist() == [[0.5, 2.0, 0.0], [3.0, 3.0, 0.0], [1.0, 1.0, 0.0]]
    assert weights.dtype == torch.float32


def test_missing_labels():
    """Without labels there are none; a row that lacks them in a batch that has them trains on nothing."""
    assert 'labels' not in InputProcessor()([{'input_ids': [1, 2]}])
    assert InputProcessor()([ROWS[0], {'input_ids': [1]}])['labels'].tolist() == [[6, 2, -100], [-100] * 3]


def test_extras():
    """Numbers become [B], numbers per token [B, T], further dimensions come along, other things stay lists."""
    rows = [
        {**ROWS[0], 'rewards': 1.0, 'length': 3, 'ref_logps': [-1.0, -2.0, 0.0], 'id': 'a', 'ok': True, 'any': 1},
        {**ROWS[1], 'rewards': 0.5, 'length': 2, 'ref_logps': [-3.0, 0.0], 'id': 'b', 'ok': False},
    ]
    for row in rows:
        row['topk'] = torch.ones(len(row['input_ids']), 4)
        row['vector'] = [1.0, 2.0, 3.0, 4.0, 5.0]
        row['ragged'] = [[1], [2, 3]]
    batch = InputProcessor()(rows)
    assert batch['rewards'].tolist() == [1.0, 0.5]
    assert batch['length'].tolist() == [3, 2]
    assert batch['ref_logps'].tolist() == [[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]]
    assert batch['id'] == ['a', 'b']
    assert batch['ok'].dtype == torch.bool
    assert batch['any'] == [1, None]
    assert batch['topk'].shape == (2, 3, 4)
    assert batch['topk'][1, 2].sum() == 0
    assert batch['vector'].shape == (2, 5)
    assert batch['ragged'] == [[[1], [2, 3]]] * 2
    assert batch['rewards'].dtype == batch['ref_logps'].dtype == torch.float32


def test_images_are_joined():
    """Multimodal keys are joined along the first dimension, over the rows that have them; other sizes are refused."""
    rows = [
        {**ROWS[0], 'pixel_values': torch.ones(4, 6), 'image_grid_thw': [[1, 2, 2]]},
        ROWS[1],
        {**ROWS[1], 'pixel_values': torch.zeros(2, 6), 'image_grid_thw': [[1, 1, 2]]},
    ]
    batch = InputProcessor()(rows)
    assert batch['pixel_values'].shape == (6, 6)
    assert batch['image_grid_thw'].tolist() == [[1, 2, 2], [1, 1, 2]]
    with pytest.raises(DataError, match='pixel_values'):
        InputProcessor()([{**ROWS[0], 'pixel_values': torch.ones(1, 3)}, {**ROWS[1], 'pixel_values': torch.ones(1, 4)}])


def test_dictionary_of_tensors_gets_what_it_lacks():
    """A batch of tensors passes; mask and positions are filled, right ones also behind padding on the left."""
    ids = torch.tensor([[9, 9, 5], [5, 6, 7]])
    batch = InputProcessor()({'input_ids': ids, 'attention_mask': torch.tensor([[0, 0, 1], [1, 1, 1]]), 'note': 'x'})
    assert batch['position_ids'].tolist() == [[0, 0, 0], [0, 1, 2]]
    assert batch['note'] == 'x'
    batch = InputProcessor()({'input_ids': ids})
    assert batch['attention_mask'].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert batch['position_ids'].tolist() == [[0, 1, 2], [0, 1, 2]]
    nested = InputProcessor()({'input_ids': [[1, 2], [3, 4]], 'labels': [[2, -100], [4, -100]]})
    assert nested['labels'].tolist() == [[2, -100], [4, -100]]
    pixels = InputProcessor()({'pixel_values': torch.ones(2, 3)})
    assert list(pixels) == ['pixel_values']


def test_rows_without_tokens():
    """Rows of images and classes, without any tokens, are stacked."""
    batch = InputProcessor()([{'features': torch.ones(3), 'labels': 1}, {'features': torch.ones(3), 'labels': 0}])
    assert batch['features'].shape == (2, 3)
    assert batch['labels'].tolist() == [1, 0]


@pytest.mark.parametrize(
    ('inputs', 'words'),
    [
        ([], 'no row'),
        (3, 'int'),
        ([ROWS[0], {'input_ids': [1, 2, 3], 'labels': [1]}], 'Row 1 has 3 input_ids and 1 labels'),
        ([ROWS[0], {**ROWS[1], 'loss_weights': [1.0]}], 'Row 1 has 2 input_ids and 1 loss_weights'),
        ([{**ROWS[0], 'attention_mask': [1]}], 'Row 0 has 3 input_ids and 1 attention_mask'),
        ([ROWS[0], {'labels': [1]}], 'Row 1 has no input_ids'),
        ([ROWS[0], {'input_ids': []}], 'Row 1 has no input_ids'),
        ([ROWS[0], {'input_ids': ['a']}], 'row 1 is not a sequence of numbers'),
        ([ROWS[0], 'x'], 'Row 1 is str'),
        ([{**ROWS[0], 'labels': 3}, ROWS[1]], 'Row 0 has the labels 3'),
        ({'input_ids': torch.ones(2, 3), 'labels': torch.ones(2, 2)}, r'labels has the shape \(2, 2\)'),
        ({'input_ids': [[1, 2], [3]]}, 'rectangular'),
    ],
)
def test_bad_inputs_name_the_row(inputs, words):
    """What does not fit is a DataError that names the row and both sizes."""
    with pytest.raises(DataError, match=words):
        InputProcessor()(inputs)


def test_rows_too_long_are_refused():
    """max_length is a limit here, not a knife."""
    with pytest.raises(DataError, match='Row 0 has 3 tokens'):
        InputProcessor(max_length=2)(ROWS)


@pytest.mark.parametrize('options', [{'pad_token_id': -1}, {'pad_token_id': None}, {'pad_to_multiple_of': 0}])
def test_bad_options(options):
    """An option that cannot work is refused."""
    with pytest.raises(ConfigError):
        InputProcessor(**options)


def test_bfloat16_extras():
    """Values in bfloat16, which numpy does not know, are taken as float32."""
    rows = [{**row, 'values': torch.ones(len(row['input_ids']), dtype=torch.bfloat16)} for row in ROWS]
    assert InputProcessor()(rows)['values'].tolist() == [[1, 1, 1], [1, 1, 0]]
