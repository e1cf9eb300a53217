"""GGUF to a Transformers folder: once, by one process at a time, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from twinkle.logging import get_logger, progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ['converted', 'is_complete']

logger = get_logger('twinkle_smollm2')

# Written last; names every file of the folder with its size. A change of what is written here needs another number.
MARKER = 'conversion.json'
FORMAT = 2


def converted(gguf: Path, target: Path) -> Path:
    """`target`, with the model of `gguf` in it. Other processes that ask meanwhile wait, and convert nothing."""
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f'{target}.lock'):
        if not is_complete(target):
            logger.info('Converting %s to safetensors in %s, once (about half a minute).', gguf.name, target)
            _convert_into(gguf, target)
    return target


def is_complete(folder: Path) -> bool:
    """Whether all that a finished conversion has written is there, whole. What else is there does not matter."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return bool(marker['format'] == FORMAT and marker['files'].items() <= _sizes(folder).items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def _convert_into(gguf: Path, target: Path) -> None:
    """Convert next to `target`, then rename. What an interrupted conversion left is cleared first (the lock is held)."""
    for leftover in target.parent.glob(f'.{target.name}.*'):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = target.parent / f'.{target.name}.{os.getpid()}'
    try:
        partial.mkdir()
        _convert(gguf, partial)
        (partial / MARKER).write_text(json.dumps({'format': FORMAT, 'files': _sizes(partial)}, indent=1) + '\n')
        if target.exists():  # half of an older one
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model in fp32 and its tokenizer, with a bar: it takes half a minute."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {
        'pretrained_model_name_or_path': str(gguf.parent),
        'gguf_file': gguf.name,
        'local_files_only': True,
    }
    parts: dict[str, Any] = {}

    def read_tokenizer() -> None:
        parts['tokenizer'] = AutoTokenizer.from_pretrained(**where)

    def read_model() -> None:
        parts['model'] = AutoModelForCausalLM.from_pretrained(**where, dtype='float32')

    def write() -> None:
        _save(parts['model'], parts['tokenizer'], folder)

    steps: list[Callable[[], None]] = [read_tokenizer, read_model, write]
    for step in progress(steps, desc=f'Converting {gguf.name} to safetensors, once', unit='step'):
        step()


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    # The weights are plain fp32 now, but the module still says that it is quantised, and would refuse to be saved.
    for name in ('hf_quantizer', 'quantization_method'):
        model.__dict__.pop(name, None)
    model.is_quantized = False  # type: ignore[assignment]
    model.config.__dict__.pop('quantization_config', None)
    # Generation takes these from here: without a pad token it would warn and guess.
    assert model.generation_config is not None
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
