"""InfoNCE with the negatives of two processes equals one process with all rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.contrastive_ranks import GROUPS, OPTIONS, encoder, rows, run
from twinkle.errors import DataError
from twinkle.loss import InfonceLoss
from twinkle.loss.gather import data_group, gather_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def two_ranks(tmp_path_factory):
    """What each of two processes saw."""
    folder = tmp_path_factory.mktemp('contrastive')
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    script = [str(ROOT / 'tests' / 'helpers' / 'contrastive_ranks.py'), str(folder)]
    done = subprocess.run([*launcher, *script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f'rank{rank}.json').read_text()) for rank in (0, 1)]


@pytest.mark.parametrize('name', ['plain', 'blocks', 'false negatives'])
def test_two_ranks_equal_one_process(two_ranks, name):
    """Sums, counts and gradients, summed over ranks with unequal numbers of rows; what one rank's loss says of another's rows counts."""
    expected = run(encoder(), rows(sum(GROUPS)), OPTIONS[name])
    assert [seen[name]['count'] for seen in two_ranks] == list(GROUPS)
    assert sum(seen[name]['sum'] for seen in two_ranks) == pytest.approx(expected['sum'], rel=1e-6)
    total = sum(torch.tensor(seen[name]['gradient']) for seen in two_ranks)
    torch.testing.assert_close(total, torch.tensor(expected['gradient']), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', ['own rank only', 'tensor parallel'])
def test_negatives_stay_within_a_rank_when_told_or_alone(two_ranks, name):
    """With across_ranks=False, and where the other rank reads the same rows."""
    start = 0
    for count, seen in zip(GROUPS, two_ranks, strict=True):
        expected = run(encoder(), rows(sum(GROUPS))[start * 3 : (start + count) * 3], {})
        start += count
        assert seen[name]['sum'] == pytest.approx(expected['sum'], rel=1e-6)
        torch.testing.assert_close(torch.tensor(seen[name]['gradient']), torch.tensor(expected['gradient']))


def test_a_rank_without_rows_takes_part(two_ranks):
    """Its part is empty; the others' gradients count every rank's loss."""
    assert [seen['one rank empty'] for seen in two_ranks] == [[[2, 3], 0, []], [[2, 3], 0, [[2.0] * 3] * 2]]


def test_one_process_gathers_nothing():
    """Without a process group there is nothing to collect."""
    rows = torch.randn(3, 2)
    assert data_group() is None
    assert gather_rows(rows, None) == (rows, 0)


@pytest.mark.parametrize('per_row', [False, True])
def test_sample_weights_weigh_queries(per_row):
    """Given per query or per row; what is counted is the weight."""
    embeddings = torch.randn(6, 4, dtype=torch.float64)
    loss = InfonceLoss(0.3)
    weights = [2.0, 0.0, 0.5]
    each = []
    for i in range(3):
        one = [float(j == i) for j in range(3)]
        each.append(float(loss({'sample_weights': one}, {'embeddings': embeddings}).loss_sum))
    given = [w for weight in weights for w in (weight, 9.0)] if per_row else weights
    result = loss({}, {'embeddings': embeddings}, sample_weights=given)
    assert float(result.loss_sum) == pytest.approx(sum(w * e for w, e in zip(weights, each, strict=True)), rel=1e-6)
    assert float(result.count) == 2.5
    with pytest.raises(DataError, match='sample_weights'):
        loss({}, {'embeddings': embeddings}, sample_weights=[1.0])
