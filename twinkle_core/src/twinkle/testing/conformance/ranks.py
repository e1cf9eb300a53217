"""What must hold among ranks. Run with `--twinkle-ranks N`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from twinkle.testing.conformance._measure import applied, close, flat, ready

if TYPE_CHECKING:
    from twinkle.data_format import InputFeature
    from twinkle.model.protocol import TwinkleModel
    from twinkle.testing.subject import Subject


@pytest.fixture(autouse=True)
def several_ranks(subject: Subject) -> None:
    """These rules say nothing about one process."""
    if subject.ranks == 1:
        pytest.skip('one process: run with --twinkle-ranks 2')


def place(model: TwinkleModel) -> tuple[int, int]:
    """This process's data rank, and how many there are."""
    mesh: Any = getattr(model, 'device_mesh', None)
    if mesh is None:
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return mesh.data_rank(), mesh.data_world_size


def share(model: TwinkleModel, rows: list[InputFeature]) -> list[InputFeature]:
    """This rank's part of the rows, of another size than the others'."""
    rank, size = place(model)
    return rows[rank:] if rank == size - 1 else rows[rank : rank + 1]


def everywhere(value: Any) -> list[Any]:
    """The value of every rank."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def test_rows_divided_among_ranks_give_one_gradient(subject: Subject) -> None:
    """However rows are divided, unequal shares included, gradient and norm are those of all rows in one place."""
    rows = subject.rows(subject.ranks + 3)
    whole, divided = ready(subject), ready(subject)
    whole.forward_backward(rows)
    divided.forward_backward(share(divided, rows))
    (expected, norm), (gradient, other_norm) = applied(whole), applied(divided)
    assert close(gradient, expected)
    assert other_norm == pytest.approx(norm, rel=1e-4)


def test_weights_stay_equal_across_ranks(subject: Subject) -> None:
    """After steps on different rows every rank holds the same weights, to the bit."""
    model = ready(subject)
    for seed in range(3):
        model.forward_backward(share(model, subject.rows(subject.ranks + 1, seed)))
        model.clip_grad_and_step()
    states = everywhere(flat(model))
    assert all(torch.equal(state, states[0]) for state in states)


def test_a_rank_with_nothing_to_learn_neither_counts_nor_hangs(subject: Subject) -> None:
    """Where one rank's labels are all -100, the gradient is that of the others' rows."""
    rows = subject.rows(2)
    empty = [{'input_ids': row['input_ids'], 'labels': [-100] * len(row['input_ids'])} for row in rows]
    reference, model = ready(subject), ready(subject)
    if place(model)[1] == 1:
        pytest.skip('all ranks read the same rows')
    reference.forward_backward(rows)
    model.forward_backward(empty if place(model)[0] == 0 else rows)
    assert close(applied(model)[0], applied(reference)[0])


def test_metrics_are_over_all_ranks(subject: Subject) -> None:
    """`calculate_metric` gives every rank the mean over all ranks' tokens."""
    rows = subject.rows(subject.ranks + 2)
    whole, divided = ready(subject), ready(subject)
    expected = whole.forward_backward(rows)['loss']
    divided.forward_backward(share(divided, rows))
    losses = everywhere(divided.calculate_metric()['loss'])
    assert losses == pytest.approx([expected] * len(losses), rel=1e-4)
