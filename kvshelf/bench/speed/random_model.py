"""A Llama of random weights: a stand-in for speed where weights cannot be had. Its answers mean nothing."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvshelf.bench.measure import chosen_dtype
from kvshelf.errors import InvalidRequest

_NAME = re.compile(r"random:(\d+)")


def random_layers(name: str) -> int | None:
    """The layers that a model's name asks for: 8 of "random:8". None for every other name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    layers = int(found[1])
    if not 1 <= layers <= 64:
        raise InvalidRequest(f"{name!r} has {layers} layers; give 1 to 64", param="model")
    return layers


def save_random_model(folder: Path, layers: int) -> None:
    """Write the model into `folder` as safetensors, in fp32: hidden 512, 8 query and 2 KV heads of 64 channels.

    Equal `layers` give equal weights. It has no tokenizer, so documents and questions are token ids, and no end token.
    """
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=65536,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, safe_serialization=True)


def load_random_model(folder: Path, device: torch.device, dtype: str) -> LlamaForCausalLM:
    """The model that `save_random_model` wrote, its weights rounded to `dtype`."""
    chosen = chosen_dtype(dtype, auto=torch.float32)
    return LlamaForCausalLM.from_pretrained(folder, dtype=chosen).to(device).eval()
