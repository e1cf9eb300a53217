"""GGUF to a Transformers folder: once, by one process at a time, all or nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from filelock import FileLock

from twinkle.logging import get_logger

__all__ = ['converted']

logger = get_logger('twinkle_smollm2')

_COMPLETE = 'conversion.json'
_VERSION = '{"format": 1}\n'


def converted(gguf: Path, target: Path) -> Path:
    """`target`, with the model of `gguf` in it. Other processes that ask meanwhile wait, and convert nothing."""
    if _is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f'{target}.lock'):
        if not _is_complete(target):
            logger.info('Converting %s to safetensors, once (about half a minute) ...', gguf.name)
            _convert_into(gguf, target)
    return target


def _is_complete(folder: Path) -> bool:
    marker = folder / _COMPLETE
    return marker.is_file() and marker.read_text() == _VERSION


def _convert_into(gguf: Path, target: Path) -> None:
    """Convert next to `target`, then rename. What an interrupted conversion left is cleared first (the lock is held)."""
    for leftover in target.parent.glob(f'.{target.name}.*'):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = target.parent / f'.{target.name}.{os.getpid()}'
    try:
        _convert(gguf, partial)
        (partial / _COMPLETE).write_text(_VERSION)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain fp32 now, but the module still says that it is quantised, and would refuse to be saved.
    for name in ('hf_quantizer', 'quantization_method'):
        model.__dict__.pop(name, None)
    model.is_quantized = False  # type: ignore[assignment]
    model.config.__dict__.pop('quantization_config', None)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
