"""The models that the parts measure, with random weights that are made where they run."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvshelf.engine.engine import Engine
from kvshelf_bench.speed.subject import Subject
from scripts.gpu_parts.part import Part

LONGEST = 131072 + 2048
"""Positions of a model: a document of 128k tokens, a question and its answer."""


def llama_8b(part: Part, layers: int = 32) -> Subject:
    """A model of Llama-3.1-8B's shape with so many layers, in bfloat16; in a toy run a small one, in float32. It has no
    tokenizer, and no token ends an answer."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    vocabulary = 128256
    if part.toy:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
        vocabulary, layers = 1000, min(layers, 2)
    config = LlamaConfig(
        vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=LONGEST, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(part.device):
        model = AutoModelForCausalLM.from_config(config, dtype=part.dtype)
    return Subject(Engine(model.eval().requires_grad_(False), name=f"llama-8b of {layers} layers"), "")
