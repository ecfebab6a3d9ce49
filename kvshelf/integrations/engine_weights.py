"""Whether another engine's weights are those of an exported cache: by norms and vocabulary, quantized or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from kvshelf.engine.files.prefix import norms_digest, vocabulary_digest
from kvshelf.errors import InvalidRequest, ModelMismatch


class _Weights(NamedTuple):
    """norms: by layer two, and the last. vocabulary: texts of tokens by id, None where it is not known."""

    norms: list[np.ndarray]
    vocabulary: list[str] | None
    rope_theta: float | None


def require_weights(about: Mapping[str, Any], path: Path) -> None:
    """Raises `ModelMismatch` unless the weights at `path` are those of the cache whose file says `about` of itself.

    path: a GGUF file for llama.cpp, a folder of safetensors for MLX. Raises `InvalidRequest` for anything else.
    """
    model, layers = about["model"], about["model"]["layers"]
    weights = _of_gguf(path, layers) if about["engine"] == "llama.cpp" else _of_folder(path, layers)
    rotation = json.loads(model["rope"])["parameters"].get("rope_theta")
    if weights.rope_theta is None or not np.isclose(weights.rope_theta, rotation, rtol=1e-6):
        raise _differs(about, path, f"rope_theta is {weights.rope_theta or 'not there'}, and the cache's {rotation}")
    if norms_digest(weights.norms, model["dtype"]) != model["norms"]:
        raise _differs(about, path, "the weights of its norms differ, which no quantization changes")
    vocabulary = model.get("vocabulary")
    if vocabulary and weights.vocabulary is not None:
        tokens = weights.vocabulary[: vocabulary["size"]]
        if vocabulary_digest(tokens) != vocabulary["digest"]:
            raise _differs(
                about, path, f"its {len(weights.vocabulary)} tokens are not the {vocabulary['size']} of the model"
            )


def _differs(about: Mapping[str, Any], path: Path, how: str) -> ModelMismatch:
    return ModelMismatch(
        f"{path} cannot answer from caches of {about['model']['name']!r}: {how}. Take a conversion of the weights that "
        "made the cache, or make the cache with these weights",
        param="engine_model",
    )


def _of_gguf(path: Path, layers: int) -> _Weights:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        fields = {
            name: field.contents()
            for name in ("general.architecture", "tokenizer.ggml.tokens")
            if (field := reader.get_field(name)) is not None
        }
        theta = reader.get_field(f"{fields['general.architecture']}.rope.freq_base")
        names = [f"blk.{i}.{part}_norm.weight" for i in range(layers) for part in ("attn", "ffn")]
        if f"blk.{layers}.attn_norm.weight" in tensors:
            raise KeyError("it has more layers")
        norms = [np.array(tensors[name].data, np.float32) for name in (*names, "output_norm.weight")]
    except (OSError, ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"{path} is no GGUF file of a model with {layers} layers: {error}", param="engine_model"
        ) from error
    return _Weights(norms, fields.get("tokenizer.ggml.tokens"), None if theta is None else theta.contents())


def _of_folder(path: Path, layers: int) -> _Weights:
    names = [f"model.layers.{i}.{part}_layernorm.weight" for i in range(layers) for part in ("input", "post_attention")]
    tensors = {*names, "model.norm.weight"}
    norms: dict[str, np.ndarray] = {}
    try:
        for file in sorted(path.glob("model*.safetensors")):
            with safe_open(file, "pt") as opened:
                norms |= {name: opened.get_tensor(name).float().numpy() for name in tensors & {*opened.keys()}}
        config = json.loads((path / "config.json").read_text())
        return _Weights([norms[name] for name in (*names, "model.norm.weight")], None, config.get("rope_theta"))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InvalidRequest(
            f"{path} is no folder of weights of a model with {layers} layers: {error}", param="engine_model"
        ) from error
