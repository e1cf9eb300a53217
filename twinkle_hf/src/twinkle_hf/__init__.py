"""The Transformers and PEFT backend of Twinkle. Loops import `TransformersModel` from `twinkle.model`."""

from twinkle_hf.model import TransformersModel

__all__ = ['TransformersModel']
