"""The runtime of a process: `initialize` starts a run, executors carry out remote classes."""

from twinkle.current import get_runtime
from twinkle.device_mesh import default_device_mesh
from twinkle.runtime.executor import Executor, LocalExecutor
from twinkle.runtime.run import Runtime
from twinkle.runtime.seeds import seed_everything
from twinkle.runtime.start import initialize, shutdown

__all__ = [
    'Executor',
    'LocalExecutor',
    'Runtime',
    'default_device_mesh',
    'get_runtime',
    'initialize',
    'seed_everything',
    'shutdown',
]
