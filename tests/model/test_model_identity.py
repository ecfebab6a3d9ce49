"""What a model is told apart by: all of its configuration that changes a key or a value, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.errors import ModelMismatch
from tests.model.test_rope import random_model

DOCUMENT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43]

MATTER: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rms_norm_eps": 1e-2}),
    ("llama", {"hidden_act": "gelu"}),
    ("granite", {"attention_multiplier": 0.25}),
    ("granite", {"residual_multiplier": 0.22}),
    ("granite", {"embedding_multiplier": 12.0}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("olmo", {"clip_qkv": 0.01}),
]


def engine(model_type: str, **changes: Any) -> Engine:
    """The same weights, but for what a change says of how they begin."""
    return Engine(random_model(model_type, **changes), None, name=model_type)


@pytest.mark.parametrize(("model_type", "change"), MATTER, ids=lambda subject: "-".join(subject) if subject else "")
def test_a_field_that_changes_keys_or_values_makes_another_model(model_type: str, change: dict[str, Any]) -> None:
    one, other = engine(model_type), engine(model_type, **change)
    assert one.identity.weights == other.identity.weights
    made, theirs = (subject.compress(DOCUMENT, policy="full") for subject in (one, other))
    changed = [
        not torch.equal(a.keys, b.keys) or not torch.equal(a.values, b.values)
        for a, b in zip(made.layers, theirs.layers, strict=True)
    ]
    assert any(changed), "the field has an effect"
    assert one.identity.fingerprint() != other.identity.fingerprint()
    with pytest.raises(ModelMismatch, match="attention differs"):
        other.attach(made)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_dropout": 0.5},
        {"initializer_range": 0.1},
        {"bos_token_id": 7},
        {"eos_token_id": [7, 8]},
        {"use_cache": False},
        {"pretraining_tp": 2},
        {"architectures": ["Other"]},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_field_without_effect_does_not(change: dict[str, Any]) -> None:
    assert engine("llama").identity.attention == engine("llama", **change).identity.attention


def test_a_field_that_says_its_default_says_nothing() -> None:
    """A new version of transformers may add fields, and write out what was left out."""
    assert engine("llama", mlp_bias=False, pretraining_tp=1).identity == engine("llama").identity
