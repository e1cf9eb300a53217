"""Which characters of a rendered conversation the assistant says, found for any chat template.

A chat template is code: it may strip, trim, inject and reorder. So nothing here knows a template's tags. Every
assistant turn is rendered again with marker words in the place of its texts; what stands before the first marker and
behind the last one is the template's own, and is matched with the real text. The generation prompt (what a template
appends to ask for an answer) tells where a turn's header ends; a conversation that stops after the turn tells what
ends it. A turn that cannot be placed beyond doubt is an error, never an empty mask.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinkle.errors import DataError
from twinkle.template.reasoning import INLINE_REASONING
from twinkle.template.rendering import ChatRenderer

__all__ = ['Turn', 'find_turns', 'marked_turns', 'put_back']

_OPEN_TAG = re.compile('<[|\uff5c/]?\\w*\\Z')
_USER = {'role': 'user', 'content': 'qzuserzq'}


@dataclass(frozen=True)
class Turn:
    """What the assistant says in one message, as characters `start` to `end` of the rendered text.

    Attributes:
        index: number of the message.
        header: the generation prompt in front of it, '' where the template has none.
    """

    index: int
    start: int
    end: int
    header: str = ''


@dataclass(frozen=True)
class _Shape:
    """What a template writes around a turn of some form.

    Attributes:
        header: the generation prompt.
        leads: what it may put behind the header, longest first.
        end: what closes the turn.
        bare: the part of the header that earlier turns have, where a prompt opens more than they do (`<think>`).
    """

    header: str
    leads: tuple[str, ...]
    end: str
    bare: str = ''


class _Unplaced(Exception):
    """A turn could not be located this way."""


def find_turns(
    renderer: ChatRenderer,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    wanted: Sequence[int],
) -> list[Turn]:
    """The turns of the messages numbered `wanted` in `text`, which is `renderer.render(messages, tools)`.

    A turn starts where the generation prompt ends and closes with the template's end-of-turn text, of which trailing
    white space is left out (the newline behind `<|im_end|>` is never generated), unless there is nothing but white
    space.

    Raises:
        DataError: a turn cannot be located.
    """
    salt = _salt(text, messages)
    turns = _find_together(renderer, text, messages, tools, salt)
    found = []
    for index in wanted:
        turn = turns.get(index)
        if turn is None:
            try:
                turn = _find_alone(renderer, text, messages, tools, index, salt)
            except (_Unplaced, DataError) as error:
                raise DataError(
                    f'Message {index} (assistant) cannot be found in what the chat template renders, so it is unknown '
                    'which tokens to train on. Mark them in the template with {% generation %} ... {% endgeneration %} '
                    f'and pass it as chat_template, or set "train": false on that message. ({error})'
                ) from error
        found.append(turn)
    return found


def _salt(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    salt = 'qzm'
    while salt in text or any(salt in str(message.get('content')) for message in messages):
        salt += 'z'
    return salt


def _with_markers(message: Mapping[str, Any], salt: str, index: int) -> dict[str, Any]:
    """`message` with a marker in the place of every text in it; what is empty stays empty: templates ask for that."""
    marker = f'{salt}{index}x{{}}zq'.format
    marked = dict(message)
    content, calls = message.get('content'), message.get('tool_calls')
    if message.get('reasoning_content'):
        marked['reasoning_content'] = marker('r')
    if isinstance(content, list):
        marked['content'] = [{'type': 'text', 'text': marker('c')}]
    elif isinstance(content, str):
        inline = (
            INLINE_REASONING.match(content) if '</think>' in content and not message.get('reasoning_content') else None
        )
        if inline:
            (a, b), (c, _) = inline.span(1), inline.span(2)
            marked['content'] = content[:a] + marker('r') + content[b:c] + (marker('c') if inline.group(2) else '')
        elif content or not (calls or message.get('reasoning_content')):
            marked['content'] = marker('c')
    if calls:
        marked['tool_calls'] = [
            {**call, 'function': {'name': marker('n'), 'arguments': _marked_arguments(call, marker('a'))}}
            for call in calls
        ]
    return marked


def _marked_arguments(call: Mapping[str, Any], marker: str) -> Any:
    return f'{{"k": "{marker}"}}' if isinstance(call['function']['arguments'], str) else {'k': marker}


def _locate(text: str, salt: str, index: int) -> tuple[int, int]:
    """Where the first marker of a turn starts, and where its last one ends."""
    tag = f'{salt}{index}x'
    first, last = text.find(tag), text.rfind(tag)
    if first < 0:
        raise _Unplaced('the template does not render it')
    return first, text.index('zq', last) + 2


def _kind(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """The form of a turn: turns of one form are wrapped alike."""
    content, calls = message.get('content'), message.get('tool_calls') or ()
    inline = INLINE_REASONING.match(content) if isinstance(content, str) and '</think>' in content else None
    return (
        type(content).__name__,
        bool(content),
        inline and (inline.string[: inline.start(1)], inline.string[inline.end(1) : inline.start(2)], bool(inline[2])),
        bool(message.get('reasoning_content')),
        tuple(type(call['function']['arguments']).__name__ for call in calls),
        tuple(sorted(message)),
    )


def _shape(renderer: ChatRenderer, message: Mapping[str, Any], tools: Sequence[Any] | None) -> _Shape | None:
    """How the template wraps turns of this form, learnt from a short conversation; None if it refuses that."""
    key = ('shape', _kind(message), bool(tools))
    if key not in renderer.cache:
        try:
            renderer.cache[key] = _learn_shape(renderer, _with_markers(message, 'qzm', 0), tools)
        except (_Unplaced, DataError):
            renderer.cache[key] = None
    shape: _Shape | None = renderer.cache[key]
    return shape


def _learn_shape(renderer: ChatRenderer, marked: dict[str, Any], tools: Sequence[Any] | None) -> _Shape:
    header, prompt = _header(renderer, [_USER], tools)
    closed = renderer.render([_USER, marked], tools)
    first, last = _locate(closed, 'qzm', 0)
    leads, bare = {''}, ''
    if header and closed.startswith(prompt):
        leads.add(closed[len(prompt) : first])
    try:
        earlier = renderer.render([_USER, marked, _USER], tools)
        place = _locate(earlier, 'qzm', 0)[0]
        plain = prompt[: len(prompt) - len(header)]
        if header and earlier.startswith(prompt):
            leads.add(earlier[len(prompt) : place])
        elif earlier.startswith(plain) and header.startswith(earlier[len(plain) : place]) and not _is_call(marked):
            bare = earlier[len(plain) : place]
    except (_Unplaced, DataError):
        pass  # a user may not speak after a turn of this form (an open tool call): then only that one is learnt
    end = closed[last:]
    if not end:
        renderer.warn_once(
            "The chat template writes nothing behind the assistant's turn, so the model will not learn when to stop. "
            'Add the end token to the template, or pass another chat_template.'
        )
    return _Shape(header, tuple(sorted(leads, key=len, reverse=True)), end, bare)


def _header(
    renderer: ChatRenderer, before: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> tuple[str, str]:
    """What asks for an answer behind `before`, and the whole prompt. Without messages before there is neither."""
    if not before:
        return '', ''
    plain, prompt = renderer.render(before, tools), renderer.render(before, tools, prompt=True)
    return prompt[len(_common(plain, prompt)) :], prompt


def _common(left: str, right: str) -> str:
    """The longest common beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return left[:low]


def _find_together(
    renderer: ChatRenderer, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, salt: str
) -> dict[int, Turn]:
    """The turns that one more rendering places beyond doubt: most of them, and at a cost linear in the rounds."""
    spoken = [index for index, message in enumerate(messages) if message['role'] == 'assistant']
    marked = [_with_markers(m, salt, i) if m['role'] == 'assistant' else m for i, m in enumerate(messages)]
    try:
        skeleton = renderer.render(marked, tools)
        spots = [_locate(skeleton, salt, index) for index in spoken]
        cuts = [0, *(place for spot in spots for place in spot), len(skeleton)]
        if cuts != sorted(cuts):
            return {}
        between = [skeleton[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        inner = _match(text, between, [messages[index] for index in spoken])
    except (_Unplaced, DataError):
        return {}
    turns = {}
    for number, (index, (first, last)) in enumerate(zip(spoken, inner, strict=True)):
        shape = _shape(renderer, messages[index], tools)
        if shape is None or not between[number + 1].startswith(shape.end):
            continue
        lead = next((lead for lead in shape.leads if between[number].endswith(shape.header + lead)), None)
        if lead is None and shape.bare and between[number].endswith(shape.bare):
            lead = ''
        if lead is None or (not shape.header and _is_call(messages[index])):
            continue
        turns[index] = Turn(index, first - len(lead), last + _end_length(shape.end), shape.header)
    return turns


def _is_call(message: Mapping[str, Any]) -> bool:
    """Whether a turn is nothing but tool calls (its first marker then stands inside the template's own words)."""
    return bool(message.get('tool_calls')) and not message.get('content') and not message.get('reasoning_content')


def _match(text: str, between: Sequence[str], spoken: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """The places of what stands between the parts `between` in `text`, where they are the only ones possible."""
    if not text.startswith(between[0]):
        raise _Unplaced('the beginning differs')
    place, places = len(between[0]), []
    for number, message in enumerate(spoken, start=1):
        part, later = between[number], between[number:]
        content = message.get('content')
        guesses = [content, content.strip()] if isinstance(content, str) and not message.get('tool_calls') else []
        stop = next(
            (place + len(g) for g in guesses if text.startswith(g, place) and text.startswith(part, place + len(g))), -1
        )
        if number == len(spoken):
            stop = len(text) - len(part) if text.endswith(part) else -1
        elif stop < 0 and part and text.count(part, place) == sum(other.count(part) for other in later):
            stop = text.find(part, place)
        if stop < place:
            raise _Unplaced('it is ambiguous')
        places.append((place, stop))
        place = stop + len(part)
    return places


def _end_length(end: str) -> int:
    """Length of an end-of-turn text without the white space behind it, which the model never has to say."""
    return len(end.rstrip()) or len(end)


def _find_alone(
    renderer: ChatRenderer,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    index: int,
    salt: str,
) -> Turn:
    """One turn, from the conversation with only this turn marked, the same cut off behind it, and cut off before it."""
    before, marked = list(messages[:index]), _with_markers(messages[index], salt, index)
    whole = renderer.render([*before, marked, *messages[index + 1 :]], tools)
    closed = renderer.render([*before, marked], tools)
    (first, last), (closed_first, closed_last) = _locate(whole, salt, index), _locate(closed, salt, index)
    # Where a template ends the last turn by another token than the earlier ones, the common part may stop inside a
    # token; tokens that overlap a turn belong to it.
    end = _common(whole[last:], closed[closed_last:])
    rest = whole[last + len(end) :]
    header, prompt = _header(renderer, before, tools)
    leads = [closed[len(prompt) : closed_first], ''] if header and closed.startswith(prompt) else ['']
    lead = next((lead for lead in leads if header and whole[:first].endswith(header + lead)), None)
    if lead is not None:
        start = first - len(lead)
    elif _is_call(messages[index]) and before:
        start = _start_of_call(whole, len(renderer.render(before, tools)), header)
    else:
        start = first
    stop = len(text) - len(rest) - len(end) + _end_length(end)
    if not (text.startswith(whole[:start]) and text.endswith(rest) and start <= stop):
        raise _Unplaced('what stands around it depends on what it says')
    return Turn(index, start, stop, header)


def _start_of_call(text: str, begin: int, header: str) -> int:
    """Where a turn of tool calls that begins at `begin` leaves the generation prompt (which may open a `<think>`)."""
    common = _common(text[begin:], header)
    return begin + len(header if common == header else _OPEN_TAG.sub('', common))


def marked_turns(
    renderer: ChatRenderer,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    wanted: Sequence[int],
) -> list[Turn]:
    """The turns as the chat template's `{% generation %}` marks them, one per mark.

    The marks are compared with the turns found by rendering: marks that miss what the assistant says (a template that
    prints through macros shifts them), or are not there at all, are passed over with a warning.

    Raises:
        DataError: neither marks nor rendering tell what the assistant says.
    """
    spoken = [index for index, message in enumerate(messages) if message['role'] == 'assistant']
    marks = [(start, end) for start, end in renderer.render_marked(messages, tools)[1] if end > start]
    try:
        turns = find_turns(renderer, text, messages, tools, spoken)
    except DataError:
        if marks and len(marks) == len(spoken):
            return [Turn(index, *mark) for index, mark in zip(spoken, marks, strict=True) if index in set(wanted)]
        raise
    owned = [_owner(mark, turns, text) for mark in marks]
    missing = [turn for turn in turns if turn.index in set(wanted) and turn.index not in {o.index for o in owned if o}]
    if not marks or any(owner is None for owner in owned) or len(missing) == len(wanted):
        renderer.warn_once(
            'The {% generation %} marks of the chat template do not cover what the assistant says; the turns found by '
            'rendering are trained on instead.'
        )
        return [turn for turn in turns if turn.index in set(wanted)]
    if any(o and not text[end : o.end].isspace() and end < o.end for (_, end), o in _last_marks(marks, owned)):
        renderer.warn_once(
            'The {% generation %} marks of the chat template leave out the token that ends a turn, so the model is not '
            'taught to stop. Put the end token inside the marks.'
        )
    return [
        replace(owner, start=start, end=end)
        for (start, end), owner in zip(marks, owned, strict=True)
        if owner is not None and owner.index in set(wanted)
    ]


def _owner(mark: tuple[int, int], turns: Sequence[Turn], text: str) -> Turn | None:
    """The turn that a mark lies in; it may reach over the header in front and the white space behind."""
    for turn in turns:
        end = turn.end + len(text[turn.end :]) - len(text[turn.end :].lstrip())
        if turn.start - len(turn.header) <= mark[0] < turn.end and mark[1] <= end:
            return turn
    return None


def _last_marks(
    marks: Sequence[tuple[int, int]], owned: Sequence[Turn | None]
) -> list[tuple[tuple[int, int], Turn | None]]:
    last = {owner.index: (mark, owner) for mark, owner in zip(marks, owned, strict=True) if owner is not None}
    return list(last.values())


def put_back(text: str, turns: Sequence[Turn], placeholders: Mapping[str, str]) -> tuple[str, list[Turn]]:
    """`text` with every placeholder replaced by what it stands for, and the turns moved accordingly.

    Raises:
        DataError: the chat template does not render a placeholder.
    """
    turns = list(turns)
    for placeholder, meant in placeholders.items():
        place = text.find(placeholder)
        if place < 0:
            raise DataError(
                'The chat template leaves out a turn whose reasoning is to be kept; pass another chat_template.'
            )
        shift = len(meant) - len(placeholder)
        text = text[:place] + meant + text[place + len(placeholder) :]
        turns = [
            replace(t, start=t.start + shift * (t.start > place), end=t.end + shift * (t.end > place)) for t in turns
        ]
    return text, [_behind_header(text, turn) for turn in turns]


def _behind_header(text: str, turn: Turn) -> Turn:
    """Move the start behind a header that goes on into the turn: a prompt may open `<think>`, and a turn repeat it."""
    if not turn.header or text.endswith(turn.header, 0, turn.start):
        return turn
    for length in range(len(turn.header) - 1, 0, -1):
        start = turn.start - length
        if start >= 0 and text.startswith(turn.header[:length], start):
            whole = text.startswith(turn.header, start) and start + len(turn.header) < turn.end
            return replace(turn, start=start + len(turn.header)) if whole else turn
    return turn
