"""The messages of a row: checked, copied, and brought into the one shape that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import ConfigError, DataError

__all__ = ['check_rounds', 'message_weight', 'normalise_messages', 'normalise_tools', 'read_messages', 'trained_turns']


def read_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """The list of messages of a row, which may come as JSON text.

    Raises:
        DataError: not a list of mappings, or an empty one.
    """
    if isinstance(messages, str):
        messages = _parsed(messages, 'messages')
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise DataError(f'messages is {type(messages).__name__}; it must be a list of {{"role": ..., "content": ...}}.')
    if not messages:
        raise DataError('messages is empty; a conversation has at least one message. Filter such rows out.')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(
                f'Message {index} is {type(message).__name__}; it must be a mapping with "role" and "content".'
            )
    return messages


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], *, system: str | None = None, row_system: str | None = None
) -> list[dict[str, Any]]:
    """Copies of `messages`, with a system message put in front where none is there and one was asked for.

    `None` values are dropped (columns of a table are filled with them); tool calls take the nested form
    `{'type': 'function', 'function': {'name', 'arguments'}}`; keys that only matter to training (`train`, `weight`)
    are left out.

    Raises:
        DataError: a message without a role or anything to say, or two different system prompts.
    """
    plain = [_normalise_message(message, index) for index, message in enumerate(messages)]
    has_system = plain[0]['role'] == 'system'
    if row_system is not None and has_system and plain[0].get('content') != row_system:
        raise DataError('The row has both a "system" field and a system message, and they differ; keep one of them.')
    prompt = system if row_system is None else row_system
    if prompt is not None and not has_system:
        plain.insert(0, {'role': 'system', 'content': prompt})
    return plain


def _normalise_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    role = message.get('role')
    if not isinstance(role, str) or not role:
        raise DataError(
            f'Message {index} has the role {role!r} (keys: {sorted(map(str, message))}); it must be "system", "user", '
            '"assistant", "tool", or another role that the chat template knows.'
        )
    plain = {key: value for key, value in message.items() if value is not None and key not in ('train', 'weight')}
    content = plain.get('content')
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise DataError(
            f'Message {index} ({role}) has {type(content).__name__} content; it must be text or a list of parts.'
        )
    if isinstance(content, tuple):
        plain['content'] = list(content)
    if plain.get('tool_calls'):
        plain['tool_calls'] = _normalise_tool_calls(plain['tool_calls'], index)
    else:
        plain.pop('tool_calls', None)
    if 'content' not in plain:
        if role != 'assistant' or not (plain.get('tool_calls') or plain.get('reasoning_content')):
            raise DataError(f'Message {index} ({role}) has no content; give it text (an empty string is allowed).')
        plain['content'] = ''
    if role != 'assistant' and message.get('train'):
        raise DataError(f'Message {index} ({role}) has train=True; only what the assistant says is trained on.')
    return plain


def _normalise_tool_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    calls = _parsed(calls, f'tool_calls of message {index}') if isinstance(calls, str) else calls
    if not isinstance(calls, Sequence):
        raise DataError(f'tool_calls of message {index} is {type(calls).__name__}; it must be a list.')
    plain = []
    for call in calls:
        function = call.get('function', call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get('name'), str):
            raise DataError(f'A tool call of message {index} has no function name: {call!r:.200}.')
        outer = {key: value for key, value in call.items() if value is not None} if 'function' in call else {}
        inner = {'name': function['name'], 'arguments': function.get('arguments', {})}
        if inner['arguments'] is None:
            inner['arguments'] = {}
        plain.append({**outer, 'type': outer.get('type', 'function'), 'function': inner})
    return plain


def normalise_tools(tools: Any) -> list[Any] | None:
    """The tool schemas of a row (a list, or its JSON text), or None where there are none.

    Raises:
        DataError: neither a list nor the JSON of one.
    """
    if not tools:
        return None
    tools = _parsed(tools, 'tools') if isinstance(tools, str) else tools
    if not isinstance(tools, Sequence):
        raise DataError(f'tools is {type(tools).__name__}; it must be a list of JSON schemas.')
    return [_parsed(tool, 'a tool schema') if isinstance(tool, str) else tool for tool in tools]


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f'{what} is text and not JSON: {text[:100]!r} ({error}).') from error


def check_rounds(rounds: str | Sequence[int]) -> str | tuple[int, ...]:
    """`rounds`, checked.

    Raises:
        ConfigError: neither 'all', 'last' nor a list of numbers.
    """
    if isinstance(rounds, str):
        if rounds in ('all', 'last'):
            return rounds
    elif isinstance(rounds, Sequence) and rounds and all(type(number) is int for number in rounds):
        return tuple(int(number) for number in rounds)
    raise ConfigError(
        f"rounds={rounds!r}; it must be 'all', 'last', or a list of round numbers (0 is the first, -1 the last)."
    )


def trained_turns(messages: Sequence[Mapping[str, Any]], rounds: str | tuple[int, ...]) -> list[bool]:
    """For each message, whether it is an assistant turn to train on.

    A round is a user message (or several in a row) and all that the assistant says until the next one, tool calls
    included. A message's own `train` (or a `weight` of 0) goes before the choice of rounds.
    """
    number, seen_assistant, of_round = 0, False, []
    for message in messages:
        if message['role'] == 'user' and seen_assistant:
            number, seen_assistant = number + 1, False
        seen_assistant = seen_assistant or message['role'] == 'assistant'
        of_round.append(number)
    last = max((n for n, message in zip(of_round, messages, strict=True) if message['role'] == 'assistant'), default=0)
    if rounds == 'all':
        chosen = set(of_round)
    elif rounds == 'last':
        chosen = {last}
    else:
        chosen = {n if n >= 0 else last + 1 + n for n in rounds if not isinstance(n, str)}
    return [
        message['role'] == 'assistant' and _wanted(message, n in chosen)
        for n, message in zip(of_round, messages, strict=True)
    ]


def _wanted(message: Mapping[str, Any], chosen: bool) -> bool:
    if message_weight(message) == 0:
        return False
    train = message.get('train')
    return chosen if train is None else bool(train)


def message_weight(message: Mapping[str, Any]) -> float | None:
    """The weight that a message gives its tokens in the loss, or None.

    Raises:
        DataError: not a number.
    """
    weight = message.get('weight')
    if weight is None:
        return None
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or weight != weight
        or abs(weight) == float('inf')
    ):
        raise DataError(f'The weight of a message is {weight!r}; it must be a finite number.')
    return float(weight)
