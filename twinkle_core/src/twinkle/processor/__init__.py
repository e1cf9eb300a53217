"""From encoded rows to the tensors that a model takes."""

from __future__ import annotations

from twinkle.processor.base import InputProcessor

__all__ = ['InputProcessor']
