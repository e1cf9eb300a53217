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


_SMALL = {
    'vocab_size': 64, 'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 4,
    'num_key_value_heads': 2, 'max_position_embeddings': 128, 'initializer_range': 0.1, 'tie_word_embeddings': False,
}  # fmt: skip
_EXPERTS = {'num_experts_per_tok': 2, 'moe_intermediate_size': 16}
_FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    'qwen2': ('Qwen2', {}),
    'qwen3': ('Qwen3', {'head_dim': 8}),
    'mistral': ('Mistral', {}),
    'sliding': (
        'Qwen2', {'use_sliding_window': True, 'sliding_window': 4, 'layer_types': ['full_attention', 'sliding_attention']}
    ),
    'qwen3_moe': ('Qwen3Moe', {'head_dim': 8, 'num_experts': 4, **_EXPERTS}),
    'deepseek_v3': (
        'DeepseekV3',
        {'n_routed_experts': 4, 'n_shared_experts': 1, 'n_group': 2, 'topk_group': 1, 'first_k_dense_replace': 1,
         'num_key_value_heads': 4, 'q_lora_rank': 16, 'kv_lora_rank': 16, 'qk_nope_head_dim': 8, 'qk_rope_head_dim': 8,
         'v_head_dim': 8, **_EXPERTS},
    ),
    'glm4_moe': (
        'Glm4Moe',
        {'head_dim': 8, 'n_routed_experts': 4, 'n_shared_experts': 1, 'n_group': 1, 'topk_group': 1,
         'first_k_dense_replace': 1, 'pad_token_id': 0, **_EXPERTS},
    ),
    'qwen3_5_moe': (
        'Qwen3_5Moe',
        {'head_dim': 8, 'num_experts': 4, 'shared_expert_intermediate_size': 16, 'layer_types': ['full_attention'] * 2,
         **_EXPERTS},
    ),
}  # fmt: skip


def tiny_dir(family: str, folder: Path, **also: object) -> str:
    """A random model of a family, two layers of it in fp32."""
    import transformers

    prefix, options = _FAMILIES[family]
    config_class = getattr(transformers, f'{prefix}TextConfig', None) or getattr(transformers, f'{prefix}Config')
    torch.manual_seed(0)
    config = config_class(**{**_SMALL, **options, **also})
    getattr(transformers, f'{prefix}ForCausalLM')(config).save_pretrained(folder)
    return str(folder)
