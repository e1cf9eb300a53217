"""The base of rewards: what a sampled answer is worth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import DataError

__all__ = ['Reward', 'check_pairs']


class Reward(ABC):
    """Judges completions. A plain function of the same arguments is a reward too."""

    @abstractmethod
    def __call__(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """One number per completion, in their order.

        Args:
            completions: what the model said, as text.
            rows: for each completion the row that was asked, with whatever it has to be judged by.
        """


def check_pairs(name: str, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse anything but texts, each with its row.

    Raises:
        DataError: as many rows as completions are not there, or a completion is no text.
    """
    if isinstance(completions, str) or len(completions) != len(rows):
        given = 'one text' if isinstance(completions, str) else f'{len(completions)} completions'
        raise DataError(
            f'{name}: {given} and {len(rows)} rows; pass a list of completions, and for each the row that it answers.'
        )
    for index, completion in enumerate(completions):
        if not isinstance(completion, str):
            raise DataError(f'{name}: completion {index} is {type(completion).__name__}; it must be text.')
