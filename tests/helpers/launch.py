"""Scripts under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(world: int, script: Path, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a script in so many processes of one thread each."""
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(world)]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1'}
    return subprocess.run(
        [*launcher, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
