"""Preprocessors for common layouts of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinkle.errors import ConfigError, DataError
from twinkle.preprocessor.base import Filter, Preprocessor

__all__ = ['AlpacaProcessor', 'HasMessagesFilter', 'SelfCognitionProcessor']


class AlpacaProcessor(Preprocessor):
    """Rows of `instruction`, `input` (may be missing or empty) and `output` become messages. `system` and other columns stay.

    Layout: Taori et al., Stanford Alpaca, 2023.

    Raises:
        DataError: a row without instruction or output, or with one that is no text.
    """

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        missing = [key for key in ('instruction', 'output') if row.get(key) in (None, '')]
        if missing:
            raise DataError(f'AlpacaProcessor: the row has no {" and no ".join(missing)} (columns: {sorted(row)}).')
        for key in ('instruction', 'input', 'output', 'system'):
            if row.get(key) is not None and not isinstance(row[key], str):
                raise DataError(f'AlpacaProcessor: {key} is {type(row[key]).__name__} ({row[key]!r}); it must be text.')
        question = row['instruction'] + (f'\n{row["input"]}' if row.get('input') else '')
        system = [{'role': 'system', 'content': row['system']}] if row.get('system') else []
        rest = {key: value for key, value in row.items() if key not in ('instruction', 'input', 'output', 'system')}
        turns = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': row['output']}]
        return {'messages': [*system, *turns], **rest}


class SelfCognitionProcessor(Preprocessor):
    """Puts a name and an author into rows that teach a model who it is: `{{NAME}}` and `{{AUTHOR}}` in every message.

    Rows have `messages`, or `query` and `response`, from which messages are made.

    Args:
        name, author: what the placeholders become.

    Raises:
        ConfigError: an empty name or author.
        DataError: a row with neither layout.
    """

    def __init__(self, name: str, author: str) -> None:
        if not name or not author:
            raise ConfigError(
                f'SelfCognitionProcessor needs a name and an author, got name={name!r}, author={author!r}.'
            )
        self.name, self.author = name, author

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in row.items() if key not in ('messages', 'query', 'response')}
        if 'messages' in row:
            messages = [dict(message) for message in row['messages']]
        elif 'query' in row and 'response' in row:
            messages = [{'role': 'user', 'content': row['query']}, {'role': 'assistant', 'content': row['response']}]
        else:
            raise DataError(
                f'SelfCognitionProcessor: the row has no messages, and no query and response (columns: {sorted(row)}).'
            )
        for message in messages:
            if isinstance(message.get('content'), str):
                message['content'] = (
                    message['content'].replace('{{NAME}}', self.name).replace('{{AUTHOR}}', self.author)
                )
        return {'messages': messages, **rest}


class HasMessagesFilter(Filter):
    """Keeps rows with at least one message of the assistant that says or calls something."""

    def __call__(self, row: Mapping[str, Any]) -> bool:
        return any(
            message.get('role') == 'assistant' and (message.get('content') or message.get('tool_calls'))
            for message in row.get('messages') or ()
        )
