"""One checkpoint of several processes: all fill it, the first one commits it, and none commits what another could not write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from twinkle.checkpoint.commit import commit_checkpoint
from twinkle.errors import CheckpointError
from twinkle.launcher import rank, world_size

__all__ = ['agree', 'commit_together']


@contextmanager
def commit_together(output_dir: str | Path, name: str, *, keep_last: int | None = None) -> Iterator[Path]:
    """`commit_checkpoint`, entered by every rank at once; all are given the folder to fill, which they must be able to see.

    One process alone does what `commit_checkpoint` does.

    Raises:
        CheckpointError: another rank failed, with its number and its error. Nothing has been committed then.
    """
    if world_size() == 1:
        with commit_checkpoint(output_dir, name, keep_last=keep_last) as folder:
            yield folder
        return
    stack, failure, text = ExitStack(), None, ''
    if rank() == 0:
        try:
            text = str(stack.enter_context(commit_checkpoint(output_dir, name, keep_last=keep_last)))
        except Exception as error:
            failure = error
    folder_name = _from_first(text)
    agree(failure, 'begin the checkpoint')
    failure, written = None, False
    try:
        with stack:  # on rank 0, leaving it commits
            try:
                yield Path(folder_name)
            except Exception as error:
                failure = error
            agree(failure, 'write the checkpoint')
            written = True
    except Exception as error:
        if not written:
            raise
        failure = error
    agree(failure, 'commit the checkpoint')


def agree(error: BaseException | None, what: str) -> None:
    """Raise on every rank if any has an error: its own on the rank that has one, and one that names it on the others.

    A collective: every rank calls it as often as every other. One process alone raises what it is given.

    Raises:
        CheckpointError: another rank could not do `what`.
    """
    if world_size() == 1:
        if error is not None:
            raise error
        return
    import torch.distributed as dist

    texts: list[Any] = [None] * world_size()
    dist.all_gather_object(texts, None if error is None else f'{type(error).__name__}: {error}')
    if error is not None:
        raise error
    for index, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(f'Rank {index} could not {what}: {text}')


def _from_first(value: str) -> str:
    import torch.distributed as dist

    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0)
    return str(values[0])
