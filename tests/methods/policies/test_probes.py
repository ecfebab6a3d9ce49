"""Probe passes: what runs behind a document sees it and itself, changes nothing of it, and is not stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.errors import DocumentTooLong, InvalidRequest
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.view import ProbePass


@pytest.fixture(scope="module")
def tiny():
    return Engine.load("kvshelf-tiny")


def attention_of_a_plain_model(model, ids, positions=None):
    """Weights per layer, `[q_heads, T, T]`, by transformers alone."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            position_ids = None if positions is None else torch.tensor([positions])
            out = model(torch.tensor([ids]), position_ids=position_ids, output_attentions=True)
        return [weights[0] for weights in out.attentions]
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True)
class Recorder(POLICIES["snapkv"]):
    """Runs the passes it is given and keeps what the windows saw."""

    passes: ClassVar[list[ProbePass]] = []
    seen: ClassVar[list[tuple[torch.Tensor, int]]] = []

    def probe_passes(self, document):  # noqa: ARG002
        return self.passes

    def score(self, layer):
        window = layer.window(self.window)
        self.seen.append((torch.stack([window.attention(h) for h in range(layer.kv_heads)]), window.tail))
        return super().score(layer)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(POLICIES, "recorder", Recorder)
    Recorder.seen.clear()
    return Recorder


def test_a_window_of_a_probe_is_what_a_plain_model_attends_to(oracle, recorder):
    """A short probe: the document's last tokens fill the window up, as they would in a prompt that ends with it."""
    document, probe = oracle.ids[:200], (5, 6, 7)
    recorder.passes = [ProbePass(probe, 200)]
    oracle.engine.compress(document, policy="recorder", budget_tokens=100, window=8)
    plain = attention_of_a_plain_model(oracle.model, [*document, *probe])
    assert len(recorder.seen) == len(plain)
    for (ours, tail), theirs in zip(recorder.seen, plain, strict=True):
        assert tail == 5
        rows = theirs[:, -8:, :195]  # [q_heads, w, columns]
        assert (ours.flatten(0, 1) - rows).abs().max() < 3e-5


def test_passes_do_not_see_each_other(oracle, recorder):
    document, passes = oracle.ids[:120], [ProbePass((3, 4, 5, 6), 120), ProbePass((9, 8, 7, 6, 5), 150)]
    recorder.passes = passes
    oracle.engine.compress(document, policy="recorder", budget_tokens=60, window=3)
    seen = list(recorder.seen)
    for index, probe in enumerate(passes):
        positions = [*range(120), *range(probe.first_position, probe.first_position + len(probe.token_ids))]
        alone = attention_of_a_plain_model(oracle.model, [*document, *probe.token_ids], positions)
        for (ours, tail), theirs in zip(seen, alone, strict=True):
            assert tail == 0
            rows = ours.flatten(0, 1)[:, 3 * index : 3 * index + 3]
            assert (rows - theirs[:, -3:, :120]).abs().max() < 3e-5


def test_a_probe_changes_nothing_of_the_document(oracle, recorder):
    recorder.passes = [ProbePass(tuple(oracle.ids[:50]), 300)]
    ids = oracle.ids[:300]
    kept = oracle.engine.compress(ids, policy="recorder", budget_tokens=150)
    full = oracle.engine.compress(ids, policy="full")
    for record, whole in zip(kept.layers, full.layers, strict=True):
        for head, positions in enumerate(record.positions):
            at = positions.long()
            assert int(at.max()) < 300
            assert torch.allclose(record.heads()[head][0], whole.heads()[head][0][at], atol=1e-5)
            assert torch.allclose(record.heads()[head][1], whole.heads()[head][1][at], atol=1e-5)
    assert kept.next_position == 300


def test_the_default_probe_is_the_templates_suffix_and_the_identity_says_so(tiny):
    text = "The gate opens at nine. " * 40
    default = tiny.prepare(text, policy="snapkv").identity
    assert default.probe == "<|end|>\n<|assistant|>\n"
    assert tiny.prepare(text, policy="snapkv", policy_params={"probe": ""}).identity.probe == ""
    probed = tiny.prepare(text, policy="snapkv", policy_params={"probe": "What opens?"}).identity
    assert (probed.probe, probed.policy_params["probe"]) == ("What opens?", "What opens?")
    guided = tiny.prepare(text, policy="snapkv", expected_questions=["When does it open?"]).identity
    assert (guided.probe, guided.expected_questions) == ("", ("When does it open?",))
    assert tiny.prepare(text, policy="keydiff").identity.probe == ""
    assert len({default.content(), probed.content(), guided.content()}) == 3


def test_expected_questions_guide_what_is_kept(tiny):
    """With the question known the fact's digits are kept; the same policy without it loses some of them."""
    sentence = "The access code of the amber falcon is 482913."
    text = "The grass is green. The sky is blue. " * 60 + sentence + " The sun is yellow. Here we go." * 60
    question = "What is the access code of the amber falcon?"
    options = {"policy": "snapkv", "compression_ratio": 0.9}
    guided = tiny.compress(text, **options, expected_questions=[question])
    assert tiny.answer(guided, question).text.strip() == "482913"
    assert tiny.answer(tiny.compress(text, **options), question).text.strip() != "482913"


def test_what_cannot_be_probed_is_refused_before_the_prefill(tiny, llama):
    with pytest.raises(InvalidRequest, match="no tokenizer") as refused:
        llama.engine.prepare(llama.ids, policy="snapkv", policy_params={"probe": "text"})
    assert refused.value.param == "policy_params.probe"
    with pytest.raises(InvalidRequest, match="not empty") as refused:
        tiny.prepare("a long text " * 50, policy="snapkv", expected_questions=["ok", ""])
    assert refused.value.param == "expected_questions[1]"
    with pytest.raises(InvalidRequest, match="does not look at questions"):
        tiny.prepare("a long text " * 50, policy="keydiff", expected_questions=["why?"])
    with pytest.raises(InvalidRequest, match="65536"):
        tiny.prepare("a long text " * 50, policy="snapkv", expected_questions=["why? " * 500] * 40)
    with pytest.raises(InvalidRequest, match="16384"):
        tiny.prepare("a long text " * 50, policy="snapkv", policy_params={"probe": "why? " * 4000})
    with pytest.raises(DocumentTooLong, match="16384"):
        tiny.prepare("a long text " * 50, policy="snapkv", expected_questions=["why? " * 9000])
