"""Preprocessors and filters of rows; names are in the registries `preprocessors` and `filters`."""

from twinkle.preprocessor.base import Filter, Preprocessor
from twinkle.preprocessor.processors import AlpacaProcessor, HasMessagesFilter, SelfCognitionProcessor

__all__ = ['AlpacaProcessor', 'Filter', 'HasMessagesFilter', 'Preprocessor', 'SelfCognitionProcessor']
