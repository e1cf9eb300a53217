"""`trainer_state.json`: the few numbers with which a loop goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from twinkle.errors import CheckpointError

__all__ = ['TrainerState', 'read_trainer_state', 'write_trainer_state']

_FILE = 'trainer_state.json'
_VERSION = 1


@dataclass(frozen=True)
class TrainerState:
    """How far a run has come.

    Attributes:
        cur_step: optimizer steps taken.
        consumed_train_samples: rows that the loop has trained on.
        gradient_accumulation_steps: micro-batches per window.
        adapter_name: the adapter that was saved; `''` is the base model.
        extra: whatever else JSON takes.
        format_version: of the file.

    Raises:
        CheckpointError: a value of another type or range.
    """

    cur_step: int = 0
    consumed_train_samples: int = 0
    gradient_accumulation_steps: int = 1
    adapter_name: str = ''
    extra: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = _VERSION

    def __post_init__(self) -> None:
        for name, least in (('cur_step', 0), ('consumed_train_samples', 0), ('gradient_accumulation_steps', 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise CheckpointError(f'TrainerState: {name}={value!r} must be an integer of at least {least}.')
        if not isinstance(self.adapter_name, str):
            raise CheckpointError(f'TrainerState: adapter_name={self.adapter_name!r} must be a string.')
        if not isinstance(self.extra, Mapping):
            raise CheckpointError(f'TrainerState: extra={self.extra!r} must be a dictionary.')
        if self.format_version != _VERSION:
            raise CheckpointError(
                f'TrainerState: format_version={self.format_version!r}; this Twinkle writes {_VERSION}.'
            )


def write_trainer_state(folder: str | Path, state: TrainerState) -> None:
    """Write `state` to `folder/trainer_state.json`.

    Raises:
        CheckpointError: `extra` holds what JSON does not give back as it was.
    """
    content = {**asdict(state), 'extra': dict(state.extra)}
    try:
        text = json.dumps(content, indent=2, allow_nan=False)
        exact = json.loads(text) == content
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f'TrainerState: extra cannot be written as JSON: {error}.') from error
    if not exact:
        raise CheckpointError(
            'TrainerState: extra holds tuples or keys that are not strings; JSON would change them. Use lists.'
        )
    Path(folder, _FILE).write_text(text + '\n', encoding='utf-8')


def read_trainer_state(folder: str | Path) -> TrainerState:
    """The `TrainerState` of a checkpoint.

    Raises:
        CheckpointError: there is none, it is broken, of a newer format, or another tool's file of the same name.
    """
    path = Path(folder, _FILE)
    try:
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f'{_FILE} is missing in {folder}: it holds weights alone, which load() takes.') from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f'{path} cannot be read: {error}. The checkpoint is broken; use another.') from error
    version = content.get('format_version') if isinstance(content, dict) else None
    if type(version) is not int:
        raise CheckpointError(
            f'{path} has no format_version: another tool wrote it, or it is broken. load() takes weights alone.'
        )
    if version > _VERSION:
        raise CheckpointError(
            f'{path} has format_version {version}; this Twinkle knows up to {_VERSION}. Upgrade twinkle-core.'
        )
    expected = {f.name for f in fields(TrainerState)}
    missing, unexpected = sorted(expected - content.keys()), sorted(content.keys() - expected)
    if missing or unexpected:
        raise CheckpointError(
            f'{path} does not fit: missing {missing or "nothing"}, unexpected {unexpected or "nothing"}.'
        )
    return TrainerState(**content)
