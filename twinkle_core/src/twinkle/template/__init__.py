"""From a row (a conversation, or plain text) to the tokens and labels that a model trains on."""

from __future__ import annotations

from twinkle.template.base import Template
from twinkle.template.deepseek import DeepseekV4Template
from twinkle.template.qwen import Qwen3_5Template

__all__ = ['DeepseekV4Template', 'Qwen3_5Template', 'Template']
