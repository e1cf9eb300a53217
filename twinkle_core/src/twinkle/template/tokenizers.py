"""Loading a tokenizer and giving it a pad token that its vocabulary already has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from twinkle.errors import ConfigError, MissingPackageError, SourceError, UntrustedCodeError

__all__ = ['fit_tokenizer', 'load_tokenizer', 'read_chat_template']

# Tokens that vocabularies reserve for padding, or reserve for whatever comes; the first that exists is taken.
_PAD_NAMES = ('<|finetune_right_pad_id|>', '<|pad|>', '<pad>', '[PAD]', '<|padding|>', '<|PAD|>', '<\uff5c▁pad▁\uff5c>')
_RESERVED_PREFIXES = (
    '<|reserved_special_token',
    '<|reserved',
    '<unused',
    '[unused',
    '<reserved',
    '<SPECIAL_',
    '<extra_id_',
)


def load_tokenizer(model_id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder, or of any model id that `twinkle.hub` can resolve.

    Raises:
        MissingPackageError: transformers is not installed.
        SourceError: nothing is found there, or it holds no tokenizer.
        ConfigError: a revision of a local folder.
        UntrustedCodeError: the tokenizer needs code of its own, and `trust_remote_code` is off.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingPackageError("Templates need transformers: pip install 'twinkle-core[text]'") from error
    from twinkle.hub import resolve_model

    path = resolve_model(model_id, revision=revision)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        # transformers has no error of its own for this; its message names the argument.
        if 'trust_remote_code' in str(error) and not trust_remote_code:
            raise UntrustedCodeError(
                f'The tokenizer of {model_id!r} brings its own code. Read it, then pass trust_remote_code=True.'
            ) from error
        raise SourceError(
            f'No tokenizer could be loaded from {model_id!r} (looked in {path!r}): {error}. It must be a folder with '
            'tokenizer files, or a model id that has them.'
        ) from error


def fit_tokenizer(tokenizer: Any, *, chat_template: str | None, owned: bool) -> Any:
    """`tokenizer` with a pad token and, where given, another chat template; copied before a change if it is not ours.

    Raises:
        ConfigError: no token of the vocabulary can pad.
    """
    needs_pad = _id_of(tokenizer, tokenizer.pad_token) is None
    if not needs_pad and chat_template is None:
        return tokenizer
    if not owned:
        tokenizer = copy.deepcopy(tokenizer)
    if needs_pad:
        tokenizer.pad_token = _find_pad_token(tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _find_pad_token(tokenizer: Any) -> str:
    """A token that can pad: one made for it, else the end token (pads are never trained on), else a reserved one."""
    for name in _PAD_NAMES:
        if _id_of(tokenizer, name) is not None:
            return name
    if _id_of(tokenizer, tokenizer.eos_token) is not None:
        return str(tokenizer.eos_token)
    vocabulary = tokenizer.get_vocab()
    for prefix in _RESERVED_PREFIXES:
        reserved = min(
            (token for token in vocabulary if token.startswith(prefix)), key=vocabulary.__getitem__, default=None
        )
        if reserved is not None:
            return str(reserved)
    if _id_of(tokenizer, tokenizer.unk_token) is not None:
        return str(tokenizer.unk_token)
    raise ConfigError(
        'The tokenizer has no pad token, no end token, and no reserved or unknown token that could stand in. Set '
        'tokenizer.pad_token to a token of its vocabulary and pass the tokenizer; the vocabulary is never grown here.'
    )


def _id_of(tokenizer: Any, token: Any) -> int | None:
    """The id of `token` if it is truly in the vocabulary (the id of an unknown token would be the unknown one's)."""
    if token is None:
        return None
    token = str(token)
    index = tokenizer.convert_tokens_to_ids(token)
    if index is None or tokenizer.convert_ids_to_tokens(index) != token:
        return None
    return int(index)


def read_chat_template(chat_template: str | None) -> str | None:
    """`chat_template` itself, or what the file of that name holds.

    Raises:
        ConfigError: not text, or a file that is not there.
    """
    if chat_template is None:
        return None
    if not isinstance(chat_template, (str, Path)):
        raise ConfigError(
            f'chat_template is {type(chat_template).__name__}; it must be Jinja text or the path of a file.'
        )
    text = str(chat_template)
    if '\n' not in text and '{' not in text:
        if not Path(text).is_file():
            raise ConfigError(f'chat_template={text!r} is neither Jinja text nor a file that exists.')
        return Path(text).read_text(encoding='utf-8')
    return text
