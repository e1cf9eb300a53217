"""Random numbers of a run."""

from __future__ import annotations

import os
import random

from twinkle.errors import ConfigError

__all__ = ['check_seed', 'seed_everything']


def check_seed(seed: object) -> None:
    """Refuse what NumPy or PyTorch would refuse later.

    Raises:
        ConfigError: no integer from 0 to 2**32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError(f'seed={seed!r} must be an integer from 0 to 2**32 - 1.')


def seed_everything(seed: int, *, full_determinism: bool = False) -> None:
    """Seed Python, NumPy and PyTorch (its accelerators included).

    With `full_determinism` PyTorch uses deterministic algorithms only, for the rest of the process, and raises where it has none.

    Raises:
        ConfigError: a seed that is no integer from 0 to 2**32 - 1.
    """
    check_seed(seed)
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if full_determinism:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # without it cuBLAS refuses
        os.environ.setdefault('FLASH_ATTENTION_DETERMINISTIC', '1')  # transformers reads it
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
