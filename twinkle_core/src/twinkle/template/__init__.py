"""From a row (a conversation, or plain text) to the tokens and labels that a model trains on."""

from __future__ import annotations

from twinkle.template.base import Template

__all__ = ['Template']
