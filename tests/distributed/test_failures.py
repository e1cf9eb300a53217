"""What goes wrong on one rank ends all of them soon, and is named; what a mesh cannot do is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.launch import torchrun
from tests.helpers.models import tiny_llama_dir


@pytest.mark.parametrize('sizes', ['dp_size=2', 'fsdp_size=2'])
def test_an_error_on_one_rank_ends_all(tmp_path, sizes):
    """The launch ends with the failing rank's own error long before the collective timeout; nobody is left waiting."""
    source = tiny_llama_dir(tmp_path / 'llama')
    start = time.monotonic()
    done = torchrun(2, Path(__file__).with_name('failing.py'), source, sizes, timeout=200)
    assert time.monotonic() - start < 120
    assert done.returncode != 0
    assert 'DataError: row 7 of shard 3 cannot be read' in done.stderr
    assert 'rank 0 step 1' in done.stdout
    assert 'rank 0 step 2' not in done.stdout
