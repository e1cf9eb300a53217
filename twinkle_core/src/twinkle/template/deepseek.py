"""DeepSeek V4."""

# ruff: noqa: RUF001 - the model writes its tokens with a wide bar

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from twinkle.template.thinking import ThinkingTemplate

__all__ = ['DeepseekV4Template']

_CHAT_TEMPLATE = r"""
{%- set thinking = enable_thinking is not defined or enable_thinking is not false %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{{- '<｜begin▁of▁sentence｜>' }}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{{- system }}
{%- if tools %}
    {{- ('\n\n' if system else '') + '## Tools\n\nYou may call tools by a block like this one:\n\n<｜DSML｜tool_calls>\n' }}
    {{- '<｜DSML｜invoke name="TOOL_NAME">\n<｜DSML｜parameter name="NAME" string="true|false">VALUE</｜DSML｜parameter>\n' }}
    {{- '</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n\nTexts are written as they are (string="true"), all else as JSON ' }}
    {{- '(string="false").\n\n<functions>\n' }}
    {%- for tool in tools %}
        {{- (tool.function if tool.function is defined else tool) | tojson }}{{- '\n' }}
    {%- endfor %}
    {{- '</functions>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- message.content }}
    {%- elif message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}
        {{- '<｜User｜>' if loop.first or messages[loop.index0 - 1].role != 'tool' else '\n\n' }}
        {{- '<tool_result>' + message.content + '</tool_result>' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content.strip('\n') %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>', 1)[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>', 1)[1].lstrip('\n') %}
        {%- endif %}
        {{- '<｜Assistant｜>' }}
        {%- if thinking and reasoning and (loop.index0 > ns.last or keep_reasoning) %}
            {{- '<think>' + reasoning }}
        {%- endif %}
        {{- '</think>' + content }}
        {%- if message.tool_calls %}
            {{- '\n\n<｜DSML｜tool_calls>\n' }}
            {%- for call in message.tool_calls %}
                {{- '<｜DSML｜invoke name="' + call.function.name + '">\n' }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- '<｜DSML｜parameter name="' + name + '" string="' + ('true' if value is string else 'false') + '">' }}
                    {{- value if value is string else value | tojson }}{{- '</｜DSML｜parameter>\n' }}
                {%- endfor %}
                {{- '</｜DSML｜invoke>\n' }}
            {%- endfor %}
            {{- '</｜DSML｜tool_calls>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""


class DeepseekV4Template(ThinkingTemplate):
    """DeepSeek V4: `Template` with `enable_thinking`, and a chat template, which the model's tokenizer does not bring.

    The prompt opens `<think>` where thinking is on, and is `</think>` where it is off; so is the head of a turn without reasoning.
    Reasoning of earlier rounds is left out unless `reasoning='keep'`. Tool calls are `<｜DSML｜tool_calls>` blocks. The role and
    thinking tokens are those of the model's tokenizer. The layout of tool calls and their results, and the words that introduce tools,
    were not compared with the encoder that the model was trained with: for rows with tools, compare first. A tokenizer with a chat
    template of its own keeps it.

    Args:
        model_id, options: as `Template` takes them.
        enable_thinking: whether the model is asked to think before it answers. Turn it off for rows without reasoning, so that prompts
            are those that were trained.
    """

    switches: ClassVar[tuple[str, ...]] = ('enable_thinking', 'thinking')
    default_chat_template: ClassVar[str | None] = _CHAT_TEMPLATE

    def __init__(
        self, model_id: str | Path | None = None, *, enable_thinking: bool | None = True, **options: Any
    ) -> None:
        super().__init__(model_id, enable_thinking=enable_thinking, **options)
