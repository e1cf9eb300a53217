"""What templates of models share that can think before they answer, or be told not to."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from twinkle.errors import ConfigError
from twinkle.template.base import Template
from twinkle.template.masks import Turn
from twinkle.template.reasoning import strip_all_reasoning

__all__ = ['ThinkingTemplate']

_EMPTY_THINKING = re.compile(r'(?:<think>)?\s*</think>\s*')


class ThinkingTemplate(Template):
    """A `Template` with a switch for thinking. Subclasses say what a chat template calls the switch, and bring a chat template.

    A thinking block that holds nothing is never trained on: rows without reasoning do not teach the model to stop thinking.

    Args:
        model_id: as `Template` takes it.
        enable_thinking: whether the model is asked to think before it answers. False leaves reasoning out of every turn. None is as
            the chat template has it.
        options: what else `Template` takes.

    Raises:
        ConfigError: reasoning that is to be kept with thinking off; a switch in `chat_template_kwargs` that says something else.
    """

    switches: ClassVar[tuple[str, ...]] = ('enable_thinking',)
    """The variables of chat templates that turn thinking on and off."""

    def __init__(
        self, model_id: str | Path | None = None, *, enable_thinking: bool | None = None, **options: Any
    ) -> None:
        super().__init__(model_id, **options)
        given = {bool(self.chat_template_kwargs[name]) for name in self.switches if name in self.chat_template_kwargs}
        if enable_thinking is not None:
            given.add(enable_thinking)
        if len(given) > 1:
            raise ConfigError(
                f'enable_thinking={enable_thinking!r}, and chat_template_kwargs={self.chat_template_kwargs!r} says something else.'
            )
        self.enable_thinking = given.pop() if given else None
        if self.enable_thinking is False and self.reasoning == 'keep':
            raise ConfigError("reasoning='keep' trains on reasoning, and enable_thinking=False leaves it out.")
        if self.enable_thinking is not None:
            self.chat_template_kwargs.update(dict.fromkeys(self.switches, self.enable_thinking))
        if self.reasoning == 'keep':
            self.chat_template_kwargs.setdefault('keep_reasoning', True)

    def _prepare(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        if self.enable_thinking is False:
            plain = strip_all_reasoning(messages)
            if plain != messages:
                self.renderer.warn_once('Rows have reasoning, and enable_thinking=False leaves it out.')
            messages = plain
        return super()._prepare(messages, tools)

    def _trained_part(self, text: str, turn: Turn) -> Turn:
        empty = _EMPTY_THINKING.match(text, turn.start, turn.end)
        return replace(turn, start=empty.end()) if empty else turn
