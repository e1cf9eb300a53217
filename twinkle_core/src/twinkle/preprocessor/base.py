"""The bases of preprocessors and filters: what a data set's rows go through before they are encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

__all__ = ['Filter', 'Preprocessor']


class Preprocessor(ABC):
    """Turns one row into another. A plain function is one too."""

    @abstractmethod
    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The new row; `row` itself stays as it is."""


class Filter(ABC):
    """Decides which rows stay. A plain function is one too."""

    @abstractmethod
    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Whether to keep `row`."""
