"""What a method needs is given to it whatever its class, even to a policy that derives from no class but `Policy`,
and to one that says `observes`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvshelf import Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.method import Needs
from kvshelf.methods.policies import POLICIES, ScoringPolicy
from kvshelf.methods.policies.base import Observes
from kvshelf.methods.policies.gate_file import GateHeader, Gates, gate_path
from kvshelf.methods.policies.h2o import H2O
from tests.methods.policies.gates import TRAINING

TEXT = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 20


@dataclass(frozen=True)
class Weighed(ScoringPolicy):
    """Keep the entries with the largest product with a trained direction of each layer."""

    name = "weighed"
    source = "a test"
    needs = Needs.GATES

    def score(self, layer):
        direction = layer.document.gates.layer(layer.place, layer.keys.device)["direction"]
        return layer.keys.float() @ direction


@pytest.fixture
def engine(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    monkeypatch.setitem(POLICIES, Weighed.name, Weighed)
    return Engine.load("kvshelf-tiny")


def test_needs_of_gates_are_met_by_the_file_of_the_policys_name(engine):
    with pytest.raises(PolicyUnsupported, match="policy 'weighed' needs gates trained for") as refusal:
        engine.compress(TEXT, policy="weighed")
    assert refusal.value.param == "policy"
    size = engine.preparer.geometry.head
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{i}.direction": torch.randn(size, generator=generator) for i in range(engine.preparer.geometry.layers)}
    about = {"weights": engine.identity.weights, "policy": "weighed", "family": "flag", "revision": 3, "width": 1}
    path = gate_path(engine.identity.weights, "weighed")
    path.write_bytes(Gates.of(GateHeader(training=TRAINING, **about), tensors).to_bytes())
    full, cache = engine.compress(TEXT, policy="full"), engine.compress(TEXT, policy="weighed", budget_tokens=40)
    keys = full.layers[1].keys.view(full.layers[1].kv_heads, full.num_tokens, -1).float()
    scores = keys @ tensors["1.direction"]
    free = torch.arange(full.num_tokens) >= engine.encode_document(TEXT).protected_prefix
    assert free.sum() < full.num_tokens, "the chat template's tokens stay"
    best = scores.masked_fill(~free, torch.inf).topk(40).indices.sort().values
    assert [own.tolist() for own in cache.layers[1].positions] == best.tolist()


def test_needs_of_gates_go_through_a_policy_around_another(engine):
    with pytest.raises(PolicyUnsupported, match="policy 'weighed' needs gates"):
        engine.compress(TEXT, policy="ada", base="weighed")


def test_needs_may_be_said_as_before():
    @dataclass(frozen=True)
    class Old(H2O):
        @property
        def observes(self):
            return super().observes | Observes.ROPE

    @dataclass(frozen=True)
    class Older(Old):
        observes = Observes.TEXT

    assert Old().needs == Needs.QUERIES | Needs.SUMS | Needs.ROPE
    assert Older().needs is Needs.TEXT
    assert Older().observes is Needs.TEXT
