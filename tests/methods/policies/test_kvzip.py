"""KVzip: against a replay by plain transformers forwards, with the softmax cut to the sinks, the chunk and the pass."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.errors import DocumentTooLong, PolicyUnsupported
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.kvzip import KVzip
from tests.conftest import save_random_model

FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
TEXT = " ".join(f"Item {i} weighs {i * i % 97} grams and lies in box {i * 7 % 31}." for i in range(16))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A random model of 2 layers, 4 heads and 2 KV heads, with a chat template."""
    return Engine.load(str(save_random_model(tmp_path_factory.mktemp("model") / "m", positions=1024)), device="cpu")


def replay(engine, source, chunk, sink):
    """Scores `[layers][kv_heads][N]`: the pass of each chunk runs by itself behind the document, with an explicit
    causal mask, and its weights are divided by their sum over the sinks, the chunk and the pass."""
    model, document = engine.model, list(source.token_ids)
    count, first = len(document), max(sink, source.protected_prefix)
    scores = torch.zeros(model.config.num_hidden_layers, 2, count, dtype=torch.float64)
    lead = None
    for start in range(source.protected_prefix, count, chunk):
        tokens = document[start : start + chunk]
        words = [] if engine.text is None else engine.text.encode(FIRST if lead is None else NEXT)
        ids = document + words + (lead or []) + list(source.suffix) + tokens
        lead = tokens[-8:]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(
                torch.tensor([ids]), attention_mask=mask[None, None], position_ids=torch.arange(len(ids))[None],
                output_attentions=True,
            )  # fmt: skip
        model.set_attn_implementation("sdpa")
        columns = [*range(min(first, start)), *range(start, start + len(tokens)), *range(count, len(ids))]
        for layer, weights in enumerate(out.attentions):
            rows = weights[0, :, count:].double()  # [q_heads, pass, all]
            shares = rows[..., start : start + len(tokens)] / rows[..., columns].sum(dim=-1, keepdim=True)
            for head, group in enumerate(shares.chunk(2)):
                scores[layer, head, start : start + len(tokens)] = group.amax(dim=(0, 1))
    return scores


def best(scores, count, first):
    """The `count` best of each list together, the first tokens of each always: one set of positions per list."""
    kept = [set(range(first)) for _ in scores]
    free = [(-float(row[j]), i, j) for i, row in enumerate(scores) for j in range(first, len(row))]
    for _, i, j in sorted(free)[: count * len(scores) - first * len(scores)]:
        kept[i].add(j)
    return kept


class Recorder(KVzip):
    """Keeps its scores, layer after layer."""

    seen: list[torch.Tensor] = []

    def score(self, layer):
        self.seen.append(super().score(layer))
        return self.seen[-1]


@pytest.mark.parametrize("chunk", [64, 100, 2048])
@pytest.mark.parametrize("with_text", [True, False])
def test_scores_are_those_of_a_plain_replay(engine, monkeypatch, chunk, with_text):
    monkeypatch.setitem(POLICIES, "kvzip", Recorder)
    Recorder.seen.clear()
    used = engine if with_text else Engine(engine.model)
    document = TEXT if with_text else engine.text.encode(TEXT)
    job = used.prepare(document, policy="kvzip", policy_params={"chunk": min(chunk, 512), "sink": 7})
    assert len(job.passes) == -(-(job.num_tokens - job.document.protected_prefix) // min(chunk, 512))
    used.run(job)
    expected = replay(used, job.document, min(chunk, 512), 7)
    first = max(7, job.document.protected_prefix)
    for ours, theirs in zip(Recorder.seen, expected, strict=True):
        assert (ours[:, first:] - theirs[:, first:]).abs().max() < 2e-4
        assert theirs[:, first:].max() > 0.05, "or nothing would differ from nothing"


@pytest.mark.parametrize("across", ["cache", "layer", "head"])
def test_who_shares_a_budget(engine, across):
    job = engine.prepare(
        TEXT, policy="kvzip", compression_ratio=0.7, policy_params={"chunk": 128, "across": across}
    )  # fmt: skip
    cache = engine.run(job).cache
    first, budget = max(4, job.document.protected_prefix), job.budget.tokens
    scores = replay(engine, job.document, 128, 4)
    sharing = {"cache": [list(scores.flatten(0, 1))], "layer": [list(layer) for layer in scores]}
    sharing["head"] = [[head] for head in scores.flatten(0, 1)]
    expected = list(itertools.chain(*(best(group, budget, first) for group in sharing[across])))
    kept = [set(head.tolist()) for record in cache.layers for head in record.positions]
    assert sum(map(len, kept)) == budget * len(kept), "exact"
    assert (len({len(head) for head in kept}) == 1) == (across == "head")
    # Scores of two ways to compute them may swap at the edge of the budget.
    assert sum(len(ours - theirs) for ours, theirs in zip(kept, expected, strict=True)) <= 2
    assert all(set(range(first)) <= head for head in kept)


def test_the_prompts(engine):
    job = engine.prepare(TEXT, policy="kvzip", policy_params={"chunk": 100})
    ids, prefix = list(job.document.token_ids), job.document.protected_prefix
    one, two, *_ = [list(probe.token_ids) for probe in job.passes]
    suffix = list(job.document.suffix)
    assert one == engine.text.encode(FIRST) + suffix + ids[prefix : prefix + 100]
    assert two[:-100] == engine.text.encode(NEXT) + ids[prefix + 92 : prefix + 100] + suffix
    assert {probe.first_position for probe in job.passes} == {job.num_tokens}
    assert job.identity.probe == engine.text.decode(engine.text.encode(FIRST) + suffix)


def test_without_a_tokenizer_only_the_last_tokens_lead(llama):
    job = llama.engine.prepare(llama.ids[:200], policy="kvzip", policy_params={"chunk": 120})
    assert [list(probe.token_ids) for probe in job.passes] == [llama.ids[:120], llama.ids[112:200]]
    assert job.identity.probe == ""


def test_the_default_chunk_shrinks_to_the_room_and_a_given_one_does_not(engine):
    ids = engine.text.encode(TEXT * 3)[:700]
    plain = Engine(engine.model)  # 1,024 positions, and 8 tokens lead
    job = plain.prepare(ids, policy="kvzip")
    assert job.policy.chunk == job.identity.policy_params["chunk"] == 1024 - 700 - 8
    assert max(probe.first_position + len(probe.token_ids) for probe in job.passes) == 1024
    with pytest.raises(DocumentTooLong, match="takes 1024 tokens"):
        plain.prepare(ids, policy="kvzip", policy_params={"chunk": 325})
    assert plain.prepare(ids[:400], policy="kvzip").policy.chunk == 616
    assert plain.prepare(ids[:100], policy="kvzip").policy.chunk == 916
    with pytest.raises(DocumentTooLong, match="takes 1024 tokens"):
        plain.prepare((ids * 2)[:900], policy="kvzip")  # no room for the least default chunk of 256
    assert len(plain.prepare((ids * 2)[:900], policy="kvzip", policy_params={"chunk": 64}).passes) == 15


def test_a_given_sink_must_fit(llama):
    with pytest.raises(PolicyUnsupported, match=r"sink is 50.*room for 49") as refused:
        llama.engine.prepare(llama.ids, policy="kvzip", budget_tokens=50, policy_params={"sink": 50})
    assert refused.value.param == "policy_params.sink"
    assert llama.engine.prepare(llama.ids, policy="kvzip", budget_tokens=3).policy.sink == 2


@pytest.mark.slow
def test_a_fact_survives(tiny):
    """On the bundled model: what has to be copied out is what the replay attended to."""
    from kvshelf_bench.quality.retrieval import measure_cell

    compress = {"policy": "kvzip", "compression_ratio": 0.75}
    assert measure_cell(tiny, "multikey", "filler", 1024, 6, compress=compress).exact >= 5
