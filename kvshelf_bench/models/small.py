"""A small random model of any causal model type of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TYPES: Final[tuple[str, ...]] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The causal model types that the installed transformers knows."""

WINDOW: Final = 24
VOCABULARY: Final = 512

_LAYERS: Final = 4
_MOST_PARAMETERS: Final = 20_000_000
_SPREAD: Final = 0.05

_USUAL: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "is_decoder": True, "rotary_dim": 8,
    "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2,
    "hidden_size_global": 64, "vocab_size_per_layer_input": VOCABULARY,
    "ffn_dim": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_layers": 2, "decoder_layers": _LAYERS,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "first_k_dense_replace": 2,
    "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "mamba_chunk_size": 32,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16,
}  # fmt: skip
"""Fields by the names that most configurations give them. A configuration takes those that it knows."""

_LATENT: Final[Mapping[str, Any]] = {"num_key_value_heads": 4, "head_dim": None}
"""With latent attention (MLA) every head has keys of its own, and the size of a head follows from its parts."""

_ROPES: Final = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}

_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "dots3_note_text": {"shared_experts_intermediate_size": 64, "head_dim": 24, "per_layer_config": {}},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": WINDOW, "floor_scale": 16},
    "longcat_flash": {
        "head_dim": 8,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 64,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "minimax": {"sliding_window": None, "block_size": 32},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": ["full_attention"] * _LAYERS},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "xlnet": {"d_head": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What single types need in place of the usual fields, or besides them."""


class NotBuilt(Exception):
    """There is no small model of a type; the message says why."""


def small_model(model_type: str) -> PreTrainedModel:
    """A random model of this type, in fp32 on the CPU, the same in each call. Raises `NotBuilt`, and whatever the
    type's configuration or model raises where it cannot be as small."""
    config = _small(CONFIG_MAPPING[model_type](), _FIELDS.get(model_type, {}))
    with torch.device("meta"):  # where a model that turns out large takes no memory
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise NotBuilt(f"its small model still has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms, biases and sinks begin as constants, which would hide what becomes of them
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += _SPREAD * torch.randn(parameter.shape)
    return model.requires_grad_(False)


def _small(usual: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """A small configuration of the class of `usual`, with layers of every kind that `usual` has."""
    fields = usual.to_dict()
    known = {*fields, *usual.attribute_map}
    rules = {**_USUAL, **(_LATENT if "kv_lora_rank" in known else {})}
    values = {name: value for name, value in rules.items() if name in known and value is not None}
    sizes = {usual.attribute_map.get(name, name): value for name, value in values.items()} | dict(overrides)
    for name in usual.sub_configs:
        part = getattr(usual, name, None)
        if part is not None and name not in overrides:
            sizes[name] = _small(part, _FIELDS.get(part.model_type, {})).to_dict()
    config = type(usual)(**sizes)
    kinds = list(dict.fromkeys(fields.get("layer_types") or ()))
    if kinds == ["full_attention"] and "sliding_window" in known:
        kinds = ["sliding_attention", "full_attention"]
    if "layer_types" in overrides or set(kinds) <= set(getattr(config, "layer_types", None) or ()):
        return config
    return type(usual)(**sizes, layer_types=list(islice(cycle(kinds), config.num_hidden_layers)))
