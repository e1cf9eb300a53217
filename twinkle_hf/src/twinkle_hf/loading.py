"""From `model_cls`, `model_id` and `config` to a Transformers module."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from twinkle import hub
from twinkle.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ['copy_tokenizer_files', 'load_module', 'resolve_class']

# What a tokenizer or a processor consists of, besides code.
_TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'chat_template.jinja',
    'chat_template.json', 'vocab.json', 'vocab.txt', 'merges.txt', 'tokenizer.model', 'spiece.model', 'preprocessor_config.json',
    'processor_config.json', 'video_preprocessor_config.json',
)  # fmt: skip


# Keywords of from_pretrained that a config has an attribute for, too.
_NOT_OF_CONFIG = frozenset(
    {'attn_implementation', 'dtype', 'experts_implementation', 'quantization_config', 'trust_remote_code'}
)


def resolve_class(model_cls: Any, config: PretrainedConfig) -> Any:
    """The class to build: what was given (a class or its name in Transformers), else the config's architecture, else Auto.

    Raises:
        ConfigError: neither a class nor a name that Transformers has.
    """
    if model_cls is None:
        for name in getattr(config, 'architectures', None) or ():
            found = getattr(transformers, name, None)
            if found is not None:
                return found
        return AutoModelForCausalLM
    if isinstance(model_cls, str):
        found = getattr(transformers, model_cls, None)
        if found is None:
            raise ConfigError(
                f'model_cls={model_cls!r}: Transformers {transformers.__version__} has no class of that name. Pass the class itself, '
                "or a name such as 'AutoModelForCausalLM'."
            )
        model_cls = found
    if not (
        hasattr(model_cls, 'from_pretrained')
        and hasattr(model_cls, 'from_config' if _is_auto(model_cls) else '_from_config')
    ):
        raise ConfigError(
            f'model_cls={model_cls!r} must be a Transformers model class, an Auto class, or the name of one.'
        )
    return model_cls


def load_module(
    model_cls: Any,
    model_id: str | Path | None,
    config: PretrainedConfig | None,
    dtype: torch.dtype,
    kwargs: Mapping[str, Any],
    *,
    on_meta: bool = False,
) -> tuple[PreTrainedModel, Path | None]:
    """Load a module from `model_id`, or build one with random weights from `config` alone.

    Args:
        on_meta: build it without weights and without memory for them.

    Returns:
        The module in `dtype`, and the local folder that it came from.

    Raises:
        ConfigError: neither `model_id` nor `config`.
        SourceError: nothing that Transformers can load at `model_id`.
    """
    options = dict(kwargs)
    if config is not None and not isinstance(config, PretrainedConfig):
        raise ConfigError(
            f'config is {type(config).__name__}; pass a transformers PretrainedConfig, such as LlamaConfig(...).'
        )
    if model_id is None:
        if config is None:
            raise ConfigError(
                'Give model_id (a folder, hf://org/name, ...) to load weights, or config for random ones.'
            )
        config = copy.deepcopy(config)
        model_cls = resolve_class(model_cls, config)
        with torch.device('meta') if on_meta else contextlib.nullcontext():
            return _build(model_cls, config, dtype, options), None
    folder = Path(hub.resolve_model(str(model_id), revision=options.pop('revision', None)))
    if not (folder / 'config.json').is_file():
        raise SourceError(
            f'{model_id}: {folder} holds no config.json, so it is no Transformers model. An adapter folder goes to '
            'add_adapter_to_model(name, folder) on its base model.'
        )
    if config is None:
        remote = {'trust_remote_code': options['trust_remote_code']} if 'trust_remote_code' in options else {}
        config = AutoConfig.from_pretrained(folder, **remote)
    else:
        config = copy.deepcopy(config)
    for key in [key for key in options if key not in _NOT_OF_CONFIG and hasattr(config, key)]:
        setattr(config, key, options.pop(key))  # num_labels, say: from_pretrained takes no such key beside a config
    if on_meta:
        kept = {key: value for key, value in options.items() if key in ('attn_implementation', 'trust_remote_code')}
        with torch.device('meta'):
            return _build(resolve_class(model_cls, config), config, dtype, kept), folder
    options.setdefault('use_safetensors', True)  # never a pickled checkpoint
    try:
        module = resolve_class(model_cls, config).from_pretrained(folder, config=config, dtype=dtype, **options)
    except OSError as error:
        raise SourceError(f'{model_id}: Transformers cannot load it from {folder}: {error}') from error
    return module, folder


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Put the tokenizer (chat template included) that came with a model beside weights saved from it."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file() and not (target / name).exists():
            (target / name).write_bytes((source / name).read_bytes())


def _build(model_cls: Any, config: PretrainedConfig, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    build = model_cls.from_config if _is_auto(model_cls) else model_cls._from_config
    return build(config, dtype=dtype, **options)


def _is_auto(model_cls: Any) -> bool:
    return hasattr(model_cls, '_model_mapping')
