"""Every layout of `TransformersModel` against one process: a launch per world size, many cases in each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.cases import CASES, FULL_CASES, LR, Case, model_dirs
from tests.helpers.launch import torchrun


@pytest.fixture(scope='module')
def seen(tmp_path_factory):
    """What each rank saw in each case, by world size: launched when first asked for."""
    folder = tmp_path_factory.mktemp('parity')
    (folder / 'dirs.json').write_text(json.dumps(model_dirs(folder)))
    done: dict[tuple, list[dict]] = {}

    def of(world: int, *which: str) -> list[dict]:
        key = (world, *which)
        if key not in done:
            launched = torchrun(world, Path(__file__).with_name('cases.py'), str(folder), *which, timeout=1200)
            assert launched.returncode == 0, launched.stderr[-4000:]
            done[key] = [json.loads((folder / f'rank{rank}.json').read_text()) for rank in range(world)]
        return done[key]

    return of


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_a_layout_trains_as_one_process(seen, case: Case):
    """Losses and norms to 1e-5, the learning rates exactly, weights after 5 AdamW steps to 1e-2 x lr, on every rank."""
    check(case, seen(case.world))


@pytest.mark.full
@pytest.mark.parametrize('case', FULL_CASES, ids=lambda case: case.name)
def test_a_layout_trains_as_one_process_in_the_other_modes(seen, case: Case):
    """The rest of the product of layouts and ways of training."""
    check(case, seen(case.world, 'full'))


def check(case: Case, ranks: list[dict]) -> None:
    """Compare what every rank saw with one process."""
    for rank, cases in enumerate(ranks):
        found = cases[case.name]
        assert 'error' not in found, f'rank {rank}: {found["error"]}'
        assert found['losses'] == pytest.approx(found['expected_losses'], rel=1e-5, abs=1e-6)
        assert found['norms'] == pytest.approx(found['expected_norms'], rel=1e-5)
        assert found['lrs'] == found['expected_lrs']
        assert found['weights'] <= 1e-2 * LR
        sharded = any(case.sizes.get(size, 1) > 1 for size in ('fsdp_size', 'tp_size', 'ep_size'))
        assert ('DTensor' in found['parameters']) == sharded
