"""Chat templates as a function from messages to text, and what a given template can express."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.errors import ConfigError, DataError, TwinkleError
from twinkle.logging import get_logger

__all__ = ['ChatRenderer', 'check_rendered', 'fit_content', 'fit_tool_calls']

_GENERATION_MARK = re.compile(r'\{%[-+]?\s*generation\s*[-+]?%\}')
_READS_PARTS = re.compile(r"""\.type\b|\[\s*['"]type['"]\s*\]""")
_WORD = re.compile(r'\w+')

Messages = Sequence[Mapping[str, Any]]


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template. `cache` keeps what is learnt about the template.

    Args:
        tokenizer: a tokenizer of transformers, or an object with its `apply_chat_template`.
        kwargs: further variables for the template, such as `enable_thinking`.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        from transformers import PreTrainedTokenizerBase

        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        method = getattr(type(tokenizer), 'apply_chat_template', None)
        self._standard = method is PreTrainedTokenizerBase.apply_chat_template
        self.cache: dict[Any, Any] = {}
        self._warned: set[str] = set()

    def source(self, tools: Sequence[Any] | None = None) -> str:
        """The Jinja text in use; '' where a tokenizer renders by code of its own.

        Raises:
            ConfigError: the tokenizer has no chat template.
        """
        if not self._standard:
            return ''
        if not getattr(self._tokenizer, 'chat_template', None):
            raise ConfigError(
                f'The tokenizer {self._tokenizer.name_or_path!r} has no chat template, and the row has messages. Pass '
                'chat_template=... (Jinja text, or a file) to the template, or give rows with plain "text".'
            )
        return str(self._tokenizer.get_chat_template(None, tools))

    def has_marks(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the chat template itself marks what the assistant says, by `{% generation %}`."""
        return bool(_GENERATION_MARK.search(self.source(tools)))

    def render(self, messages: Messages, tools: Sequence[Any] | None = None, *, prompt: bool = False) -> str:
        """The text of a conversation; `prompt` adds what asks the assistant to speak.

        Raises:
            ConfigError: there is no chat template.
            DataError: the chat template does not take these messages.
        """
        return self._render(messages, tools, prompt, False)[0]

    def render_marked(
        self, messages: Messages, tools: Sequence[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character spans that `{% generation %}` marks in it. Raises as `render` does."""
        return self._render(messages, tools, False, True)

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, prompt: bool, marked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        source = self.source(tools)
        try:
            if not self._standard:
                text = self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **self._kwargs
                )
                return str(text), []
            # `apply_chat_template` drops keys whose value is None before it renders, and templates exist that tell a
            # tool call by `content is none`; the function below it takes messages as they are, and hands out the
            # marks as characters.
            from transformers.utils.chat_template_utils import render_jinja_template

            render: Any = render_jinja_template
            texts, spans = render(
                conversations=[list(messages)],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **{**self._tokenizer.special_tokens_map, **self._kwargs},
            )
        except TwinkleError:
            raise
        except Exception as error:  # a template is code of its own: it may raise anything
            roles = ', '.join(str(message.get('role')) for message in messages)
            raise DataError(f'The chat template refuses this conversation (roles: {roles}): {error}') from error
        return texts[0], [(start, end) for start, end in spans[0]] if marked else []

    def warn_once(self, message: str) -> None:
        """Log a warning the first time that it is given."""
        if message not in self._warned:
            self._warned.add(message)
            get_logger().warning(message)


def fit_content(
    renderer: ChatRenderer, messages: list[dict[str, Any]], tools: Sequence[Any] | None
) -> list[dict[str, Any]]:
    """Lists of text parts become one text where the chat template knows no parts (it would print the list, or fail)."""
    if not any(isinstance(message.get('content'), list) for message in messages):
        return messages
    source = renderer.source(tools)
    if not source or _READS_PARTS.search(source):
        return messages
    fitted = []
    for index, message in enumerate(messages):
        content = message.get('content')
        if isinstance(content, list):
            if not all(isinstance(part, Mapping) and isinstance(part.get('text'), str) for part in content):
                raise DataError(f'Message {index} has parts that are not text, and the chat template takes only text.')
            message = {**message, 'content': ''.join(part['text'] for part in content)}
        fitted.append(message)
    return fitted


def fit_tool_calls(
    renderer: ChatRenderer, messages: list[dict[str, Any]], tools: Sequence[Any] | None
) -> list[dict[str, Any]]:
    """Tool calls in the form that the chat template reads: arguments as a mapping or as JSON, content empty or None.

    Templates differ, and one that does not find its own form prints nothing, or quotes JSON twice. Which form works
    is found out by rendering a probe, once per template and form.

    Raises:
        DataError: no form is rendered.
    """
    if not any(message.get('tool_calls') for message in messages):
        return messages
    return [_fit_call(renderer, m, tools) if m.get('tool_calls') else m for m in messages]


def _fit_call(renderer: ChatRenderer, message: dict[str, Any], tools: Sequence[Any] | None) -> dict[str, Any]:
    has_content = bool(message['content'])
    as_text = isinstance(message['tool_calls'][0]['function']['arguments'], str)
    key = ('tool_calls', has_content, as_text, bool(tools))
    if key not in renderer.cache:
        contents = ['probe'] if has_content else ['', None]
        styles = [as_text, not as_text]
        renderer.cache[key] = next(
            (
                (content, style)
                for content in contents
                for style in styles
                if _call_is_rendered(renderer, content, style, tools)
            ),
            None,
        )
    choice = renderer.cache[key]
    if choice is None:
        beside = 'a tool call beside content' if has_content else 'tool calls'
        raise DataError(
            f'The chat template does not render {beside}: the call would be lost in silence. Pass a chat_template '
            'that does, or write the call as text into the content.'
        )
    content, style = choice
    calls = [
        {**call, 'function': {**call['function'], 'arguments': _arguments(call['function']['arguments'], style)}}
        for call in message['tool_calls']
    ]
    return {**message, 'content': message['content'] if has_content else content, 'tool_calls': calls}


def _call_is_rendered(renderer: ChatRenderer, content: str | None, as_text: bool, tools: Sequence[Any] | None) -> bool:
    arguments = '{"probeargument": 1}' if as_text else {'probeargument': 1}
    call = {'type': 'function', 'id': 'probe0001', 'function': {'name': 'probefunction', 'arguments': arguments}}
    probe: list[dict[str, Any]] = [
        {'role': 'user', 'content': 'x'},
        {'role': 'assistant', 'content': content, 'tool_calls': [call]},
    ]
    try:
        text = renderer.render(probe, tools)
    except DataError:
        return False
    quoted_twice = '\\"probeargument' in text
    return 'probefunction' in text and 'probeargument' in text and not quoted_twice


def _arguments(arguments: Any, as_text: bool) -> Any:
    if as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError as error:
        raise DataError(f'The arguments of a tool call are not JSON: {arguments[:100]!r} ({error}).') from error


def check_rendered(text: str, messages: Messages) -> None:
    """Refuse a conversation of which the chat template leaves a message out.

    Raises:
        DataError: naming the message.
    """
    for index, message in enumerate(messages):
        content = message.get('content')
        if message['role'] == 'assistant' or not isinstance(content, str):
            continue
        word = max(_WORD.findall(content[:200]), key=len, default='')
        if word not in text:
            raise DataError(
                f'Message {index} ({message["role"]}) is not in what the chat template renders: it leaves out the role '
                f'{message["role"]!r}. Use a role that it knows, or pass another chat_template.'
            )
