"""Which rows come when: a function of seed, epoch and what was consumed, the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ['epoch_order', 'epoch_size', 'global_batches']


def epoch_order(length: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """The order of an epoch's rows. It depends on nothing else, so that ranks agree and a resumed run goes on exactly."""
    order = list(range(length))
    if shuffle:
        random.Random(f'twinkle-{seed}-{epoch}').shuffle(order)
    return order


def epoch_size(length: int, batch_size: int, *, drop_last: bool) -> int:
    """How many rows an epoch consumes."""
    return length - length % batch_size if drop_last else length


def global_batches(order: list[int], batch_size: int, *, drop_last: bool, skip: int = 0) -> Iterator[list[int]]:
    """The batches of an epoch from row `skip` on."""
    end = epoch_size(len(order) - skip, batch_size, drop_last=drop_last) + skip
    for start in range(skip, end, batch_size):
        yield order[start : min(start + batch_size, end)]
