"""A prefill chunk by chunk: each chunk sees what was kept of those before it, and no more than that is ever held."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.prefill.chunked import ChunkedPrefill, ReadLayer
from kvshelf.errors import Cancelled, PolicyUnsupported
from tests.methods.policies.test_lagkv import naive_scores

TOKENS, SINK, LAG, SHARE = 230, 6, 32, 8
PARTITIONS = (TOKENS - SINK) // LAG - 1
BUDGET = TOKENS - PARTITIONS * (LAG - SHARE)
SPANS = (3, 9), (70, 75), (150, 171)
PROTECTED = [at for first, end in SPANS for at in range(first, end)]
"""In a document of as many more tokens: among the sinks, within a partition, and over the ends of two chunks."""
RULES = [f"tokens:{first}-{end}" for first, end in SPANS]


def chunked(name, **changes):
    return {"policy": name, "budget_tokens": BUDGET, "sink": SINK, "lag": LAG, "prefill": "chunked"} | changes


def prepared(engine, document, name="lagkv", **changes):
    params = chunked(name, **changes)
    options = {key: params.pop(key) for key in ("policy", "budget_tokens")}
    return engine.prepare(document, **options, policy_params=params)


class ByHand:
    """The same prefill with transformers' own cache, which drops nothing: what was let go of is hidden instead. Tokens
    that are protected are read with the others, and counted among none of them."""

    def __init__(self, model, name, protected=()):
        self.model, self.name = copy.deepcopy(model).double(), name
        self.past = DynamicCache()
        self.others = [at for at in range(TOKENS + len(protected)) if at not in protected]
        heads, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
        self.visible = torch.ones(layers, heads, TOKENS + len(protected), dtype=torch.bool)
        self.start = SINK
        AttentionInterface.register("test_chunked", self.attention)
        self.model.set_attn_implementation("test_chunked")

    def attention(self, module, query, key, value, _mask, scaling, **_):
        group, (length, width) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
        logits = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        shown = torch.ones(length, width, dtype=torch.bool).tril(width - length)
        shown = shown & self.visible[module.layer_idx, :, None, :width].repeat_interleave(group, 0)
        weights = torch.softmax(logits.masked_fill(~shown, -torch.inf), dim=-1)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None

    def run(self, ids):
        seen = read = 0
        while seen < TOKENS:
            seen += SINK + 2 * LAG if seen == 0 else min(LAG, TOKENS - seen)
            end = [*self.others, len(ids)][seen]
            places = torch.arange(read, end)[None]
            with torch.no_grad():
                self.model(torch.tensor([ids[read:end]]), **{CACHE_ARGUMENT: self.past}, position_ids=places)
            read = end
            if seen - self.start >= 2 * LAG:
                self.hide()
        return self

    def hide(self):
        for layer, states in enumerate(self.past.layers):
            for head in range(self.visible.shape[1]):
                own = [rows for rows in self.others if rows < states.keys.shape[2]]
                keys, values = states.keys[0, head, own], states.values[0, head, own]
                scores = naive_scores(self.name, keys, values, self.start, LAG)
                order = sorted(range(LAG), key=lambda token, scores=scores: (-scores[token], token))
                self.visible[layer, head, [self.others[self.start + token] for token in order[SHARE:]]] = False
        self.start += LAG


@pytest.mark.parametrize("protected", [(), PROTECTED], ids=["", "protect"])
@pytest.mark.parametrize("name", ["lagkv", "localkv"])
def test_it_is_the_prefill_of_the_paper(oracle, name, protected):
    """Hidden states depend on every choice before them: one wrong entry or position and all later keys are others."""
    ids, rules = oracle.ids[: TOKENS + len(protected)], RULES if protected else []
    cache = oracle.engine.compress(ids, **chunked(name, budget_tokens=BUDGET + len(protected)), protect=rules)
    by_hand = ByHand(oracle.model, name, protected).run(ids)
    assert {record.entries for record in cache.layers} == {(BUDGET + len(protected)) * by_hand.visible.shape[1]}
    for index, record in enumerate(cache.layers):
        states = by_hand.past.layers[index]
        for head, ((keys, values), positions) in enumerate(zip(record.heads(), record.positions, strict=True)):
            assert positions.tolist() == by_hand.visible[index, head].nonzero()[:, 0].tolist()
            for ours, expected in ((keys, states.keys), (values, states.values)):
                expected = expected[0, head, positions.long()]
                # The recorded models are badly conditioned: fp32 against fp64, through seven passes.
                assert float((ours - expected).abs().max() / expected.abs().max()) < 1e-3


def test_later_chunks_see_the_compressed_past(llama):
    """Up to the end of the first pass nothing is gone yet; behind it hidden states are others than in one pass."""
    whole, chunks = (
        llama.engine.compress(llama.ids[:TOKENS], **chunked("lagkv", prefill=prefill))
        for prefill in ("whole", "chunked")
    )
    early, tail = slice(SINK + SHARE), slice(-LAG, None)
    for index, (one, other) in enumerate(zip(whole.layers, chunks.layers, strict=True)):
        assert torch.equal(one.positions[0][early], other.positions[0][early])
        assert torch.allclose(one.heads()[0][0][early], other.heads()[0][0][early], atol=1e-4)
        apart = float((one.heads()[0][0][tail] - other.heads()[0][0][tail]).abs().max())
        assert apart < 1e-5 if index == 0 else apart > 1e-2, "keys of layer 0 know nothing of the past"


def test_the_mode_is_part_of_the_identity(tiny):
    text = "The report was read twice. " * 60
    jobs = {
        prefill: tiny.prepare(text, policy="lagkv", policy_params={"prefill": prefill, "lag": 32})
        for prefill in ("whole", "chunked")
    }
    assert jobs["whole"].identity.prefill == "whole"
    assert jobs["chunked"].identity.prefill == "chunked:lag=32"
    ids = {job.identity.cache_id(key=bytes(32), tenant="t", codec="none", format_major=1) for job in jobs.values()}
    assert len(ids) == 2
    cache = tiny.run(jobs["chunked"]).cache
    assert cache.identity == jobs["chunked"].identity
    assert cache.next_position == cache.num_tokens == jobs["chunked"].num_tokens
    prefix = tiny.text.document(text, "chat").protected_prefix
    assert prefix >= 1
    assert all(head[:prefix].tolist() == list(range(prefix)) for record in cache.layers for head in record.positions)
    assert (
        CompressedCache.from_bytes(cache.to_bytes()).to_bytes()
        == cache.to_bytes()
        == tiny.run(jobs["chunked"]).cache.to_bytes()
    )


def test_a_budget_of_everything_is_one_pass(llama):
    job = llama.engine.prepare(
        llama.ids[:90], policy="lagkv", compression_ratio=0.0, policy_params={"prefill": "chunked", "lag": 16}
    )
    assert job.identity.prefill == "whole"
    assert llama.engine.run(job).cache.kept_tokens == 90


def test_what_the_budget_cannot_hold_is_refused_before_any_work(llama):
    with pytest.raises(PolicyUnsupported, match="lag 128") as refused:
        prepared(llama.engine, llama.ids[:300], lag=128)
    assert refused.value.param == "policy_params.lag"


def test_others_get_a_turn_between_all_layers_of_all_chunks(llama):
    job, turns = prepared(llama.engine, llama.ids[:TOKENS]), []
    undisturbed = llama.engine.run(job).cache.to_bytes()
    assert job.absorber.chunks == [SINK + 2 * LAG, *[LAG] * 5]
    batch = llama.engine.batch()
    question = llama.engine.start(llama.engine.compress(llama.ids[:50], policy="full"), llama.ids[:4])

    def turn():
        turns.append(1)
        if len(turns) % 3 == 0:
            batch.step([question])

    assert llama.engine.run(job, checkpoint=turn).cache.to_bytes() == undisturbed
    assert len(turns) == 6 * llama.model.config.num_hidden_layers
    assert len(question.token_ids) == len(turns) // 3


@pytest.mark.parametrize("after", [1, 5])
def test_it_can_be_abandoned_between_layers(llama, after):
    turns = []

    def gone():
        turns.append(1)
        if len(turns) == after:
            raise Cancelled("no longer wanted")

    before = llama.model.config._attn_implementation
    with pytest.raises(Cancelled):
        llama.engine.run(prepared(llama.engine, llama.ids[:TOKENS]), checkpoint=gone)
    assert len(turns) == after
    assert llama.model.config._attn_implementation == before


@pytest.mark.parametrize("rules", [[], RULES, ["tokens:300-370", "tokens:690-700"]])
def test_no_more_is_held_than_the_budget_and_two_partitions(llama, monkeypatch, rules):
    """Every tensor of every layer is counted, after each layer of each pass, and what a layer attends to in it; the
    document is as long as it gets."""
    held, seen = [], []
    after, before = ChunkedPrefill.after_attention, ReadLayer.set_aside

    def counted(self, *args):
        after(self, *args)
        own = [value for layer in self._layers for value in vars(layer).values()]
        prefixes = [prefix for value in own if isinstance(value, tuple) for prefix in value]
        states = [*own, *(tensor for prefix in prefixes for tensor in vars(prefix).values())]
        stored = [value.untyped_storage() for value in states if isinstance(value, torch.Tensor) and value.dim() > 2]
        held.append(sum({memory.data_ptr(): memory.nbytes() for memory in stored}.values()))  # views are of others

    def watched(self, protected):
        seen.append(sum(prefix.lengths[0] for prefix in self.prefix) + self.keys.shape[2])
        before(self, protected)

    monkeypatch.setattr(ChunkedPrefill, "after_attention", counted)
    monkeypatch.setattr(ReadLayer, "set_aside", watched)
    record = llama.engine.compress(llama.ids, **chunked("lagkv", budget_tokens=200), protect=rules).layers[0]
    row = record.kv_heads * (record.key_dim + record.value_dim) * record.keys.element_size()
    whole = llama.model.config.num_hidden_layers * row * len(llama.ids)
    assert max(held) <= whole * (200 + SINK + 2 * LAG) / len(llama.ids) < whole / 2
    assert 200 < max(seen) <= 200 + SINK + 2 * LAG
