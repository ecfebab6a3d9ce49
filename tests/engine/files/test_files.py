"""Files of llama.cpp and mlx-lm, read as their engines read them. That these answer: tests/integrations_engines."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors import safe_open
from safetensors.torch import load_file

from kvshelf.engine.engine import Engine
from kvshelf.engine.files import llamacpp, mlx
from kvshelf.engine.files.export import engine_file, export_file
from kvshelf.errors import InvalidRequest, KvshelfError, ModelMismatch, PolicyUnsupported
from kvshelf.integrations.engine_weights import require_weights

TEXT = "The harbour master keeps the tide tables in a green book. " * 12
NUMPY = {0: np.float32, 1: np.float16}


@pytest.fixture(scope="module")
def cache(tiny: Engine) -> Any:
    return tiny.compress(TEXT, policy="keydiff", compression_ratio=0.5)


def read(path: Path) -> dict[str, Any]:
    """The state of a sequence, field by field as llama.cpp reads it."""
    data, place = path.read_bytes(), 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal place
        place += struct.calcsize(form)
        return struct.unpack_from(form, data, place - struct.calcsize(form))

    assert take("<II") == (0x67677371, 3)
    (count,) = take("<I")
    ids = take(f"<{count}i")
    assert take("<II") == (1, count), "one stream, as many cells as tokens"
    cells = [take("<iIi") for _ in range(count)]
    transposed, layers = take("<II")
    assert not transposed
    rows = []
    for _ in range(2 * layers):
        kind, size = take("<iQ")
        flat = np.frombuffer(data, NUMPY[kind], count * size // NUMPY[kind]().itemsize, place)
        rows.append(torch.from_numpy(flat.reshape(count, -1).copy()))
        place += count * size
    return {"ids": ids, "cells": cells, "keys": rows[:layers], "values": rows[layers:], "rest": data[place:]}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_llama_cpp_reads_the_exported_prefix(tiny: Engine, cache: Any, tmp_path: Path, dtype: str) -> None:
    found = read(export_file(tiny, cache, tmp_path / "a.bin", "llama.cpp", dtype=dtype))
    past = tiny.export(cache)
    count = past.get_seq_length()
    assert found["cells"] == [(place, 1, 0) for place in range(count)]
    for layer, keys, values in zip(past.layers, found["keys"], found["values"], strict=True):
        heads, size = layer.keys.shape[1], layer.keys.shape[3]
        wanted = layer.keys[0].to(getattr(torch, dtype))
        ours = keys.view(count, heads, size // 2, 2).transpose(0, 1)
        torch.testing.assert_close(ours[..., 0], wanted[..., : size // 2], atol=0, rtol=0)
        torch.testing.assert_close(ours[..., 1], wanted[..., size // 2 :], atol=0, rtol=0)
        torch.testing.assert_close(
            values.view(count, heads, -1).transpose(0, 1), layer.values[0].to(values.dtype), atol=0, rtol=0
        )
    assert found["rest"].endswith(b"KVENGIN\n"), "llama.cpp stops before what the file says of itself"


def test_mlx_reads_the_exported_prefix(tiny: Engine, cache: Any, tmp_path: Path) -> None:
    path = export_file(tiny, cache, tmp_path / "a.safetensors", "mlx", engine_model="mlx-community/tiny")
    tensors, past = load_file(path), tiny.export(cache)
    for index, layer in enumerate(past.layers):
        torch.testing.assert_close(tensors[f"{index}.0"], layer.keys, atol=0, rtol=0)
        torch.testing.assert_close(tensors[f"{index}.1"], layer.values, atol=0, rtol=0)
        assert tensors[f"{index}.2"].item() == past.get_seq_length()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["0.model"] == "mlx-community/tiny"
    assert json.loads(metadata["0.tokenizer_config"]) == {}
    assert [metadata[f"1.{index}"] for index in range(len(past.layers))] == ["KVCache"] * len(past.layers)
    assert (metadata["2.0"], metadata["2.1.0"], metadata["2.1.1"]) == ("", "0.2", "scalar")


@pytest.mark.parametrize(("to", "about_file"), [("llama.cpp", llamacpp.about_file), ("mlx", mlx.about_file)])
def test_a_file_says_of_what_it_is(tiny: Engine, cache: Any, tmp_path: Path, to: Any, about_file: Any) -> None:
    path = export_file(tiny, cache, tmp_path / "file", to)
    about = about_file(path)
    assert about["model"]["fingerprint"] == tiny.identity.fingerprint()
    assert about["model"]["template"] == tiny.identity.template
    assert (about["policy"], about["stand_ins"], about["entries"]) == ("keydiff", True, cache.kept_tokens)
    asked = tiny.text.decode(tiny.encode_query(cache, "Which book?"))
    assert about["question"]["before"] + "Which book?" + about["question"]["after"] == asked
    path.write_bytes(path.read_bytes()[:-40] if to == "llama.cpp" else b"{}")
    with pytest.raises(InvalidRequest, match="is no file that"):
        about_file(path)


def test_the_tokens_are_the_document_s_or_those_of_no_other_cache(tiny: Engine, cache: Any, tmp_path: Path) -> None:
    """llama-server finds what a slot holds by its tokens: equal stand-ins would be taken for the same document."""
    whole = tiny.compress(TEXT, policy="full")
    ids = tiny.encode_document(TEXT).token_ids
    assert list(read(export_file(tiny, whole, tmp_path / "a", "llama.cpp", document=ids))["ids"]) == ids
    other = tiny.compress(TEXT + "And a red one.", policy="keydiff", compression_ratio=0.5)
    stand_ins = [
        read(export_file(tiny, each, tmp_path / "b", "llama.cpp", document=ids))["ids"] for each in (cache, other)
    ]
    assert stand_ins[0][:8] != stand_ins[1][:8]
    assert all(0 <= id < tiny.model.config.vocab_size for id in stand_ins[0])


@pytest.mark.parametrize("to", ["llama.cpp", "mlx"])
@pytest.mark.parametrize("policy", ["kvzip", "cake", "ems"])
def test_a_cache_that_is_no_prefix_is_refused(tiny: Engine, tmp_path: Path, to: Any, policy: str) -> None:
    ragged = tiny.compress(TEXT, policy=policy, compression_ratio=0.5)
    with pytest.raises(PolicyUnsupported, match="cannot be exported"):
        export_file(tiny, ragged, tmp_path / "file", to)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "param", "error"),
    [
        ({"to": "sglang"}, "to", InvalidRequest),
        ({"to": "mlx", "dtype": "int8"}, "dtype", InvalidRequest),
        ({"to": "llama.cpp", "engine_model": "x.gguf"}, "engine_model", InvalidRequest),
    ],
)
def test_wrong_options_are_refused(tiny: Engine, cache: Any, options: Any, param: str, error: type) -> None:
    with pytest.raises(error) as refused:
        engine_file(tiny, cache, **options)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model_type", "phi", "models of the type 'phi'"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "RoPE of the kind 'yarn'"),
    ],
)
def test_a_model_that_was_not_compared_is_refused(
    tiny: Engine, cache: Any, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, named: str
) -> None:
    changed = copy.deepcopy(tiny.model.config)
    object.__setattr__(changed, field, value)
    monkeypatch.setattr(tiny.model, "config", changed)
    for to in ("llama.cpp", "mlx"):
        with pytest.raises(PolicyUnsupported, match=named):
            engine_file(tiny, cache, to)


def test_numbers_beyond_a_dtype_are_refused(tiny: Engine, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tiny.export(cache)
    large.layers[1].values[0, 0, 0, 0] = 7e4
    monkeypatch.setattr(Engine, "export", lambda *_: large)
    with pytest.raises(InvalidRequest, match="the values of layer 1 reach 7e"):
        engine_file(tiny, cache, "llama.cpp")
    engine_file(tiny, cache, "llama.cpp", dtype="bfloat16")


def gguf_of(
    engine: Engine, path: Path, *, theta: float, scale: float = 1.0, swap: bool = False, layers: int = 0
) -> Path:
    """What is compared of a GGUF file: norms, vocabulary, RoPE."""
    writer = GGUFWriter(path, "llama")
    writer.add_rope_freq_base(theta)
    decoder = engine.text.decoder()
    tokens = [decoder.id_to_token(id) for id in range(decoder.get_vocab_size())]
    writer.add_token_list([*reversed(tokens)] if swap else tokens)
    base = engine.model.base_model
    for index, layer in enumerate(base.layers[: layers or None]):
        for name, norm in (("attn", layer.input_layernorm), ("ffn", layer.post_attention_layernorm)):
            writer.add_tensor(f"blk.{index}.{name}_norm.weight", norm.weight.detach().float().numpy() * scale)
    writer.add_tensor("output_norm.weight", base.norm.weight.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changes", "named", "error"),
    [
        ({}, "", None),
        ({"scale": 1.001}, "the weights of its norms differ", ModelMismatch),
        ({"swap": True}, "are not the .* of the model", ModelMismatch),
        ({"theta": 5e3}, "rope_theta is 5000", ModelMismatch),
        ({"layers": 1}, "no GGUF file of a model with", InvalidRequest),
    ],
)
def test_a_gguf_of_other_weights_is_refused(
    tiny: Engine, cache: Any, tmp_path: Path, changes: Any, named: str, error: type[KvshelfError] | None
) -> None:
    about = llamacpp.about_file(export_file(tiny, cache, tmp_path / "a.bin", "llama.cpp"))
    theta = tiny.model.config.rope_parameters["rope_theta"]
    path = gguf_of(tiny, tmp_path / "m.gguf", **{"theta": theta, **changes})
    if error is None:
        require_weights(about, path)
        return
    with pytest.raises(error, match=named):
        require_weights(about, path)
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(InvalidRequest, match="is no GGUF file"):
        require_weights(about, tmp_path / "text.gguf")
