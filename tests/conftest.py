"""Fixtures that all tests share. Tiny models are built once per process; nothing is fetched from a hub."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Before any library reads them: no hub is asked, bars do not clutter the output, and what is converted is converted once.
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
os.environ.setdefault('TWINKLE_PROGRESS', '0')
os.environ.setdefault('TWINKLE_CACHE', str(Path(tempfile.gettempdir()) / 'twinkle-tests-cache'))

import pytest

from tests.helpers.models import tiny_llama_dir


@pytest.fixture(scope='session')
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama: vocabulary 64, hidden 32, two layers."""
    return tiny_llama_dir(tmp_path_factory.mktemp('llama'))


@pytest.fixture(scope='session')
def tiny_llama_tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with tied embeddings."""
    return tiny_llama_dir(tmp_path_factory.mktemp('llama_tied'), tie=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state."""
    import random

    import torch

    random.seed(0)
    torch.manual_seed(0)
