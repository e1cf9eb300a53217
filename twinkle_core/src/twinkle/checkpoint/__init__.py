"""Checkpoints on disk: written aside and renamed, verified when found, and never unpickled.

Nothing here knows of models. `commit` publishes a folder that somebody filled, `find` gives one back, `states` keeps
nested training state in safetensors and JSON, `trainer` the few numbers of the loop, `rng` the random generators, and
`background` does the writing in a thread.
"""

from __future__ import annotations

from twinkle.checkpoint.background import PendingSave, save_async, wait_for_saves
from twinkle.checkpoint.commit import check_target, commit_checkpoint
from twinkle.checkpoint.find import find_checkpoint, latest_checkpoint
from twinkle.checkpoint.names import checkpoint_path
from twinkle.checkpoint.rng import rng_state, set_rng_state
from twinkle.checkpoint.states import StateSnapshot, load_state, save_state, snapshot_state
from twinkle.checkpoint.trainer import TrainerState, read_trainer_state, write_trainer_state

__all__ = [
    'PendingSave',
    'StateSnapshot',
    'TrainerState',
    'check_target',
    'checkpoint_path',
    'commit_checkpoint',
    'find_checkpoint',
    'latest_checkpoint',
    'load_state',
    'read_trainer_state',
    'rng_state',
    'save_async',
    'save_state',
    'set_rng_state',
    'snapshot_state',
    'wait_for_saves',
    'write_trainer_state',
]
