"""Tiny random models, saved to a folder."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_llama_dir(folder: Path, *, tie: bool = False, vocab: int = 64) -> str:
    """A random Llama in fp32. Weights are larger than usual, so that logits and gradients are not all alike."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
