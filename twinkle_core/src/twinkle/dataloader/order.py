"""Which rows come when: a function of seed, epoch and what was consumed, the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ['epoch_order', 'epoch_size', 'global_batches', 'resume_point']


def epoch_order(length: int, *, shuffle: bool, seed: int, epoch: int, together: int = 1) -> list[int]:
    """The order of an epoch's rows. It depends on nothing else, so that ranks agree and a resumed run goes on exactly.

    `together` rows that follow each other keep their places in a group, and groups are shuffled.
    """
    groups = list(range(length // together))
    if shuffle:
        random.Random(f'twinkle-{seed}-{epoch}').shuffle(groups)
    return [group * together + place for group in groups for place in range(together)]


def epoch_size(length: int, batch_size: int, *, drop_last: bool) -> int:
    """How many rows an epoch consumes."""
    return length - length % batch_size if drop_last else length


def resume_point(consumed: int, length: int, batch_size: int, *, drop_last: bool) -> tuple[int, int]:
    """The epoch, and the rows of it that are over, after `consumed` rows. There is at least one batch behind it."""
    size = epoch_size(length, batch_size, drop_last=drop_last)
    epoch, skip = divmod(consumed, size)
    if drop_last and size - skip < batch_size:
        return epoch + 1, 0
    return epoch, skip


def global_batches(order: list[int], batch_size: int, *, drop_last: bool, skip: int = 0) -> Iterator[list[int]]:
    """The batches of an epoch from row `skip` on."""
    end = epoch_size(len(order), batch_size, drop_last=drop_last)
    for start in range(skip, end, batch_size):
        batch = order[start : min(start + batch_size, end)]
        if drop_last and len(batch) < batch_size:
            return
        yield batch
