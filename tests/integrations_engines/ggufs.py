"""GGUF files with the weights of another one, in other types: as llama.cpp's own tool makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize


def retyped(source: Path, target: Path, kind: str) -> Path:
    """The weights of `source` in F32, F16, Q8_0 or Q4_0; norms stay as they are."""
    reader, wanted = GGUFReader(source), GGMLQuantizationType[kind]
    writer = GGUFWriter(target, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        types = [GGUFValueType(each) for each in field.types]
        writer.add_key_value(name, field.contents(), types[0], sub_type=types[-1] if len(types) > 1 else None)
    for tensor in reader.tensors:
        plain = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        of = GGMLQuantizationType.F32 if plain.ndim == 1 else wanted
        writer.add_tensor(tensor.name, quantize(plain, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def written(model: Any, target: Path) -> Path:
    """A model of transformers in F32, without a vocabulary, as llama.cpp's `convert_hf_to_gguf.py` writes it: rows of
    queries and keys of Llama and Mistral in pairs."""
    config = model.config
    kind = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(target, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in model.state_dict().items():
        plain = tensor.float().numpy()
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            plain = plain.reshape(-1, 2, size // 2, *plain.shape[1:]).swapaxes(1, 2).reshape(plain.shape)
        writer.add_tensor(_renamed(name), np.ascontiguousarray(plain))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _renamed(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part, _, what = name.rpartition(".")
    if part in top:
        return f"{top[part]}.{what}"
    _, _, index, rest = part.split(".", 3)
    return f"blk.{index}.{NAMES[rest]}.{what}"
