"""CASES 24: tenants, early or late, are synchronised in every layout and equal one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.scenarios import ONE
from tests.distributed.tenants import run
from tests.helpers.launch import torchrun
from tests.helpers.models import tiny_llama_dir


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp('llama'))


@pytest.fixture(scope='module')
def one(source, tmp_path_factory):
    return run(ONE, source, tmp_path_factory.mktemp('one'))


@pytest.mark.parametrize('world', [2, 4])
def test_tenants_over_ranks_equal_one_process(source, one, tmp_path, world):
    """Losses and norms to 1e-5, weights to 1e-2 x lr on every rank: data-parallel, FSDP2 by both strategies, HSDP, Ulysses."""
    done = torchrun(world, Path(__file__).with_name('tenants.py'), str(tmp_path), source, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(world):
        for name, found in json.loads((tmp_path / f'rank{rank}.json').read_text()).items():
            assert 'error' not in found, f'rank {rank}, {name}: {found["error"]}'
            assert found['losses'] == pytest.approx(one['losses'], rel=1e-5, abs=1e-6), name
            assert found['norms'] == pytest.approx(one['norms'], rel=1e-5), name
            for key, values in one['weights'].items():
                assert found['weights'][key] == pytest.approx(values, abs=1e-5), (name, key)  # 1e-2 x lr
