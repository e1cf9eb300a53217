"""Both strategies keep the rules of the conformance kit at two ranks, and so do the layouts whose ranks share their rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed import kit_models
from tests.helpers.kit import KIT, OPTIONS
from tests.helpers.launch import ROOT


@pytest.mark.parametrize('name', kit_models.__all__)
def test_a_layout_keeps_the_rules(tmp_path, name):
    """Every rule holds on both ranks; left out is only what is about ranks with rows of their own, where there are none."""
    command = [sys.executable, '-m', 'pytest', *KIT, *OPTIONS, '--twinkle-ranks', '2', '-rs', '-p', 'no:warnings']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [*command, '--twinkle-model', f'tests.distributed.kit_models:{name}'],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith('SKIPPED')]
    shared = name in ('Sequences', 'Tensors')
    assert all('all ranks read the same rows' in line for line in skipped), skipped
    assert bool(skipped) == shared
