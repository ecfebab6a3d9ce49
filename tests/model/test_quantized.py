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
            found = model(question, **{CACHE_ARGUMENT: past}).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_fp8_becomes_what_it_stands_for(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # transformers asks for it
    weights, expected = saved("qwen3", tmp_path), {}
    for name in [name for name in weights if "proj" in name]:
        weights[name], weights[f"{name}_scale_inv"], expected[name] = fp8(weights[name])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    say(tmp_path, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])
    model, _ = load(str(tmp_path), device="cpu", dtype="auto")
    found = model.state_dict()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)
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
    found = model.state_dict()
    assert len(expected) == 4
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)
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
    found = model.state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-7, rtol=0)
    require_exact(model)


def packed(codes: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """Codes `[rows, columns]` in 32-bit numbers along the rows, one at a time: place p has the column `order[p]`."""
    numbers = torch.zeros(len(codes), codes.shape[1] // len(order), dtype=torch.int64)
    for place, column in enumerate(order):
        numbers |= codes[:, column :: len(order)].long() << bits * place
    return (numbers + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize(
    ("method", "bits", "form"), [("gptq", 4, "gptq"), ("gptq", 8, "gptq_v2"), ("gptq", 2, "gptq"), ("awq", 4, "gemm")]
)
def test_codes_of_gptq_and_awq_become_what_they_stand_for(method: str, bits: int, form: str, tmp_path: Path) -> None:
    weights, expected, most, size = saved("qwen3", tmp_path), {}, 2**bits, 16
    for name in [name.removesuffix(".weight") for name in weights if "proj" in name]:
        out, inputs = weights.pop(f"{name}.weight").shape
        codes, zeros = torch.randint(most, (inputs, out)), torch.randint(1, most, (inputs // size, out))
        scales = torch.rand(inputs // size, out) / most / 4
        groups = torch.arange(inputs) // size
        if method == "awq":
            order: tuple[int, ...] = (0, 2, 4, 6, 1, 3, 5, 7)
            weights[f"{name}.qweight"] = packed(codes, bits, order).int()
            weights[f"{name}.qzeros"] = packed(zeros, bits, order).int()
        else:
            groups = groups[torch.randperm(inputs)]  # by the size of their activations
            order = tuple(range(32 // bits))
            weights[f"{name}.qweight"] = packed(codes.T, bits, order).T.contiguous().int()
            weights[f"{name}.qzeros"] = packed(zeros - int(form == "gptq"), bits, order).int()
            weights[f"{name}.g_idx"] = groups.int()
        weights[f"{name}.scales"] = scales
        expected[f"{name}.weight"] = ((codes - zeros[groups]) * scales[groups]).T
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    say(tmp_path, quant_method=method, bits=bits, group_size=size, checkpoint_format=form)
    model, _ = load(str(tmp_path), device="cpu", dtype="auto")
    plain = model.state_dict()
    assert len(expected) == 14
    for name, weight in expected.items():
        torch.testing.assert_close(plain[name], weight, atol=1e-7, rtol=1e-6)
    require_exact(model)


@pytest.mark.parametrize(
    "quantized", [{"quant_method": "gptq", "bits": 3}, {"quant_method": "awq", "bits": 4, "version": "gemv"}]
)
def test_other_layouts_of_packed_weights_are_refused_by_name(quantized: dict[str, Any], tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    say(tmp_path, **quantized)
    with pytest.raises(PolicyUnsupported, match=r"kvshelf reads .*take a checkpoint of these, of compressed-tensors"):
        load(str(tmp_path), device="cpu", dtype="auto")


def test_packed_weights_that_lack_a_part_are_refused(tmp_path: Path) -> None:
    weights = saved("qwen3", tmp_path)
    weights["model.layers.0.mlp.down_proj.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    say(tmp_path, quant_method="gptq", bits=4)
    with pytest.raises(InvalidRequest, match=r"layers\.0\.mlp\.down_proj has no packed weights of gptq"):
        load(str(tmp_path), device="cpu", dtype="auto")
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
