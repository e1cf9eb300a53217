"""Qwen3.5."""

from __future__ import annotations

from typing import ClassVar

from twinkle.template.thinking import ThinkingTemplate

__all__ = ['Qwen3_5Template']

_CHAT_TEMPLATE = r"""
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n<tool_call>\n' }}
    {{- '<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>' }}
    {{- ('\n\n' + system if system else '') + '<|im_end|>\n' }}
{%- elif system %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content.strip('\n') %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>', 1)[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>', 1)[1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last or (keep_reasoning and reasoning) %}
            {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n\n' if loop.first and content else '\n' if not loop.first else '' }}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<parameter=' + name + '>\n' }}{{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


class Qwen3_5Template(ThinkingTemplate):
    """Qwen3.5 (and Qwen3, whose chat template has the same switch): `Template` with `enable_thinking`.

    The tokenizer's own chat template is used. The prompt opens `<think>`, so that reasoning, its closing tag and the answer are
    trained on; with `enable_thinking=False` it holds an empty block, and only answers are. Reasoning of earlier rounds is left out
    unless `reasoning='keep'`. A tokenizer without a chat template gets one that follows Qwen3.5's (tool calls as
    `<function=...>` with `<parameter=...>`), for text only; it was not compared with the model's own, which goes before.
    """

    default_chat_template: ClassVar[str | None] = _CHAT_TEMPLATE
