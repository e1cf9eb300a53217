"""A tiny random Llama and LoRA adapters for it, in the files that Transformers and PEFT read; neither is needed to write them.

Sizes: vocabulary 64, hidden 32, 2 layers, 4 heads on 2 key-value heads.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ['write_lora', 'write_tiny_llama']

_HIDDEN, _KEY_VALUE, _INNER, _VOCABULARY, _LAYERS = 32, 16, 64, 64, 2

_CONFIG = {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'vocab_size': _VOCABULARY,
    'hidden_size': _HIDDEN,
    'intermediate_size': _INNER,
    'num_hidden_layers': _LAYERS,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 128,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-5,
    'rope_theta': 10000.0,
    'attention_bias': False,
    'mlp_bias': False,
    'attention_dropout': 0.0,
    'tie_word_embeddings': False,
    'torch_dtype': 'float32',
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 0,
}

_PROJECTIONS = {
    'self_attn.q_proj': (_HIDDEN, _HIDDEN),
    'self_attn.k_proj': (_KEY_VALUE, _HIDDEN),
    'self_attn.v_proj': (_KEY_VALUE, _HIDDEN),
    'self_attn.o_proj': (_HIDDEN, _HIDDEN),
    'mlp.gate_proj': (_INNER, _HIDDEN),
    'mlp.up_proj': (_INNER, _HIDDEN),
    'mlp.down_proj': (_HIDDEN, _INNER),
}


def write_tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """Write the model into `folder`, always the same one for a seed, and return the folder."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {'model.embed_tokens': (_VOCABULARY, _HIDDEN), 'lm_head': (_VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        shapes |= {f'model.layers.{layer}.{name}': shape for name, shape in _PROJECTIONS.items()}
    tensors = {f'{name}.weight': torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    norms = [f'model.layers.{n}.{norm}_layernorm' for n in range(_LAYERS) for norm in ('input', 'post_attention')]
    tensors |= {f'{name}.weight': torch.ones(_HIDDEN) for name in [*norms, 'model.norm']}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / 'model.safetensors'), metadata={'format': 'pt'})
    (folder / 'config.json').write_text(json.dumps(_CONFIG, indent=2))
    return folder


def write_lora(folder: Path, base_model: Path, *, rank: int = 4, seed: int = 0) -> Path:
    """Write a LoRA adapter on the queries and values into `folder`. Neither of its factors is zero, so it changes the model."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors = {}
    for layer in range(_LAYERS):
        for name in ('self_attn.q_proj', 'self_attn.v_proj'):
            rows, columns = _PROJECTIONS[name]
            key = f'base_model.model.model.layers.{layer}.{name}'
            tensors[f'{key}.lora_A.weight'] = torch.randn(rank, columns, generator=generator) * 0.2
            tensors[f'{key}.lora_B.weight'] = torch.randn(rows, rank, generator=generator) * 0.2
    config = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': str(base_model),
        'r': rank,
        'lora_alpha': 2 * rank,
        'lora_dropout': 0.0,
        'target_modules': ['q_proj', 'v_proj'],
        'bias': 'none',
        'inference_mode': True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / 'adapter_model.safetensors'), metadata={'format': 'pt'})
    (folder / 'adapter_config.json').write_text(json.dumps(config, indent=2))
    return folder
