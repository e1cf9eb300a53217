"""This process's random generators: Python's, numpy's if it is loaded, torch's on the CPU and on the accelerator."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from twinkle.errors import CheckpointError
from twinkle.logging import get_logger

__all__ = ['rng_state', 'set_rng_state']

logger = get_logger('twinkle.checkpoint')


def rng_state() -> dict[str, Any]:
    """The generators' states, as something that `save_state` takes."""
    state: dict[str, Any] = {'python': random.getstate(), 'torch': torch.get_rng_state()}
    if 'numpy' in sys.modules:
        state['numpy'] = _plain(sys.modules['numpy'].random.get_state(legacy=False))
    device = _accelerator()
    # A device that was not used yet has drawn no random numbers, and asking it would claim memory on it.
    if device is not None and torch.get_device_module(device).is_initialized():
        state[device] = torch.get_device_module(device).get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Set the generators to what `rng_state` gave.

    Raises:
        CheckpointError: `state` is not such a state. No generator has changed then.
    """
    before = rng_state()
    try:
        _set(state)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        _set(before)
        raise CheckpointError(f'This is not the state of random generators: {error!r}.') from error


def _set(state: dict[str, Any]) -> None:
    random.setstate(state['python'])
    torch.set_rng_state(state['torch'])
    if 'numpy' in state:
        import numpy

        numpy.random.set_state(state['numpy'])
    for name in state.keys() - {'python', 'torch', 'numpy'}:
        _set_devices(name, state[name])


def _set_devices(name: str, states: list[torch.Tensor]) -> None:
    if name != _accelerator():
        logger.warning(
            'The random state of %s cannot be restored on this machine; dropout and sampling will differ.', name
        )
        return
    module = torch.get_device_module(name)
    here = module.device_count()
    if here != len(states):
        logger.warning(
            'Random states of %d %s devices were saved and %d are here; the first ones are set.',
            len(states),
            name,
            here,
        )
    for index, one in enumerate(states[:here]):
        module.set_rng_state(one, index)


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or not hasattr(torch.get_device_module(device.type), 'get_rng_state_all'):
        return None
    return device.type


def _plain(value: Any) -> Any:
    """numpy's state with lists for arrays."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, 'tolist') else value
