"""Where models and data sets come from: local paths first, then hubs and other sources by their scheme."""

from twinkle.hub.addresses import cache_folder, fetch, resolve_dataset, resolve_model, split_address
from twinkle.hub.hubs import HuggingFaceSource, ModelScopeSource, is_offline
from twinkle.hub.source import Source

__all__ = [
    'HuggingFaceSource',
    'ModelScopeSource',
    'Source',
    'cache_folder',
    'fetch',
    'is_offline',
    'resolve_dataset',
    'resolve_model',
    'split_address',
]
