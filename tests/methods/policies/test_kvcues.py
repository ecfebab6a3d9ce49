"""KVcues: against plain transformers forwards, one for each cue, and against what the model then answers."""

from __future__ import annotations

import pytest
import torch

from kvshelf.engine.attention import function
from kvshelf.engine.engine import Engine
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.kvcues import KVcues
from kvshelf.methods.policies.kvzip import KVzip
from kvshelf.methods.policies.view import CUE_ANSWER, CUE_ASKED, DocumentView
from kvshelf.samples.suite import make_case, score
from kvshelf_bench.quality.retrieval import counter
from tests.conftest import save_random_model

TEXT = " ".join(f"Item {i} weighs {i * i % 97} grams and lies in box {i * 7 % 31}." for i in range(16))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A random model of 2 layers, 4 heads and 2 KV heads, with a chat template."""
    return Engine.load(str(save_random_model(tmp_path_factory.mktemp("model") / "m", positions=1024)), device="cpu")


class Recorder(KVcues):
    """Keeps its scores, layer after layer, and those of KVzip alone."""

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def score(self, layer):
        scores = super().score(layer)
        self.seen.append((scores, KVzip.score(self, layer)))
        return scores


def of_each_cue(engine, view, every):
    """The largest weight of any cue `[layers, kv_heads, N]`: each cue runs by itself behind the document."""
    model, document = engine.model, list(view.token_ids)
    count, layers = len(document), model.config.num_hidden_layers
    scores = torch.zeros(layers, 2, count)
    separator = [] if engine.text is None else engine.text.encode("\n\n")
    model.set_attn_implementation("eager")
    for start in range(view.protected_prefix, count - 9, every):
        pass_ids = [*separator, *document[start : start + 6], *view.suffix, *document[start + 6 : start + 10]]
        with torch.no_grad():
            out = model(torch.tensor([document + pass_ids]), output_attentions=True)
        for layer, weights in enumerate(out.attentions):
            largest = weights[0, :, count:, :count].amax(dim=1)  # [q_heads, N]
            scores[layer] = torch.maximum(scores[layer], largest.view(2, 2, count).amax(dim=1))
    model.set_attn_implementation("sdpa")
    return scores


@pytest.mark.parametrize("every", [8, 3])
@pytest.mark.parametrize("with_text", [True, False])
def test_scores_are_the_larger_of_both(engine, monkeypatch, every, with_text):
    monkeypatch.setitem(POLICIES, "kvcues", Recorder)
    Recorder.seen.clear()
    used = engine if with_text else Engine(engine.model)
    document = TEXT[:400] if with_text else engine.text.encode(TEXT)[:150]
    job = used.prepare(document, policy="kvcues", policy_params={"every": every, "chunk": 64})
    used.run(job)
    cues = of_each_cue(used, job.document, every)
    for (ours, repeated), expected in zip(Recorder.seen, cues, strict=True):
        assert (ours - torch.maximum(repeated, expected)).abs().max() < 2e-5
        assert (expected > repeated + 1e-3).any(), "or the cues would say nothing"
        assert (repeated > expected + 1e-3).any()


def test_the_cues(engine):
    job = engine.prepare(TEXT, policy="kvcues", policy_params={"every": 8, "chunk": 100})
    ids, prefix, suffix = list(job.document.token_ids), job.document.protected_prefix, list(job.document.suffix)
    repeats = len(engine.prepare(TEXT, policy="kvzip", policy_params={"chunk": 100}).passes)
    cues = job.passes[repeats:]
    assert len(cues) == len(range(prefix, len(ids) - CUE_ASKED - CUE_ANSWER + 1, 8))
    separator = engine.text.encode("\n\n")
    for index, cue in enumerate(cues):
        start = prefix + 8 * index
        assert list(cue.token_ids) == [*separator, *ids[start : start + 6], *suffix, *ids[start + 6 : start + 10]]
        assert cue.first_position == len(ids)
    assert engine.prepare(TEXT, policy="kvcues").identity.policy_params["every"] == 8


def test_cues_of_one_length_are_attended_to_together(engine, monkeypatch):
    """One call for the repeats of each length and one for all cues, not one for each cue. In the last layer nothing
    comes after the attention, which is left out."""
    calls = []

    def counting(*args):
        calls.append(args[0].shape[0])
        return real(*args)

    real = function.prefix_attention
    monkeypatch.setattr(function, "prefix_attention", counting)
    engine.compress(TEXT, policy="kvcues", chunk=512)  # the first pass is recorded, and the recording is tried
    calls.clear()
    job = engine.prepare(TEXT, policy="kvcues", policy_params={"chunk": 512})
    engine.run(job)
    cues = len(job.passes) - 1
    assert calls == [len(job.passes[0].token_ids), cues * len(job.passes[1].token_ids)], "of two layers"


def test_a_document_without_room_for_a_cue_is_scored_by_repeating(engine):
    view = DocumentView(tuple(range(9)))
    assert list(KVcues().probe_passes(view)) == list(KVzip().probe_passes(view))
    ids = engine.text.encode(TEXT)[:9]
    kept = [
        [
            head.tolist()
            for record in engine.compress(ids, policy=policy, budget_tokens=6).layers
            for head in record.positions
        ]
        for policy in ("kvcues", "kvzip")
    ]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_facts_survive_where_repeating_alone_loses_them(tiny):
    """With an eighth kept, of documents of the bench: what a question reads is not what repeating reads."""
    right = dict.fromkeys(("full", "kvzip", "kvcues"), 0)
    for seed in range(4):
        case = make_case("multikey", "prose", 1024, 77_000_000 + seed, counter(tiny), questions=8)
        for policy in right:
            cache = tiny.compress(case.text, policy=policy, compression_ratio=None if policy == "full" else 0.875)
            answers = tiny.answer_all([(cache, ask.text) for ask in case.asks], max_new_tokens=16)
            right[policy] += sum(score(ask, answer.text).exact for ask, answer in zip(case.asks, answers, strict=True))
    assert right["full"] > 24, "or the documents would be no test"
    assert right["kvcues"] >= right["kvzip"] + 6
