"""What of a `TrainState` is kept in a checkpoint, and how it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from twinkle import checkpoint as store
from twinkle.checkpoint.together import agree, commit_together
from twinkle.errors import CheckpointError, NotSupportedError, StateError
from twinkle.launcher import rank, world_size
from twinkle.logging import get_logger
from twinkle.model.optimizer_state import arranged, check_optimizer, load_named_state, named_state, parameter_names
from twinkle.plugins import call_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.nn import Parameter

    from twinkle.model.state import TrainState

__all__ = ['Checkpointed', 'find', 'resume', 'save']

logger = get_logger('twinkle.model')

_OPTIMIZER, _RNG = 'training_state', 'rng_state'


class Checkpointed(Protocol):
    """What a checkpoint needs to know of a backend. Every rank calls these as often as every other."""

    def _named_trainable(self, adapter_name: str) -> Iterable[tuple[str, Parameter]]:
        """Names and parameters that the adapter trains."""

    def _import_weights(self, folder: Path, adapter_name: str) -> None:
        """Read weights; missing or unexpected keys raise before anything is changed."""

    def _save_training_state(self, folder: Path, stem: str, kept: dict[str, Any]) -> None:
        """Write what the optimizer, the schedule and the scaler keep."""

    def _load_training_state(self, folder: Path, stem: str, adapter_name: str) -> dict[str, Any]:
        """Read it again."""

    def _rng_state(self, adapter_name: str) -> Any:
        """The random state that goes with it."""

    def _set_rng_state(self, adapter_name: str, state: Any) -> None:
        """Set it again."""


def find(checkpoint: str | Path) -> Path:
    """The folder to read: a checkpoint, or the latest one of an output folder."""
    return store.find_checkpoint(Path(checkpoint), require_manifest=False)


def save(
    model: Checkpointed,
    state: TrainState,
    writer: Callable[[bool], Callable[[Path], None]],
    name: str | None,
    output_dir: str | Path,
    *,
    save_optimizer: bool,
    consumed_train_samples: int,
    keep_last: int | None,
    async_save: bool,
) -> str:
    """Write one checkpoint; whatever goes wrong, an older one stays as it was.

    Args:
        writer: given whether a snapshot is needed, gives what writes the weights into a folder. Every rank calls it, the first one
            writes.
    """
    if save_optimizer and state.window.is_partial:
        raise StateError(
            f'Training state cannot be saved in the middle of an accumulation window ({state.window.micro_batches} of '
            f'{state.window.length} micro-batches done): gradients are not part of a checkpoint. Save after '
            'clip_grad_and_step() at a boundary, close the window with clip_grad_and_step(flush=True), or save weights only.'
        )
    if save_optimizer and async_save and world_size() > 1:
        raise NotSupportedError(
            'save(save_optimizer=True, async_save=True) is for one process: each rank writes its part of the training state at once. '
            'Leave async_save out, or save_optimizer.'
        )
    step = state.step
    name = f'checkpoint-{step}' if name is None else name
    path = store.checkpoint_path(Path(output_dir), name)
    _check_target(output_dir, name, keep_last, async_save=async_save)
    trainer = store.TrainerState(
        cur_step=step,
        consumed_train_samples=consumed_train_samples,
        gradient_accumulation_steps=state.window.length,
        adapter_name=state.adapter_name,
    )
    write_weights = writer(async_save)

    def write(folder: Path) -> None:
        write_weights(folder)
        store.write_trainer_state(folder, trainer)

    def tell(path: Path) -> None:
        call_hook('checkpoint_saved', path=str(path), step=step)

    if async_save:
        snapshots = _snapshots(model, state) if save_optimizer else {}

        def write_all(folder: Path) -> None:
            write(folder)
            for stem, snapshot in snapshots.items():
                snapshot.save(folder, stem)

        if rank() == 0:
            store.save_async(write_all, output_dir, name, keep_last=keep_last, then=tell)
        return str(path)
    with commit_together(output_dir, name, keep_last=keep_last) as folder:
        if rank() == 0:
            write(folder)
        if save_optimizer:
            model._save_training_state(folder, _OPTIMIZER, _training_state(model, state))
            store.save_state(folder, _rng_stem(rank()), model._rng_state(state.adapter_name))
    if rank() == 0:
        tell(path)
    return str(path)


def _check_target(output_dir: str | Path, name: str, keep_last: int | None, *, async_save: bool) -> None:
    failure = None
    if rank() == 0:
        try:
            store.check_target(output_dir, name, keep_last)
            if async_save:
                store.wait_for_saves(output_dir)  # before the snapshot: two of them would be held at once
        except Exception as error:
            failure = error
    agree(failure, 'begin the checkpoint')


def resume(
    model: Checkpointed, state: TrainState, checkpoint: str | Path, *, resume_only_model: bool
) -> dict[str, int]:
    """Load weights, then training state; everything is read and checked before anything is changed."""
    folder = store.find_checkpoint(Path(checkpoint))
    trainer = store.read_trainer_state(folder)
    kept: dict[str, Any] | None = None
    rng: Any = None
    if not resume_only_model:
        kept, rng = model._load_training_state(folder, _OPTIMIZER, state.adapter_name), _read_rng(folder)
        _check_fits(model, state, kept, folder)
    model._import_weights(folder, state.adapter_name)
    if kept is not None:
        _restore(model, state, kept)
        if rng is not None:
            model._set_rng_state(state.adapter_name, rng)
        state.step = trainer.cur_step
    state.window = state.window.next()
    state.window.govern(trainer.gradient_accumulation_steps)
    state.pending = None
    return {
        'cur_step': trainer.cur_step,
        'consumed_train_samples': trainer.consumed_train_samples,
        'gradient_accumulation_steps': trainer.gradient_accumulation_steps,
    }


def _rng_stem(index: int) -> str:
    return _RNG if index == 0 else f'{_RNG}_{index}'


def _read_rng(folder: Path) -> Any:
    """This rank's random state; None for a rank that there was not when the checkpoint was saved."""
    stem = _rng_stem(rank())
    if rank() > 0 and not (folder / f'{stem}.json').exists():
        logger.warning('%s has no random state of rank %d: its dropout differs from here on.', folder, rank())
        return None
    return store.load_state(folder, stem)


def _training_state(model: Checkpointed, state: TrainState) -> dict[str, Any]:
    kept: dict[str, Any] = {'skipped_steps': state.skipped_steps, 'schedule_due': state.schedule_due}
    if state.optimizer is not None:
        kept['optimizer'] = named_state(state.optimizer, _names(model, state))
    for name, part in (('lr_scheduler', state.lr_scheduler), ('scaler', state.scaler)):
        if part is not None:
            kept[name] = part.state_dict()
    return kept


def _snapshots(model: Checkpointed, state: TrainState) -> dict[str, store.StateSnapshot]:
    return {
        _OPTIMIZER: store.snapshot_state(_training_state(model, state)),
        _RNG: store.snapshot_state(model._rng_state(state.adapter_name)),
    }


def _names(model: Checkpointed, state: TrainState) -> list[list[str]]:
    return parameter_names(state.optimizer, model._named_trainable(state.adapter_name))


def _check_fits(model: Checkpointed, state: TrainState, kept: dict[str, Any], folder: Path) -> None:
    for name, part in (('optimizer', state.optimizer), ('lr_scheduler', state.lr_scheduler), ('scaler', state.scaler)):
        if (part is None) == (name in kept):
            has, lacks = ('the checkpoint', 'the model') if part is None else ('the model', 'the checkpoint')
            raise CheckpointError(
                f'{folder}: {has} has a state of the {name}, {lacks} has not. Set up the model as it was when it was saved '
                f'(set_optimizer, set_lr_scheduler, mixed_precision), or pass resume_only_model=True.'
            )
    if state.optimizer is not None:
        check_optimizer(kept['optimizer'], _names(model, state), folder)


def _restore(model: Checkpointed, state: TrainState, kept: dict[str, Any]) -> None:
    if state.optimizer is not None:
        load_named_state(state.optimizer, _names(model, state), kept['optimizer'])
        for group in state.optimizer.param_groups:
            for parameter in group['params']:
                parameter.grad = None
    if 'lr_scheduler' in kept:
        names = _names(model, state)
        state.lr_scheduler.load_state_dict(arranged(kept['lr_scheduler'], names, kept['optimizer']))
    if 'scaler' in kept:
        state.scaler.load_state_dict(kept['scaler'])
    state.skipped_steps = kept['skipped_steps']
    state.schedule_due = kept['schedule_due']
