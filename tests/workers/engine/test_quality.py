"""What a compression costs: the numbers against their formulas by hand, what they react to, and what may not change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.bench.quality.tasks import Fact, make_document
from kvshelf.errors import Cancelled, InvalidRequest, ModelMismatch
from kvshelf.workers.engine.decode.generation import Sampling
from kvshelf.workers.engine.inputs.job import Level, shared
from kvshelf.workers.engine.quality import QUESTIONS, VERSION, Probe, Reference, rare_passages
from kvshelf.workers.policies import POLICIES
from kvshelf.workers.policies.base import ScoringPolicy
from kvshelf.workers.policies.budgets import Budget
from kvshelf.workers.policies.view import CUE, CUE_ANSWER
from tests.workers.by_hand import Prefix, logits_after

TOKENS = 400


@pytest.fixture(scope="module")
def prose(tiny):
    return make_document("multikey", "prose", 700, 1, tiny.text.count_tokens).text


def measured(engine, document, **how):
    (compression,) = engine.run_levels([Level(engine.prepare(document, **how))])
    return compression.quality


# The numbers


def test_nothing_removed_costs_nothing(tiny, prose):
    quality = measured(tiny, prose, policy="full")
    assert quality.agreement == 1.0
    assert 0 <= quality.kl < 1e-6
    assert quality.tokens == QUESTIONS * CUE_ANSWER
    assert quality.probe_s > 0


def test_random_models_agree_with_themselves_and_not_with_what_is_left(oracle):
    ids = oracle.ids[:TOKENS]
    assert measured(oracle.engine, ids, policy="full").agreement == 1.0
    kept = measured(oracle.engine, ids, policy="streaming_llm", compression_ratio=0.9)
    assert kept.agreement < 1 or kept.kl > 1e-3


def by_formula(probe, full, reduced, without):
    """Agreement and KL from logits `[T, vocabulary]` fp64 of the whole pass."""
    places = list(probe.predicting)
    p, q, n = (torch.softmax(logits[places], dim=-1) for logits in (full, reduced, without))
    agreement = kl = total = 0.0
    for at in range(len(places)):
        a = int(p[at].argmax())
        w = max(0.0, float(p[at, a] - n[at, a])) if p[at, a] >= 0.9 else 0.0
        total += w
        agreement += w * (int(q[at].argmax()) == a)
        kl += w * float((p[at] * (p[at].log() - q[at].log())).sum())
    assert total > 1, "the probe looks at nothing"
    return agreement / total, kl / total


@pytest.mark.parametrize(("policy", "removed"), [("keydiff", 0.75), ("streaming_llm", 0.5), ("snapkv", 0.75)])
def test_the_numbers_are_those_of_the_formula_by_hand(tiny, prose, policy, removed):
    """RoPE, masks and softmax by hand in fp64, and the document's cache from transformers alone."""
    job = tiny.prepare(prose, policy=policy, compression_ratio=removed)
    probe = tiny.probe(job)
    (compression,) = tiny.run_levels([Level(job)])
    full = tiny.compress(prose, policy="full")
    asked, end = list(probe.asked.token_ids), job.num_tokens
    whole = logits_after(tiny.model, Prefix.kept(full, full), asked, end)
    reduced = logits_after(tiny.model, Prefix.kept(full, compression.cache), asked, end)
    with torch.no_grad():
        alone = tiny.model(torch.tensor([[*probe.prefix, *asked]])).logits[0, len(probe.prefix) :].double()
    agreement, kl = by_formula(probe, whole, reduced, alone)
    assert compression.quality.agreement == pytest.approx(agreement, abs=1e-4)
    assert compression.quality.kl == pytest.approx(kl, rel=1e-3)
    assert agreement < 1


@dataclass(frozen=True)
class Without(ScoringPolicy):
    """Drops the tokens from `first` to `last` and nothing else."""

    name = "without"
    source = "none"
    first: int = 0
    last: int = 0

    def score(self, layer):
        dropped = (layer.positions >= self.first) & (layer.positions < self.last)
        return (~dropped).float().expand(layer.kv_heads, -1)


def without(engine, text, at, count):
    """The quality of a cache that has everything of `text` but `count` tokens from character `at` on."""
    before = len(engine.encode_document(text[:at]).token_ids)
    job = engine.prepare(text, policy="keydiff")
    budget = Budget(job.num_tokens - count, count / job.num_tokens)
    (made,) = engine.run_levels([Level(replace(job, policy=Without(first=before, last=before + count), budget=budget))])
    return made.quality


def test_a_lost_fact_shows_and_lost_repetition_does_not(tiny):
    """The same number of tokens: once those of the only fact, once some that the document has thirty times."""
    filler = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    fact = " The access code of the amber falcon is 482913."
    text = filler * 9 + fact + filler * 9
    count = tiny.text.count_tokens(fact)
    lost = without(tiny, text, text.index(fact), count)
    spare = without(tiny, text, 3 * len(filler), count)
    assert spare.agreement == 1.0
    assert lost.agreement < 0.95
    assert lost.kl > 10 * spare.kl


def test_more_removed_never_looks_better_on_the_whole(tiny, prose):
    levels = [Level(tiny.prepare(prose, compression_ratio=removed)) for removed in (0.25, 0.5, 0.75, 0.9)]
    made = [one.quality for one in tiny.run_levels(levels)]
    assert [one.kl for one in made] == sorted(one.kl for one in made)
    assert made[-1].agreement < 0.9 < made[0].agreement


def test_a_codec_is_measured_too(tiny, prose):
    job = tiny.prepare(prose, policy="full")
    none, int8, int2 = tiny.run_levels([Level(job, codec) for codec in ("none", "int8", "int2")])
    assert none.quality.kl < int8.quality.kl < int2.quality.kl
    assert none.cache.nbytes > int8.cache.nbytes > int2.cache.nbytes


def logits(*rows):
    """Logits whose softmax is each row."""
    return torch.tensor(rows).log()


def reference(full, alone):
    probe = Probe(asked=None, predicting=(), prefix=())
    return Reference.of("doc", probe, logits(*full), logits(*alone), 0.0)


SURE, UNSURE, EVEN = [0.96, 0.02, 0.02], [0.6, 0.3, 0.1], [0.34, 0.33, 0.33]


def test_only_tokens_count_that_the_full_cache_is_sure_of_because_of_the_document():
    found = reference([SURE, UNSURE, SURE], [EVEN, EVEN, SURE])
    assert found.weights.tolist() == pytest.approx([1, 0, 0])
    assert found.compare(logits(EVEN, [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]))[0] == 1
    assert found.compare(logits([0.1, 0.8, 0.1], UNSURE, SURE))[0] == 0


def test_weights_are_what_the_document_adds():
    found = reference([SURE, SURE], [[0.46, 0.27, 0.27], [0.71, 0.2, 0.09]])
    assert found.weights.tolist() == pytest.approx([2 / 3, 1 / 3])
    agreement, kl = found.compare(logits(SURE, [0.02, 0.96, 0.02]))
    assert agreement == pytest.approx(2 / 3)
    divergence = 0.96 * torch.tensor(0.96 / 0.02).log() + 0.02 * torch.tensor(0.02 / 0.96).log()
    assert kl == pytest.approx(float(divergence) / 3, rel=1e-5)


def test_where_a_model_owes_the_document_nothing_every_token_counts_alike():
    found = reference([UNSURE, EVEN, SURE, UNSURE], [UNSURE, EVEN, SURE, UNSURE])
    assert found.weights.tolist() == pytest.approx([0.25] * 4)


def test_what_rounding_decides_is_no_disagreement():
    found = reference([SURE], [EVEN])
    assert found.compare(logits([0.33333, 0.33332, 0.33335]))[0] == 1
    assert found.compare(logits([0.33, 0.33, 0.34]))[0] == 0


def test_a_quality_says_which_version_of_the_measurement_it_is_of(tiny, prose):
    assert measured(tiny, prose).version == VERSION


def test_measuring_again_gives_the_same_numbers(tiny, prose):
    first, second = (measured(tiny, prose) for _ in range(2))
    assert (first.agreement, first.kl) == (second.agreement, second.kl)


# The questions


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(0, 20), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_passages_lie_in_the_document_apart_and_in_order(ids, first, count):
    starts = rare_passages(ids, first, count)
    assert len(starts) <= count
    assert bool(starts) == (len(ids) - first >= CUE + CUE_ANSWER)
    ends = [first, *(start + CUE + CUE_ANSWER for start in starts)]
    assert all(start >= end for start, end in zip(starts, ends, strict=False))
    assert ends[-1] <= max(len(ids), first)


def test_of_each_strip_the_rarest_answer_is_asked_for():
    ids = [1, 2, 3, 4, 5, 6, 7] * 20
    ids[40:44] = [90, 91, 92, 93]
    ids[100:104] = [94, 95, 96, 97]
    starts = rare_passages(ids, 0, 2)
    assert [ids[start + CUE : start + CUE + CUE_ANSWER] for start in starts] == [[90, 91, 92, 93], [94, 95, 96, 97]]


def test_a_probe_asks_in_the_models_own_form(tiny):
    text = "The grass is green. " * 20 + "The access code is 482913. " + "The sky is blue. " * 20
    job = tiny.prepare(text)
    probe = Probe.of(job.document, 1)
    asked = tiny.text.decode(probe.asked.token_ids)
    question, answer = asked.split(tiny.text.decode(job.document.suffix))
    assert question.startswith("\n\n")
    assert (question + answer).strip() in text
    assert "482913" in answer
    assert probe.asked.first_position == job.num_tokens
    assert [probe.asked.token_ids[place + 1] for place in probe.predicting] == tiny.text.encode(answer)
    assert probe.prefix == tuple(job.document.token_ids[: job.document.protected_prefix])


def test_where_nothing_can_be_measured_there_is_no_quality(tiny, prose):
    assert measured(tiny, "Too short.", policy="full") is None
    assert measured(tiny, prose, policy="lagkv", policy_params={"prefill": "chunked"}) is None
    assert tiny.probe(tiny.prepare([5, 6, 7] * 5_461 + [8])) is None  # 16,384 tokens: no room behind them
    assert tiny.probe(tiny.prepare([5, 6, 7] * 5_000)) is not None
    assert tiny.probe(tiny.prepare(prose), 0) is None


def test_a_reference_measures_no_other_document_and_no_other_model(tiny, prose, llama):
    prefill = tiny.prefill([Level(tiny.prepare(prose))], questions=QUESTIONS)
    assert prefill.reference is not None
    with pytest.raises(InvalidRequest, match="another document"):
        tiny.measure(tiny.compress(prose + " More."), prefill.reference)
    with pytest.raises(ModelMismatch):
        llama.engine.measure(prefill.compressions[0].cache, prefill.reference)


# Several levels from one prefill


WHOLE = sorted(POLICIES)


@pytest.mark.parametrize("policy", WHOLE)
def test_a_level_is_what_a_prefill_of_its_own_gives(tiny, prose, policy):
    """Identity and bytes, for every policy, those in cascade included; with a probe running behind."""
    ratios = (0.5, 0.75) if POLICIES[policy].takes_budget else (None,)
    jobs = [tiny.prepare(prose, policy=policy, compression_ratio=ratio) for ratio in ratios]
    levels = [Level(job, codec) for job in jobs for codec in ("none", "int4")]
    assert len(shared(levels)) == 1
    own = {id(job): tiny.run(job).cache for job in jobs}
    for level, made in zip(levels, tiny.run_levels(levels), strict=True):
        alone = own[id(level.job)]
        assert made.cache.identity == alone.identity == level.job.identity
        assert made.cache.to_bytes() == alone.to_bytes(level.codec)
        assert made.cache.codec == level.codec
        assert made.quality is not None


@pytest.mark.parametrize("policy", ["lagkv", "localkv"])
def test_levels_that_are_read_chunk_by_chunk_are_made_one_by_one(tiny, prose, policy):
    """Later chunks see what was kept of earlier ones, so that their keys depend on the level."""
    jobs = [
        tiny.prepare(prose, policy=policy, compression_ratio=ratio, policy_params={"prefill": "chunked"})
        for ratio in (0.5, 0.75)
    ]
    levels = [Level(job, codec) for job in jobs for codec in ("none", "int4")]
    assert [len(group) for group in shared(levels)] == [2, 2]
    for level, made in zip(levels, tiny.run_levels(levels), strict=True):
        assert made.cache.to_bytes() == tiny.run(level.job).cache.to_bytes(level.codec)
        assert made.quality is None


def test_levels_that_look_behind_the_document_in_other_ways_have_their_own_prefill(tiny, prose):
    encoded = tiny.encode_document(prose)
    jobs = [tiny.prepare(encoded, policy=policy) for policy in ("keydiff", "snapkv", "knorm", "tova", "kvzip")]
    groups = [[level.job.policy.name for level in group] for group in shared([Level(job) for job in jobs])]
    assert groups == [["keydiff", "knorm"], ["snapkv", "tova"], ["kvzip"]]
    for job, made in zip(jobs, tiny.run_levels([Level(job) for job in jobs]), strict=True):
        assert made.cache.to_bytes() == tiny.run(job).cache.to_bytes()


def test_two_documents_share_nothing(tiny, prose):
    levels = [Level(tiny.prepare(text)) for text in (prose, "A" + prose)]
    assert len(shared(levels)) == 2
    for level, made in zip(levels, tiny.run_levels(levels), strict=True):
        assert made.cache.to_bytes() == tiny.run(level.job).cache.to_bytes()


@pytest.fixture
def long_forwards(tiny, prose):
    """How often the model ran over something as long as the document."""
    seen = []
    least = len(tiny.encode_document(prose).token_ids)
    hook = tiny.model.base_model.layers[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(1) if inputs[0].shape[1] >= least else None
    )
    yield seen
    hook.remove()


def test_levels_of_one_kind_cost_one_prefill(tiny, prose, long_forwards):
    jobs = [tiny.prepare(prose, compression_ratio=ratio) for ratio in (0.5, 0.75, 0.875)]
    tiny.run_levels([*map(Level, jobs), Level(tiny.prepare(prose, policy="full"), "int4")])
    assert len(long_forwards) == 1


def test_the_reference_and_the_times_are_there(tiny, prose):
    jobs = [tiny.prepare(prose, compression_ratio=ratio) for ratio in (0.5, 0.75)]
    made = tiny.run_levels([Level(job) for job in jobs])
    assert made[0].prefill_s == made[1].prefill_s > 0
    assert all(one.compress_s > 0 for one in made)
    assert tiny.run(jobs[0]).quality is None


def test_others_have_their_turn_while_a_quality_is_measured(tiny, prose):
    """The checkpoint answers a question on the same engine, layer by layer; neither changes the other."""
    cache = tiny.compress(prose)
    query = tiny.encode_query(cache, "What is the door code?")
    alone = tiny.answer(cache, query, max_new_tokens=12)
    levels = [Level(tiny.prepare(prose, compression_ratio=ratio)) for ratio in (0.5, 0.75)]
    undisturbed = tiny.run_levels(levels)
    batch, generation = tiny.batch(), tiny.start(cache, query, Sampling(max_tokens=12))

    def turn():
        if not generation.finished:
            batch.step([generation])

    disturbed = tiny.run_levels(levels, checkpoint=turn)
    assert generation.finished
    assert generation.answer().token_ids == alone.token_ids
    for one, other in zip(disturbed, undisturbed, strict=True):
        assert one.cache.to_bytes() == other.cache.to_bytes()
        assert one.quality.agreement == other.quality.agreement


def test_a_caller_who_went_away_ends_it(tiny, prose):
    turns = []

    def gone():
        turns.append(1)
        if len(turns) == tiny.model.config.num_hidden_layers + 1:
            raise Cancelled("gone")

    with pytest.raises(Cancelled):
        tiny.run_levels([Level(tiny.prepare(prose))], checkpoint=gone)
    assert measured(tiny, prose) is not None  # and the engine still works


def test_a_fact_that_is_asked_for_is_a_fact(tiny):
    """The probe reaches what the bench asks for: the needle among filler is the rarest of its strip."""
    fact = Fact("access code", "the amber falcon", "482913")
    text = "The grass is green. The sky is blue. " * 40 + f"The {fact.attribute} of {fact.thing} is {fact.value}. "
    asked = tiny.text.decode(tiny.probe(tiny.prepare(text + "The sun is yellow. " * 40)).asked.token_ids)
    assert fact.value in asked or fact.thing.removeprefix("the ") in asked
