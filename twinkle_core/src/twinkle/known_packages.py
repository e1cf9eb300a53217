"""Parts that are known to live in a package of their own: asking for one that is not installed gives the `pip install` line."""

from __future__ import annotations

__all__ = ['package_of']

_PACKAGES = {
    'models': {
        'transformersmodel': 'twinkle-hf',
        'multiloratransformersmodel': 'twinkle-hf',
        'megatronmodel': 'twinkle-megatron',
        'multiloramegatronmodel': 'twinkle-megatron',
    },
    'executors': {'ray': 'twinkle-ray'},
    'sources': {'smollm2': 'twinkle-smollm2'},
    'trackers': dict.fromkeys(('tensorboard', 'wandb', 'swanlab', 'trackio'), 'twinkle-trackers'),
}


def package_of(kind: str, folded_name: str) -> str | None:
    """The distribution that brings a part, if it is known."""
    return _PACKAGES.get(kind, {}).get(folded_name)
