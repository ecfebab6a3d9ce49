"""The recorded models of four architectures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from kvshelf.engine.engine import Engine

ORACLES = Path(__file__).parent / "oracles"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True)
class Oracle:
    """A recorded model, its document, and the positions kvpress keeps of it."""

    architecture: str
    model: PreTrainedModel
    engine: Engine
    ids: list[int]
    kept: dict[str, list[Tensor]]  # "snapkv@0.5" -> per layer [kv_heads, kept]


def load_oracle(architecture: str) -> Oracle:
    with safe_open(ORACLES / f"kvpress_{architecture}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        model_class = getattr(transformers, config["architectures"][0])
        model = model_class(model_class.config_class.from_dict(config)).eval()
        keys = sorted(file.keys())  # the handle itself cannot be iterated
        weights = {key.removeprefix("weights/"): file.get_tensor(key) for key in keys if key.startswith("weights/")}
        model.load_state_dict(weights, strict=True)
        kept: dict[str, list[Tensor]] = {}
        for key in (key for key in keys if key.startswith("kept/")):
            kept.setdefault(key.split("/")[1], []).append(file.get_tensor(key))
        ids = file.get_tensor("input_ids").flatten().tolist()
    return Oracle(architecture, model, Engine(model), ids, kept)


@pytest.fixture(scope="session", params=ARCHITECTURES)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    """Each recorded architecture in turn."""
    return load_oracle(request.param)


@pytest.fixture(scope="session")
def llama() -> Oracle:
    """The recorded Llama, for what does not depend on the architecture."""
    return load_oracle("llama")


@pytest.fixture
def all_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token counts: a random model learns nothing from a document, so that none would."""
    monkeypatch.setattr("kvshelf.engine.quality.decides", lambda own, *_: torch.ones_like(own, dtype=torch.bool))
