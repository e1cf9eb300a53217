"""The cookbook's scripts as modules, and a tiny model for them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.helpers.models import tiny_llama_dir
from tests.helpers.tokenizers import tiny_tokenizer

COOKBOOK = Path(__file__).parents[2] / 'cookbook'


def load_script(name: str) -> ModuleType:
    """cookbook/<name>.py as a module."""
    spec = importlib.util.spec_from_file_location(f'cookbook_{name}', COOKBOOK / f'{name}.py')
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_chat_dir(folder: Path) -> str:
    """A random model of two layers with a tokenizer and a chat template."""
    tokenizer = tiny_tokenizer()
    path = tiny_llama_dir(folder, vocab=len(tokenizer))
    tokenizer.save_pretrained(path)
    return path


def logged(folder: Path, key: str = 'loss') -> list[dict[str, Any]]:
    """The lines of a run's log that hold `key`."""
    lines = (folder / 'metrics.jsonl').read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if key in entry]
