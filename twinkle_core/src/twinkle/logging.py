"""Logging and progress bars: the standard `logging` under the name `twinkle`, with the rank in every message.

Nothing here installs a handler: what is shown, and where, is the application's choice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

from twinkle.launcher import rank, world_size

__all__ = ['get_logger', 'progress', 'rank_zero']

T = TypeVar('T')


def rank_zero() -> bool:
    """Whether this process speaks for all."""
    return rank() == 0


class _RankAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Puts the rank before a message where there are several ranks."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return (f'[rank {rank()}] {msg}' if world_size() > 1 else msg), kwargs


def get_logger(name: str = 'twinkle') -> logging.LoggerAdapter[logging.Logger]:
    """The logger of that name, under `twinkle`."""
    if name != 'twinkle' and not name.startswith(('twinkle.', 'twinkle_')):
        name = f'twinkle.{name}'
    return _RankAdapter(logging.getLogger(name), {})


def progress(iterable: Iterable[T], *, desc: str, total: int | None = None, unit: str = 'it') -> Iterator[T]:
    """Iterate with a progress bar, on rank 0 only. `TWINKLE_PROGRESS=0` turns bars off."""
    from tqdm.auto import tqdm

    disable = not rank_zero() or os.environ.get('TWINKLE_PROGRESS', '1') == '0'
    yield from tqdm(iterable, desc=desc, total=total, unit=unit, disable=disable)
