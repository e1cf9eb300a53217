"""The runtime of a process: `initialize` starts a run, executors carry out remote classes."""

from twinkle.runtime.executor import Executor, LocalExecutor
from twinkle.runtime.run import Runtime, default_device_mesh, initialize, seed_everything
from twinkle.runtime.state import get_runtime

__all__ = [
    'Executor',
    'LocalExecutor',
    'Runtime',
    'default_device_mesh',
    'get_runtime',
    'initialize',
    'seed_everything',
]
