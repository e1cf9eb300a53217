"""Reasoning in a conversation: left to the chat template, stripped from history, or kept in every turn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import DataError
from twinkle.template.rendering import ChatRenderer

__all__ = [
    'INLINE_REASONING',
    'REASONING_CHOICES',
    'keep_reasoning',
    'note_lost_reasoning',
    'strip_all_reasoning',
    'strip_reasoning',
]

REASONING_CHOICES = ('template', 'strip', 'keep')

INLINE_REASONING = re.compile(r'\A\s*(?:<think>)?(.*?)</think>\s*(.*)\Z', re.DOTALL)
"""Reasoning written into the content: group 1 is the reasoning, group 2 the answer."""

_DEFAULT_WRAP = ('<think>\n', '\n</think>\n\n')


def _split(message: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The reasoning of a turn and its content without it, or None where there is no reasoning."""
    reasoning, content = message.get('reasoning_content'), message.get('content')
    if isinstance(reasoning, str) and reasoning:
        return reasoning, content
    if message['role'] == 'assistant' and isinstance(content, str) and '</think>' in content:
        found = INLINE_REASONING.match(content)
        if found:
            return found.group(1).strip('\n'), found.group(2)
    return None


def strip_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation without the reasoning of earlier rounds; what follows the last user message keeps its own."""
    last = max((index for index, message in enumerate(messages) if message['role'] == 'user'), default=-1)
    return [
        _without(message) if message['role'] == 'assistant' and index < last else message
        for index, message in enumerate(messages)
    ]


def strip_all_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation without any reasoning."""
    return [_without(message) if message['role'] == 'assistant' else message for message in messages]


def _without(message: dict[str, Any]) -> dict[str, Any]:
    parts = _split(message)
    if parts is None:
        return message
    plain = {key: value for key, value in message.items() if key != 'reasoning_content'}
    return {**plain, 'content': parts[1]}


def keep_reasoning(
    renderer: ChatRenderer, messages: list[dict[str, Any]], tools: Sequence[Any] | None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The conversation with a placeholder where the template would drop reasoning, and what each of them stands for."""
    parts = {index: _split(message) for index, message in enumerate(messages)}
    reasoned = {index: part for index, part in parts.items() if part is not None}
    if not reasoned:
        return messages, {}
    split = [
        {**message, 'reasoning_content': reasoned[index][0], 'content': reasoned[index][1]}
        if index in reasoned
        else message
        for index, message in enumerate(messages)
    ]
    probe = [
        {**message, 'reasoning_content': f'qzreason{index}zq'} if index in reasoned else message
        for index, message in enumerate(split)
    ]
    text = renderer.render(probe, tools)
    kept, placeholders = [], {}
    for index, message in enumerate(split):
        if index in reasoned and f'qzreason{index}zq' not in text:
            before, after = _wrap(renderer, tools)
            placeholder = f'qzkept{index}zq'
            meant, content = before + reasoned[index][0].strip('\n') + after, message.get('content')
            message = {key: value for key, value in message.items() if key != 'reasoning_content'}
            if isinstance(content, list):
                message['content'] = [{'type': 'text', 'text': placeholder}, *content]
            elif content and '</think>' in content:  # the template would strip that, and the placeholder with it
                message['content'], meant = placeholder, meant + content.lstrip('\n')
            else:
                message['content'] = placeholder + (content or '').lstrip('\n')
            placeholders[placeholder] = meant
        kept.append(message)
    return kept, placeholders


def _wrap(renderer: ChatRenderer, tools: Sequence[Any] | None) -> tuple[str, str]:
    """What the chat template writes around the reasoning of a last turn; `<think>` tags where it knows none."""
    key = ('reasoning_wrap', bool(tools))
    if key not in renderer.cache:
        renderer.cache[key] = _find_wrap(renderer, tools)
    wrap: tuple[str, str] = renderer.cache[key]
    return wrap


def _find_wrap(renderer: ChatRenderer, tools: Sequence[Any] | None) -> tuple[str, str]:
    user = {'role': 'user', 'content': 'x'}
    try:
        last = renderer.render([user, {'role': 'assistant', 'reasoning_content': 'qzrzq', 'content': 'qzczq'}], tools)
        history = renderer.render([user, {'role': 'assistant', 'content': 'qzczq'}, user], tools)
    except DataError:
        return _DEFAULT_WRAP
    reason, answer, bare = last.find('qzrzq'), last.find('qzczq'), history.find('qzczq')
    if min(reason, answer, bare) < 0 or reason > answer:
        return _DEFAULT_WRAP
    head = 0
    while head < min(reason, bare) and last[head] == history[head]:
        head += 1
    return last[head:reason], last[reason + len('qzrzq') : answer]


def note_lost_reasoning(
    renderer: ChatRenderer, tools: Sequence[Any] | None, messages: Sequence[Mapping[str, Any]]
) -> None:
    """Say once that a chat template knows no `reasoning_content`, where rows have it and the template was to decide."""
    if not any(message.get('reasoning_content') for message in messages):
        return
    if (
        renderer.source(tools)
        and 'reasoning_content' not in renderer.source(tools)
        and 'thinking' not in renderer.source(tools)
    ):
        renderer.warn_once(
            'Rows have reasoning_content, and the chat template does not read it: the reasoning is left out. Pass '
            'reasoning="keep" to train on it.'
        )
