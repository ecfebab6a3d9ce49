"""Checkpoints of models that are made of several: their language part says about a text what the whole says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, AutoTokenizer

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.model.loading import load, skeleton
from kvshelf.model.prepacking import prepack
from kvshelf.model.source import bundled_folder
from tests.amounts import few

TEXT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": None, "sliding_window": 24,
}  # fmt: skip
SEES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
    "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14, "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "vision_output_dim": 32, "projector_input_dim": 32,
    "projector_output_dim": 32,
}  # fmt: skip
THREE_POSITIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "sliding_window": None,
    "layer_types": ["full_attention"] * 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mistral3": {"sliding_window": None},
    "qwen2_5_vl": THREE_POSITIONS,
    "qwen3_vl": THREE_POSITIONS,
    "llama4": {"attention_chunk_size": 24, "floor_scale": 16, "intermediate_size_mlp": 128, "num_local_experts": 2},
    "aya_vision": {"layer_types": ["sliding_attention", "full_attention"] * 2},  # its decoder's own class scales logits
    "paligemma": {},
    "blip-2": {"word_embed_proj_dim": 64, "ffn_dim": 128},
}
ATTACHED = [family for family in FAMILIES if family not in ("paligemma", "blip-2")]


def _sized(usual: Any, sizes: dict[str, Any], **more: object) -> Any:
    known = {*usual.to_dict(), *usual.attribute_map}
    return type(usual)(**{name: value for name, value in {**sizes, **more}.items() if name in known})


def made(family: str) -> Any:
    usual = CONFIG_MAPPING[family]()
    parts = {name: _sized(getattr(usual, name), SEES).to_dict() for name in usual.sub_configs if name != "text_config"}
    text = _sized(usual.text_config, TEXT, **FAMILIES[family])
    named = {
        name: 500 + i for i, name in enumerate(sorted(usual.to_dict())) if name.endswith(("token_id", "token_index"))
    }
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(type(usual)(**parts, text_config=text.to_dict(), **named)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny")).save_pretrained(folder)
    return str(folder)


def loaded(folder: str) -> Any:
    return load(folder, device="cpu", dtype="auto")[0]


def ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(20, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    whole = model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model  # takes no text
    with torch.no_grad():
        return whole(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", few(3, ATTACHED))
def test_a_stored_document_says_what_the_whole_model_says(family: str, tmp_path: Path) -> None:
    whole, document, question = made(family), ids(100), ids(30, seed=2)
    model = loaded(saved(whole, tmp_path))
    expected = logits_of(whole, document + question)
    torch.testing.assert_close(logits_of(model, document + question), expected, atol=1e-6, rtol=1e-6)
    engine = Engine(model, name="m")
    cache = CompressedCache.from_bytes(engine.compress(document, policy="full").to_bytes())
    logits = []
    with torch.no_grad(), engine.attached(cache) as past:
        for piece in torch.split(torch.tensor([question]), [9, 1, 20], dim=1):
            logits.append(engine.model(piece, **{CACHE_ARGUMENT: past}).logits[0])
    torch.testing.assert_close(torch.cat(logits), expected[100:], atol=2e-5, rtol=1e-4)
    said = []
    for _ in range(12):
        said.append(int(logits_of(whole, document + question + said)[-1].argmax()))
    assert engine.answer(cache, question, max_new_tokens=12).token_ids == said
    reduced = engine.compress(document, policy="keydiff", compression_ratio=0.5)
    assert engine.answer(reduced, question, max_new_tokens=3).usage.completion_tokens == 3
    prepack(engine.model)
    recorded = Engine(engine.model, name="m")
    assert recorded.passes.program is not None or family in (
        "llama4",
        "qwen2_5_vl",
    )  # with old versions of transformers
    assert recorded.answer(recorded.compress(document, policy="full"), question, max_new_tokens=12).token_ids == said


def test_three_equal_positions_are_one_rotation_that_can_be_undone(tmp_path: Path) -> None:
    engine = Engine(loaded(saved(made("qwen3_vl"), tmp_path)), name="m")
    assert engine.rope is not None
    cache = engine.compress(ids(100), policy="expected_attention", compression_ratio=0.5)
    keys = engine.export(cache, positions="contiguous").layers[0].keys
    assert keys.shape == (1, 2, 50, 16)


def test_the_identity_is_that_of_the_language_part(tmp_path: Path) -> None:
    whole = made("gemma3")
    first = Engine(loaded(saved(whole, tmp_path / "first")), name="m").identity
    with torch.no_grad():
        for parameter in whole.model.vision_tower.parameters():
            parameter += 1
    assert Engine(loaded(saved(whole, tmp_path / "other images")), name="m").identity == first
    with torch.no_grad():
        whole.model.language_model.layers[2].mlp.up_proj.weight[0, 0] += 1
    assert Engine(loaded(saved(whole, tmp_path / "other words")), name="m").identity.weights != first.weights


def test_estimates_need_no_weights(tmp_path: Path) -> None:
    whole = made("gemma3")
    outline = skeleton(saved(whole, tmp_path))
    assert type(outline).__name__ == "Gemma3ForCausalLM"
    assert all(parameter.is_meta for parameter in outline.parameters())
    assert outline.num_parameters() == whole.model.language_model.num_parameters()  # the matrix of logits is tied


@pytest.mark.parametrize(
    ("family", "said"), [("paligemma", "is not causal"), ("blip-2", "takes no text alone: .*pixel_values")]
)
def test_models_that_do_not_go_on_from_a_text_alone_are_refused(family: str, said: str, tmp_path: Path) -> None:
    folder = saved(made(family), tmp_path)
    with pytest.raises(PolicyUnsupported, match=said):
        Engine(loaded(folder), name="m").compress(ids(20), policy="full")


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("gemma3", "layers.1.mlp.up_proj.weight"),
        ("mistral3", "embed_tokens.weight"),
        ("llama4", "norm.weight"),
    ],
)
def test_checkpoints_that_lack_weights_of_the_language_part_are_refused(family: str, part: str, tmp_path: Path) -> None:
    folder = saved(made(family), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    logits = next(name for name in weights if name.endswith(part) and "vision" not in name)
    del weights[logits]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyUnsupported, match=rf"lacks 1 weights of \w+ \(.*{part.split('.')[-2]}"):
        load(folder, device="cpu", dtype="auto")


def test_weights_of_other_parts_may_be_missing(tmp_path: Path) -> None:
    folder = saved(made("gemma3"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "vision" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    Engine(loaded(folder), name="m").compress(ids(20), policy="full")
