"""Twinkle: train large models through one small protocol.

`import twinkle` costs next to nothing: PyTorch, plugins and data libraries are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = '0.1.0'

# Public names, and the module that each is imported from when it is first asked for.
_LAZY = {
    'DeviceGroup': 'twinkle.device_mesh',
    'DeviceMesh': 'twinkle.device_mesh',
    'PLUGIN_API': 'twinkle.plugins',
    'advantages': 'twinkle.registry',
    'executors': 'twinkle.registry',
    'filters': 'twinkle.registry',
    'get_device_placement': 'twinkle.device_mesh',
    'get_logger': 'twinkle.logging',
    'initialize': 'twinkle.runtime',
    'input_processors': 'twinkle.registry',
    'losses': 'twinkle.registry',
    'lr_schedulers': 'twinkle.registry',
    'metrics': 'twinkle.registry',
    'models': 'twinkle.registry',
    'optimizers': 'twinkle.registry',
    'patches': 'twinkle.registry',
    'preprocessors': 'twinkle.registry',
    'remote_class': 'twinkle.remote',
    'remote_function': 'twinkle.remote',
    'rewards': 'twinkle.registry',
    'sources': 'twinkle.registry',
    'templates': 'twinkle.registry',
    'trackers': 'twinkle.registry',
}

__all__ = [
    'PLUGIN_API',
    'DeviceGroup',
    'DeviceMesh',
    '__version__',
    'advantages',
    'executors',
    'filters',
    'get_device_placement',
    'get_logger',
    'initialize',
    'input_processors',
    'losses',
    'lr_schedulers',
    'metrics',
    'models',
    'optimizers',
    'patches',
    'preprocessors',
    'remote_class',
    'remote_function',
    'rewards',
    'sources',
    'templates',
    'trackers',
]

if TYPE_CHECKING:
    from twinkle.device_mesh import DeviceGroup, DeviceMesh, get_device_placement
    from twinkle.logging import get_logger
    from twinkle.plugins import PLUGIN_API
    from twinkle.registry import (
        advantages,
        executors,
        filters,
        input_processors,
        losses,
        lr_schedulers,
        metrics,
        models,
        optimizers,
        patches,
        preprocessors,
        rewards,
        sources,
        templates,
        trackers,
    )
    from twinkle.remote import remote_class, remote_function
    from twinkle.runtime import initialize


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
