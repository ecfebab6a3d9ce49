"""Checkpoints of quantized weights: those that transformers makes plain are taken, and the others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.model.loading import load
from kvshelf.model.source import bundled_folder

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": None,
    "pad_token_id": None, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 24,
}  # fmt: skip
BLOCK = 32
NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def saved(family: str, folder: Path) -> dict[str, Tensor]:
    """The weights of a small random model, saved there with a tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny")).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def say(folder: Path, **quantized: object) -> None:
    """Have the configuration say how the weights are quantized."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))


def fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, a scale for each block of 32 x 32, and what both stand for."""
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), scales, (codes.float() * scales[:, None, :, None]).view(rows, columns)


def fp4(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of two experts: random bytes of two codes each, a power of two for 32 codes, and what they stand for."""
    codes = torch.randint(0, 16, (2, rows, columns // 32, 32))
    exponents = torch.randint(120, 124, (2, rows, columns // 32))
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    plain = NIBBLES[codes] * torch.exp2(exponents - 127.0)[..., None]
    return packed.to(torch.uint8), exponents.to(torch.uint8), plain.view(2, rows, columns)


def require_exact(model: Any) -> None:
    document, question = torch.randint(5, 500, (1, 60)), torch.randint(5, 500, (1, 9))
    engine = Engine(model, name="m")
    with torch.no_grad():
        expected = model(torch.cat([document, question], dim=1), use_cache=False).logits[:, 60:]
        with engine.attached(engine.compress(document[0].tolist(), policy="full")) as past:
            logits = model(question, **{CACHE_ARGUMENT: past}).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_fp8_becomes_what_it_stands_for(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # transformers asks for it
    weights, expected = saved("qwen3", tmp_path), {}
    for name in [name for name in weights if "proj" in name]:
        weights[name], weights[f"{name}_scale_inv"], expected[name] = fp8(weights[name])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    say(tmp_path, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])
    model, _ = load(str(tmp_path), device="cpu", dtype="auto")
    state = model.state_dict()
    for name, weight in expected.items():
        assert torch.equal(state[name], weight)
    require_exact(model)


def test_mxfp4_becomes_what_it_stands_for(tmp_path: Path) -> None:
    weights, expected = saved("gpt_oss", tmp_path), {}
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        _, columns, rows = weights.pop(name).shape
        weights[f"{name}_blocks"], weights[f"{name}_scales"], plain = fp4(rows, columns)
        expected[name] = plain.transpose(1, 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    say(tmp_path, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    model, _ = load(str(tmp_path), device="cpu", dtype="float32")
    state = model.state_dict()
    assert len(expected) == 4
    for name, weight in expected.items():
        assert torch.equal(state[name], weight)
    require_exact(model)


def test_packed_weights_of_compressed_tensors_become_what_they_stand_for(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    weights, expected = saved("qwen3", tmp_path), {}
    for name in [name for name in weights if "proj" in name]:
        weight = weights.pop(name)
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scale).round().clamp(-8, 7).int()
        nibbles = (codes + 8).view(len(codes), -1, 8) << torch.arange(0, 32, 4, dtype=torch.int32)
        weights[f"{name}_packed"], weights[f"{name}_scale"] = nibbles.sum(2).int(), scale
        weights[f"{name}_shape"] = torch.tensor(weight.shape)
        expected[name] = codes * scale
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    of_weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": of_weights}}
    packed: dict[str, Any] = {"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    say(tmp_path, quant_method="compressed-tensors", config_groups=groups, **packed)
    model, _ = load(str(tmp_path), device="cpu", dtype="auto")
    state = model.state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, atol=1e-7, rtol=0)
    require_exact(model)


def packed(codes: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """Codes `[rows, columns]` in 32-bit numbers along the rows, one at a time: place p has the column `order[p]`."""
    numbers = torch.zeros(len(codes), codes.shape[1] // len(order), dtype=torch.int64)
    for place, column in enumerate(order):
        numbers |= codes[:, column :: len(order)].long() << bits * place
    return (numbers + 2**31) % 2**32 - 2**31


CASES = [
    ("gptq", 4, "gptq", 16, True), ("gptq", 8, "gptq_v2", 16, True), ("gptq", 2, "gptq", 16, True),
    ("gptq", 4, "gptq", -1, False), ("gptq", 8, "gptq", 16, False), ("awq", 4, "gemm", 16, False),
]  # fmt: skip
"""Method, bits, layout, inputs of a group (-1: all), and whether a group's inputs stand anywhere."""


def save_packed(folder: Path, method: str, bits: int, form: str, group: int, by_size: bool) -> dict[str, Tensor]:
    """Random codes of a small model, in two files with an index, and what they stand for. A zero of 0 is among them,
    which GPTQ's first layout stores as the greatest code."""
    weights, expected, most = saved("qwen3", folder), {}, 2**bits
    for name in [name.removesuffix(".weight") for name in weights if "proj" in name]:
        out, inputs = weights.pop(f"{name}.weight").shape
        size = inputs if group == -1 else group
        codes, zeros = torch.randint(most, (inputs, out)), torch.randint(most, (inputs // size, out))
        zeros[0, :2] = torch.tensor([0, most - 1])
        scales = (torch.rand(inputs // size, out) / most / 4).half()
        groups = torch.arange(inputs) // size
        if method == "awq":
            order: tuple[int, ...] = (0, 2, 4, 6, 1, 3, 5, 7)
            weights[f"{name}.qweight"] = packed(codes, bits, order).int()
            weights[f"{name}.qzeros"] = packed(zeros, bits, order).int()
        else:
            order = tuple(range(32 // bits))
            stored = (zeros - int(form == "gptq")) % most
            weights[f"{name}.qweight"] = packed(codes.T, bits, order).T.contiguous().int()
            weights[f"{name}.qzeros"] = packed(stored, bits, order).int()
            if by_size:  # by the size of their activations
                groups = groups[torch.randperm(inputs)]
                weights[f"{name}.g_idx"] = groups.int()
        weights[f"{name}.scales"] = scales
        expected[f"{name}.weight"] = ((codes - zeros[groups]) * scales[groups].float()).half().T
    (folder / "model.safetensors").unlink()
    files = {"of": {name for name in weights if "proj" in name}}
    files["other"] = weights.keys() - files["of"]
    for file, names in files.items():
        save_file({name: weights[name] for name in names}, folder / f"{file}.safetensors", metadata={"format": "pt"})
    index = {"weight_map": {name: f"{file}.safetensors" for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    say(folder, quant_method=method, bits=bits, group_size=group, checkpoint_format=form)
    return expected


def leave_others(folder: Path) -> None:
    """Zeros under the names of the packed weights, in a file that is not the checkpoint's."""
    weights = load_file(folder / "of.safetensors")
    save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, folder / "zzz.safetensors")


@pytest.mark.parametrize(("method", "bits", "form", "group", "by_size"), CASES)
def test_codes_of_gptq_and_awq_become_what_they_stand_for(
    method: str, bits: int, form: str, group: int, by_size: bool, tmp_path: Path
) -> None:
    expected = save_packed(tmp_path, method, bits, form, group, by_size)
    leave_others(tmp_path)
    model, _ = load(str(tmp_path), device="cpu", dtype="float32")
    plain = model.state_dict()
    assert len(expected) == 14
    for name, weight in expected.items():
        torch.testing.assert_close(plain[name], weight.float(), atol=0, rtol=2e-3)
    require_exact(model)


def test_without_an_index_the_one_file_is_read(tmp_path: Path) -> None:
    expected = save_packed(tmp_path, "gptq", 4, "gptq", 16, by_size=True)
    (tmp_path / "model.safetensors.index.json").unlink()
    weights = load_file(tmp_path / "of.safetensors") | load_file(tmp_path / "other.safetensors")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    leave_others(tmp_path)
    plain = load(str(tmp_path), device="cpu", dtype="float32")[0].state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(plain[name], weight.float(), atol=0, rtol=2e-3)


@pytest.mark.parametrize(
    "quantized", [{"quant_method": "gptq", "bits": 3}, {"quant_method": "awq", "bits": 4, "version": "gemv"}]
)
def test_other_layouts_of_packed_weights_are_refused_by_name(quantized: dict[str, Any], tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    say(tmp_path, **quantized)
    with pytest.raises(PolicyUnsupported, match=r"kvshelf reads .*take a checkpoint of these, of compressed-tensors"):
        load(str(tmp_path), device="cpu", dtype="auto")


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("part", "value", "about"),
    [
        ("qzeros", None, "no qzeros"),
        ("scales", None, "no scales"),
        ("qweight", torch.zeros(0, 64, dtype=torch.int32), "qweight is"),
        ("qweight", torch.zeros(8, dtype=torch.int32), "qweight is"),
        ("qweight", torch.zeros(16, 128, dtype=torch.int32), "qweight is of"),
        ("qzeros", torch.zeros(4, 1, dtype=torch.int32), "qzeros are"),
        ("scales", torch.zeros(3, 64), "scales"),
        ("scales", torch.zeros(4, 64, dtype=torch.int32), "scales torch.int32"),
        ("g_idx", torch.full((64,), 4), "up to 4"),
    ],
)
def test_packed_weights_that_do_not_fit_are_refused(
    method: str, part: str, value: Tensor | None, about: str, tmp_path: Path
) -> None:
    save_packed(tmp_path, method, 4, "gptq" if method == "gptq" else "gemm", 16, by_size=False)
    layer, file = "model.layers.0.mlp.down_proj", tmp_path / "of.safetensors"
    weights = load_file(file)
    weights.pop(f"{layer}.{part}", None)
    if value is not None:
        weights[f"{layer}.{part}"] = value
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=rf"layers\.0\.mlp\.down_proj has no packed weights of .*{about}"):
        load(str(tmp_path), device="cpu", dtype="auto")


def test_packed_weights_are_of_one_device(tmp_path: Path) -> None:
    save_packed(tmp_path, "gptq", 4, "gptq", 16, by_size=False)
    with pytest.raises(PolicyUnsupported, match="unpacked in one process and on one device"):
        load(str(tmp_path), device="spread", dtype="auto")


def test_what_stays_quantized_is_refused_by_name(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    say(tmp_path, quant_method="bitsandbytes", load_in_4bit=True)
    with pytest.raises(PolicyUnsupported, match=r"are quantized \(bitsandbytes\), .*: compressed-tensors, fp8, mxfp4"):
        load(str(tmp_path), device="cpu", dtype="auto")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    model.is_quantized = True  # as transformers marks them
    with pytest.raises(PolicyUnsupported, match="weights of this Qwen3ForCausalLM are quantized"):
        Engine(model, name="m")


@pytest.mark.parametrize("remote", [False, True])
def test_pickles_and_remote_code_are_refused(remote: bool, tmp_path: Path) -> None:
    weights = saved("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if remote:
        own = {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Model"}
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": own}))
        (tmp_path / "code.py").write_text("raise SystemExit('this code was run')")
    else:
        (tmp_path / "model.safetensors").unlink()
        torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        load(str(tmp_path), device="cpu", dtype="auto")
