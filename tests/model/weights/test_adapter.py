"""LoRA adapters, saved by peft itself: merged into the weights, never mixed up with others."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from kvshelf import Engine
from kvshelf.artifact.cache import CompressedCache
from kvshelf.errors import InvalidRequest, ModelMismatch
from kvshelf.model.loading import load, require_shared
from kvshelf.model.weights.adapter import CONFIG, WEIGHTS, require_none, split

DOCUMENT = "Ana keeps the ledger of the Larkfield Tool Library in a green book. " * 12
QUESTIONS = ("What does Ana keep?", "Where is the ledger?", "Who founded it?", "How many are there?")


def save_adapter(folder: Path, seed: int, **options: Any) -> str:
    """The name of the bundled model with a random adapter, which changes what it answers."""
    torch.manual_seed(seed)
    model, _ = load("kvshelf-tiny", device="cpu", dtype="float32")
    fields = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **fields | options))
    adapted.save_pretrained(str(folder))
    return f"kvshelf-tiny+{folder}"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return ["kvshelf-tiny", *(save_adapter(folder / f"adapter-{seed}", seed) for seed in (1, 2))]


@pytest.fixture(scope="module")
def engines(names: list[str]) -> list[Engine]:
    return [Engine.load(name, device="cpu", dtype="float32") for name in names]


def test_the_merged_model_computes_what_peft_computes(names: list[str]) -> None:
    ids = torch.arange(3, 60).unsqueeze(0)
    plain, _ = load("kvshelf-tiny", device="cpu", dtype="float32")
    _, folder = split(names[1])
    with torch.no_grad():
        own = load(names[1], device="cpu", dtype="float32")[0](ids).logits
        theirs = peft.PeftModel.from_pretrained(plain, str(folder))(ids).logits
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_two_hundred_questions_under_three_adapters_cross_nowhere(engines: list[Engine]) -> None:
    """Each cache is answered by its own model as it answers alone, and refused by the others."""

    def answer(engine: Engine, cache: CompressedCache, question: str) -> list[int]:
        return engine.answer(cache, question, max_new_tokens=6).token_ids

    caches = [engine.compress(DOCUMENT, policy="full") for engine in engines]
    alone = [[answer(engine, cache, text) for text in QUESTIONS] for engine, cache in zip(engines, caches, strict=True)]
    assert alone[0] != alone[1] != alone[2] != alone[0]
    blobs = [cache.to_bytes() for cache in caches]
    draw = random.Random(5)
    for _ in range(200):
        own, other, question = draw.randrange(3), draw.randrange(3), draw.randrange(len(QUESTIONS))
        cache = CompressedCache.from_bytes(blobs[own])
        if other == own:
            assert answer(engines[own], cache, QUESTIONS[question]) == alone[own][question]
        else:
            with pytest.raises(ModelMismatch, match="weights differs"):
                answer(engines[other], cache, QUESTIONS[question])


def test_the_identity_is_of_the_weights_and_not_of_the_name(
    engines: list[Engine], names: list[str], tmp_path: Path
) -> None:
    assert len({engine.identity.fingerprint() for engine in engines}) == 3
    again = Engine.load(save_adapter(tmp_path / "the same under another name", 1), device="cpu", dtype="float32")
    assert again.identity.fingerprint() == engines[1].identity.fingerprint()
    assert (again.identity.name, engines[1].identity.name) == (
        f"kvshelf-tiny+{tmp_path}/the same under another name",
        names[1],
    )


def test_a_folder_with_a_plus_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "a+b"
    folder.mkdir()
    assert split(str(folder)) == (str(folder), None)
    assert split("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)


def test_what_is_no_adapter_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(InvalidRequest, match=message) as caught:
            Engine.load(name, device="cpu")
        assert caught.value.param == "model"

    refused(f"kvshelf-tiny+{tmp_path}", f"no folder with {CONFIG} and {WEIGHTS}")
    (tmp_path / WEIGHTS).touch()
    (tmp_path / CONFIG).write_text("{")
    refused(f"kvshelf-tiny+{tmp_path}", "cannot be read")
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "PROMPT_TUNING"}))
    refused(f"kvshelf-tiny+{tmp_path}", "of the kind 'PROMPT_TUNING'")


def test_an_adapter_of_another_model_or_cut_off_is_refused(names: list[str], tmp_path: Path) -> None:
    _, folder = split(names[1])
    assert folder is not None
    for file in (CONFIG, WEIGHTS):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])
    with pytest.raises(InvalidRequest, match="cannot be merged"):
        Engine.load(f"kvshelf-tiny+{tmp_path}", device="cpu")
    fields = json.loads((folder / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(fields | {"target_modules": ["query_key_value"]}))
    (tmp_path / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    with pytest.raises(InvalidRequest, match="cannot be merged"):
        Engine.load(f"kvshelf-tiny+{tmp_path}", device="cpu")
    (tmp_path / CONFIG).write_text(json.dumps(fields | {"r": 8}))
    with pytest.raises(InvalidRequest, match="cannot be merged"):
        Engine.load(f"kvshelf-tiny+{tmp_path}", device="cpu")


def test_peers_of_the_benches_take_no_adapter(names: list[str]) -> None:
    require_none(names[0], "kvpress")
    with pytest.raises(InvalidRequest, match="kvpress does not load the adapter"):
        require_none(names[1], "kvpress")


def test_processes_that_share_a_model_take_no_adapter(names: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="merged in one process"):
        require_shared(names[1], 2, "cpu")
