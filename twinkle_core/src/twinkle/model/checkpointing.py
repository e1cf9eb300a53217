"""What of a `TrainState` is kept in a checkpoint, and how it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle import checkpoint as store
from twinkle.errors import CheckpointError, StateError
from twinkle.plugins import call_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinkle.model.state import TrainState

__all__ = ['find', 'resume', 'save']

_OPTIMIZER, _RNG = 'training_state', 'rng_state'


def find(checkpoint: str | Path) -> Path:
    """The folder to read: a checkpoint, or the latest one of an output folder."""
    return store.find_checkpoint(Path(checkpoint), require_manifest=False)


def save(
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
        writer: given whether a snapshot is needed, gives what writes the weights into a folder.
    """
    if save_optimizer and state.window.is_partial:
        raise StateError(
            f'Training state cannot be saved in the middle of an accumulation window ({state.window.micro_batches} of '
            f'{state.window.length} micro-batches done): gradients are not part of a checkpoint. Save after '
            'clip_grad_and_step() at a boundary, close the window with clip_grad_and_step(flush=True), or save weights only.'
        )
    step = state.step
    name = f'checkpoint-{step}' if name is None else name
    path = store.check_target(output_dir, name, keep_last)
    if async_save:
        store.wait_for_saves(output_dir)  # before the snapshot: two of them would be held at once
    trainer = store.TrainerState(
        cur_step=step,
        consumed_train_samples=consumed_train_samples,
        gradient_accumulation_steps=state.window.length,
        adapter_name=state.adapter_name,
    )
    kept: dict[str, Any] = {_OPTIMIZER: _training_state(state), _RNG: store.rng_state()} if save_optimizer else {}
    if async_save:
        kept = {stem: store.snapshot_state(part) for stem, part in kept.items()}
    write_weights = writer(async_save)

    def write(folder: Path) -> None:
        write_weights(folder)
        store.write_trainer_state(folder, trainer)
        for stem, part in kept.items():
            part.save(folder, stem) if async_save else store.save_state(folder, stem, part)

    def tell(path: Path) -> None:
        call_hook('checkpoint_saved', path=str(path), step=step)

    if async_save:
        store.save_async(write, output_dir, name, keep_last=keep_last, then=tell)
    else:
        with store.commit_checkpoint(output_dir, name, keep_last=keep_last) as folder:
            write(folder)
        tell(path)
    return str(path)


def resume(
    state: TrainState, import_weights: Callable[[Path, str], None], checkpoint: str | Path, *, resume_only_model: bool
) -> dict[str, int]:
    """Load weights, then training state; everything is read and checked before anything is changed."""
    folder = store.find_checkpoint(Path(checkpoint))
    trainer = store.read_trainer_state(folder)
    kept: dict[str, Any] | None = None
    rng: Any = None
    if not resume_only_model:
        kept, rng = store.load_state(folder, _OPTIMIZER), store.load_state(folder, _RNG)
        _check_fits(state, kept, folder)
    import_weights(folder, state.adapter_name)
    if kept is not None:
        _restore(state, kept)
        store.set_rng_state(rng)
    if not resume_only_model:
        state.step = trainer.cur_step
    state.window = state.window.next()
    state.window.govern(trainer.gradient_accumulation_steps)
    state.pending = None
    return {
        'cur_step': trainer.cur_step,
        'consumed_train_samples': trainer.consumed_train_samples,
        'gradient_accumulation_steps': trainer.gradient_accumulation_steps,
    }


def _training_state(state: TrainState) -> dict[str, Any]:
    parts = {'optimizer': state.optimizer, 'lr_scheduler': state.lr_scheduler, 'scaler': state.scaler}
    kept: dict[str, Any] = {name: part.state_dict() for name, part in parts.items() if part is not None}
    kept['skipped_steps'] = state.skipped_steps
    kept['schedule_due'] = state.schedule_due
    return kept


def _check_fits(state: TrainState, kept: dict[str, Any], folder: Path) -> None:
    for name, part in (('optimizer', state.optimizer), ('lr_scheduler', state.lr_scheduler), ('scaler', state.scaler)):
        if (part is None) == (name in kept):
            has, lacks = ('the checkpoint', 'the model') if part is None else ('the model', 'the checkpoint')
            raise CheckpointError(
                f'{folder}: {has} has a state of the {name}, {lacks} has not. Set up the model as it was when it was saved '
                f'(set_optimizer, set_lr_scheduler, mixed_precision), or pass resume_only_model=True.'
            )
    if state.optimizer is not None:
        saved = [len(group['params']) for group in kept['optimizer']['param_groups']]
        here = [len(group['params']) for group in state.optimizer.param_groups]
        if saved != here:
            raise CheckpointError(
                f'{folder}: the optimizer was saved with {saved} parameters per group and this one has {here}. It belongs to '
                'another model, adapter or optimizer; pass resume_only_model=True to take the weights alone.'
            )


def _restore(state: TrainState, kept: dict[str, Any]) -> None:
    for name in ('optimizer', 'lr_scheduler', 'scaler'):
        if name in kept:
            getattr(state, name).load_state_dict(kept[name])
    for parameter in (
        p for group in (state.optimizer.param_groups if state.optimizer else []) for p in group['params']
    ):
        parameter.grad = None
    state.skipped_steps = kept['skipped_steps']
    state.schedule_due = kept['schedule_due']
