"""Many tenants on one base model: slots of LoRA weights, one pass for rows of several tenants, and the model around them."""

from __future__ import annotations

from twinkle_hf.multi_lora.model import MultiLoraTransformersModel

__all__ = ['MultiLoraTransformersModel']
