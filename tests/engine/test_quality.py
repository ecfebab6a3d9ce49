"""What a compression costs: the numbers against their formulas by hand, what they react to, and what may not change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine import quality
from kvshelf.engine.compressor import Compressor
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.inputs.job import Level, shared
from kvshelf.engine.quality import (
    ANSWER,
    CUES,
    LEAST,
    OPENING,
    QUESTION,
    SKIPPED,
    VERSION,
    Probe,
    Reference,
    bounds,
    cue_count,
    cue_places,
    worst_part,
)
from kvshelf.errors import Cancelled, InvalidRequest, ModelMismatch
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.view import CUE_ASKED, CUE_EVERY, DocumentView, ProbePass
from kvshelf.samples.tasks import make_document
from tests.amounts import few
from tests.by_hand import Prefix, logits_after

TOKENS = 400
FEW = 24


@pytest.fixture(scope="module")
def prose(tiny):
    return make_document("multikey", "prose", 900, 1, tiny.text.count_tokens).text


def measured(engine, document, **how):
    (compression,) = engine.run_levels([Level(engine.prepare(document, **how))])
    return compression.quality


# The numbers


def test_progress_counts_the_layers_of_each_prefill_and_the_levels_that_are_measured(tiny):
    text = "The harbour master keeps the tide tables in a green book. " * 30
    told = []
    half, quarter, chunked = (
        Level(tiny.prepare(text, policy=policy, compression_ratio=ratio))
        for policy, ratio in (("keydiff", 0.5), ("keydiff", 0.75), ("lagkv", 0.5))
    )
    tiny.run_levels([half, quarter], progress=lambda *step: told.append(step))
    layers = tiny.model.config.num_hidden_layers
    assert told[: layers + 1] == [("prefill", done, layers) for done in range(layers + 1)]
    assert list(dict.fromkeys(told[layers + 1 :])) == [("quality", done, 2) for done in range(3)]
    told.clear()
    tiny.run_levels([chunked], progress=lambda *step: told.append(step))
    phases = [step for step in told if step[0] == "prefill"]
    rounds = 1 if chunked.job.absorber is None else len(chunked.job.absorber.chunks)
    assert phases == [("prefill", done, layers * rounds) for done in range(layers * rounds + 1)]


@pytest.mark.slow
def test_the_full_cache_has_quality_1_without_cues(tiny, prose):
    """What is appended to a cache that has lost something is measured."""
    for fields in ({"policy": "full"}, {"policy": "keydiff", "compression_ratio": 0.0}):
        quality = measured(tiny, prose, **fields)
        assert (quality.agreement, quality.low, quality.high, quality.cues, quality.kl) == (1, 1, 1, 0, 0)
    half = tiny.compress(prose, policy="keydiff", compression_ratio=0.5)
    (appended,) = tiny.run_levels([Level(tiny.prepare_append(half, prose, policy="full"))])
    assert appended.quality.cues > 0


def test_nothing_removed_costs_nothing(tiny, prose):
    job = tiny.prepare(prose, policy="full")
    made = tiny.compressor.prefill([Level(job)], cues=CUES)
    quality = tiny.compressor.measure(made.compressions[0].cache, made.reference)
    assert (quality.agreement, quality.high) == (1.0, 1.0)
    assert CUES / 2 < quality.asked <= CUES
    assert quality.low == pytest.approx(0.05 ** (1 / quality.cues), abs=1e-6)
    assert quality.cues >= quality.asked / 2
    assert quality.worst["agreement"] == 1.0
    assert 0 <= quality.kl < 1e-6
    assert quality.probe_s > 0


def test_for_a_model_that_learns_nothing_from_a_document_there_is_no_figure(oracle):
    """Random weights are sure of next to nothing: no bound, and the reason. The full cache is itself."""
    ids = oracle.ids[:TOKENS]
    assert measured(oracle.engine, ids, policy="full").agreement == 1.0
    kept = measured(oracle.engine, ids, policy="streaming_llm", compression_ratio=0.9)
    assert kept.low is None
    assert kept.cues < LEAST
    assert f"of the {kept.asked} cues" in kept.reason


def test_what_repeats_one_word_decides_nothing(tiny):
    kept = measured(tiny, "word " * 1000, policy="keydiff", compression_ratio=0.5)
    assert (kept.agreement, kept.low, kept.high, kept.worst, kept.cues) == (None, None, None, None, 0)
    assert kept.reason == f"the document decides none of the {kept.asked} cues that it was asked"


def by_formula(full, reduced, before, answers):
    """Agreement, cues that count and KL, from logits `[cues, T, vocabulary]` fp64."""
    p, q, n = (torch.softmax(logits, dim=-1) for logits in (full, reduced, before))
    agreed, divergences = [], []
    for cue, answer in enumerate(answers):
        decided = [
            at
            for at, token in enumerate(answer)
            if int(p[cue, at].argmax()) == token and p[cue, at, token] >= max(0.5, n[cue, at, token] + 0.3)
        ]
        if not decided:
            continue
        agreed.append(int(q[cue, decided[0]].argmax()) == answer[decided[0]])
        for at in range(ANSWER):
            likeliest = p[cue, at].topk(64).indices
            one, other = (
                torch.cat([found[likeliest], 1 - found[likeliest].sum()[None]]) for found in (p[cue, at], q[cue, at])
            )
            divergences.append(float((one * (one / other).log()).sum()))
    return sum(agreed) / len(agreed), len(agreed), sum(divergences) / len(divergences)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "removed"), [("keydiff", 0.75), ("streaming_llm", 0.5), ("snapkv", 0.75)])
def test_the_numbers_are_those_of_the_formula_by_hand(tiny, prose, policy, removed):
    """RoPE, masks and softmax by hand in fp64, and the document's cache from transformers alone."""
    job = tiny.prepare(prose, policy=policy, compression_ratio=removed)
    probe = tiny.probe(job, FEW)
    (compression,) = tiny.run_levels([Level(job)], cues=FEW)
    full = tiny.compress(prose, policy="full")
    rows = {"full": [], "reduced": [], "before": []}
    for cue in probe.passes:
        asked = list(cue.token_ids)
        for name, kept in (("full", full), ("reduced", compression.cache)):
            rows[name].append(logits_after(tiny.model, Prefix.kept(full, kept), asked, job.num_tokens)[-ANSWER:])
    with torch.no_grad():
        read = tiny.model(torch.tensor([list(job.document.token_ids)])).logits[0].double()
    rows["before"] = [read[at - 1 : at + ANSWER - 1] for at in probe.places]
    answers = [job.document.token_ids[at : at + ANSWER] for at in probe.places]
    agreement, cues, kl = by_formula(*map(torch.stack, rows.values()), answers)
    assert compression.quality.agreement == pytest.approx(agreement)
    assert compression.quality.kl == pytest.approx(kl, rel=1e-3)
    assert agreement < 1
    assert (compression.quality.cues, compression.quality.asked) == (cues, FEW)


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
    text = filler * 18 + fact + filler * 18
    count = tiny.text.count_tokens(fact)
    lost = without(tiny, text, text.index(fact), count)
    spare = without(tiny, text, 3 * len(filler), count)
    assert lost.agreement < spare.agreement
    assert lost.kl > spare.kl


def test_more_removed_never_looks_better_on_the_whole(tiny, prose):
    levels = [Level(tiny.prepare(prose, compression_ratio=removed)) for removed in (0.1, 0.5, 0.75, 0.9)]
    made = [one.quality for one in tiny.run_levels(levels)]
    assert [one.kl for one in made] == sorted(one.kl for one in made)
    assert [one.agreement for one in made] == sorted((one.agreement for one in made), reverse=True)
    assert made[-1].agreement < 0.9


def test_a_codec_is_measured_too(tiny, prose):
    job = tiny.prepare(prose, policy="full")
    none, int8, int2 = tiny.run_levels([Level(job, codec) for codec in ("none", "int8", "int2")])
    assert none.quality.kl < int8.quality.kl < int2.quality.kl
    assert none.cache.nbytes > int8.cache.nbytes > int2.cache.nbytes


def logits(*cues):
    """Logits whose softmax is the distribution of each token of each cue."""
    return torch.tensor([token for cue in cues for token in cue]).log()


def reference(full, before):
    """Of a document whose own tokens are all number 0."""
    passes = tuple(ProbePass((cue,), 0) for cue in range(len(full)))
    places = tuple(range(20, 20 + 6 * len(full), 6))
    probe = Probe(places, answers=((0,) * ANSWER,) * len(full), passes=passes, prefix=())
    return Reference.of("doc", probe, [logits(*full)], [logits(*before)])


def compared(found, logits):
    return found.quality(found.answered(range(len(found.probe.places)), logits))


SURE, LIKELY, OTHER, EVEN = [0.998, 0.001, 0.001], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.34, 0.33, 0.33]
KNOWN, UNKNOWN, GUESSED = [EVEN, LIKELY, SURE] * 2, [EVEN, OTHER] * 3, [[0.2, 0.5, 0.3]] * 6


def test_a_cue_agrees_where_the_first_token_that_the_document_decides_is_found():
    found = reference([KNOWN, KNOWN, UNKNOWN, KNOWN], [GUESSED] * 4)
    assert (found.num_cues, found.probe.places) == (4, (20, 26, 38))  # the third is not asked again
    told = logits([OTHER, LIKELY, OTHER] * 2, [SURE, OTHER, SURE] * 2, [OTHER] * 6)
    assert compared(found, [told]).agreement == pytest.approx(1 / 3)
    assert compared(found, [logits(KNOWN, KNOWN, KNOWN)]).kl == pytest.approx(0, abs=1e-6)


def test_what_the_document_does_not_decide_is_in_no_denominator():
    """What the model foresaw when it first read it, what it is unsure of, and what it takes for something else."""
    foreseen, slightly = [[SURE] * 6] * 2, [[[0.31, 0.5, 0.19]] * 6] * 2
    assert reference([[SURE] * 6] * 2, foreseen).undecided().cues == 0
    assert reference([[LIKELY] * 6] * 2, slightly).probe.places == ()
    assert reference([[OTHER] * 6] * 2, [GUESSED] * 2).probe.places == ()
    none = reference([UNKNOWN] * 2, [GUESSED] * 2).undecided()
    assert (none.agreement, none.low, none.asked) == (None, None, 2)


def test_too_few_cues_that_count_have_no_bound():
    found = compared(reference([KNOWN] * LEAST, [GUESSED] * LEAST), [logits(*[KNOWN] * LEAST)])
    assert (found.cues, found.reason) == (LEAST, None)
    assert found.low == pytest.approx(0.05 ** (1 / LEAST), abs=1e-6)
    fewer = compared(reference([KNOWN] * (LEAST - 1), [GUESSED] * (LEAST - 1)), [logits(*[KNOWN] * (LEAST - 1))])
    assert (fewer.agreement, fewer.low) == (1.0, None)
    assert f"a bound takes {LEAST}" in fewer.reason


def test_what_rounding_decides_is_no_disagreement():
    found = reference([[SURE] * 6], [GUESSED])
    assert compared(found, [logits([[0.33333, 0.33332, 0.33335]] * 6)]).agreement == 1
    assert compared(found, [logits([[0.33, 0.33, 0.34]] * 6)]).agreement == 0


def test_rare_tokens_are_compared_together():
    """KL over the likeliest 64 and the rest as one is the exact one where all rest tokens change alike."""
    p = torch.cat([torch.tensor([0.6]), torch.full((63,), 0.0055), torch.full((400,), 0.0001)])
    q = torch.cat([torch.tensor([0.5]), torch.full((63,), 0.006), torch.full((400,), 0.00026)])
    p, q = p / p.sum(), q / q.sum()
    exact = float((p * (p / q).log()).sum())
    before = torch.full((6, len(p)), 1 / len(p)).log()
    probe = Probe((20,), ((0,) * 6,), (ProbePass((1,), 0),), ())
    found = Reference.of("doc", probe, [p.log().repeat(6, 1)], [before])
    assert compared(found, [q.log().repeat(6, 1)]).kl == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(("agreed", "cues", "low", "high"), [
    (150, 150, 0.980227, 1.0), (149, 150, 0.968766, 0.999658), (0, 150, 0.0, 0.019773), (10, 10, 0.741134, 1.0),
    (5, 10, 0.222441, 0.777559), (95, 100, 0.897751, 0.980103),
    (40_000, 100_000, 0.397449, 0.402555),
])  # fmt: skip
def test_the_bounds_are_those_of_clopper_and_pearson(agreed, cues, low, high):
    """Quantiles of the beta distribution: low = B(5 %; a, n - a + 1), high = B(95 %; a + 1, n - a)."""
    assert bounds(agreed, cues) == pytest.approx((low, high), abs=2e-5)


def test_the_worst_part_is_named():
    agreed = [True] * 150
    agreed[40:44] = [False] * 4
    worst = worst_part(range(100, 100 + 150 * 8, 8), agreed)
    assert worst["from"] <= 100 + 40 * 8 <= worst["to"]
    assert worst["agreement"] < 0.85
    assert worst_part([30, 40], [True, False]) == {
        "from": 30 - QUESTION - SKIPPED - OPENING,
        "to": 40 + ANSWER,
        "agreement": 0.5,
    }


def test_a_quality_says_which_version_of_the_measurement_it_is_of(tiny, prose):
    assert measured(tiny, prose, compression_ratio=0.5).version == VERSION


@pytest.mark.slow
def test_measuring_again_gives_the_same_numbers(tiny, prose):
    first, second = (measured(tiny, prose, compression_ratio=0.5) for _ in range(2))
    assert (first.agreement, first.kl) == (second.agreement, second.kl)


# The cues


@given(st.lists(st.integers(0, 9), min_size=1, max_size=200), st.integers(0, 20), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_answers_lie_in_the_document_apart_and_in_order(ids, prefix, count):
    prefix = min(prefix, len(ids))
    places = cue_places(DocumentView(ids, protected_prefix=prefix), count)
    assert len(places) <= count
    room = len(ids) - prefix - QUESTION - SKIPPED - OPENING - ANSWER
    assert bool(places) <= (room >= 0)
    assert bool(places) >= (room >= 1)  # of two neighbours one is off the grid
    assert all(b - a >= ANSWER for a, b in pairwise(places))
    assert all(prefix + QUESTION + SKIPPED + OPENING <= at <= len(ids) - ANSWER for at in places)
    grid = range(prefix + CUE_ASKED, len(ids), CUE_EVERY)
    assert not any(at in grid for at in places)


def test_of_each_part_the_rarest_answer_is_asked_for():
    ids = [1, 2, 3, 4, 5, 6, 7] * 20
    ids[41:47] = [90, 91, 92, 93, 80, 81]
    ids[101:107] = [94, 95, 96, 97, 82, 83]
    assert cue_places(DocumentView(ids), 2) == [41, 101]


def test_numbers_and_names_are_asked_for_first(tiny):
    plain = "The grass is green and the sky is blue. " * 12
    text = plain + "The door of Ambrose opens with 482913. " + plain
    document = tiny.prepare(text).document
    answers = [tiny.text.decode(document.token_ids[at : at + ANSWER]) for at in cue_places(document, 2)]
    assert any("482" in answer for answer in answers)
    assert any(answer.strip()[:1] in "Am" for answer in answers)


def test_a_cue_is_in_the_models_own_form(tiny):
    text = "The grass is green. " * 20 + "The access code is 482913. " + "The sky is blue. " * 20
    job = tiny.prepare(text)
    probe = Probe.of(job.document, 1)
    (cue,), (at,) = probe.passes, probe.places
    asked, answer = tiny.text.decode(cue.token_ids).split(tiny.text.decode(job.document.suffix))
    assert asked.startswith("\n\n")
    assert "482" in answer
    own = job.document.token_ids
    assert list(cue.token_ids[-ANSWER - OPENING + 1 :]) == list(own[at - OPENING : at + ANSWER - 1])
    assert probe.answers == (tuple(own[at : at + ANSWER]),)
    assert cue.first_position == job.num_tokens
    assert probe.prefix == tuple(job.document.token_ids[: job.document.protected_prefix])


def test_a_document_that_is_too_short_for_a_bound_has_none(tiny):
    job = tiny.prepare("The access code of the amber falcon is 482913. The sky is blue today. " * 2, policy="full")
    (compression,) = tiny.run_levels([Level(job, "int8")])
    quality = compression.quality
    assert quality.cues < LEAST
    assert quality.low is None
    assert f"a bound takes {LEAST}" in quality.reason or quality.agreement is None


def test_a_fast_probe_grows_with_the_document():
    assert [cue_count("fast", tokens) for tokens in (100, 2_000, 4_096, 32_000)] == [10, 15, 32, 48]
    assert cue_count("full", 100) == CUES
    assert cue_count(False, 2_000) == 0


def test_where_nothing_can_be_measured_there_is_no_quality(tiny, prose):
    assert measured(tiny, "Too short.", policy="full") is None
    assert measured(tiny, prose, policy="lagkv", policy_params={"prefill": "chunked"}) is None
    assert tiny.probe(tiny.prepare([5, 6, 7] * 5_460)) is None  # of 16,384 tokens: no room for a cue behind them
    assert tiny.probe(tiny.prepare([5, 6, 7] * 5_000)) is not None
    assert tiny.probe(tiny.prepare(prose), 0) is None


def test_a_reference_measures_no_other_document_and_no_other_model(tiny, prose, llama):
    prefill = tiny.compressor.prefill([Level(tiny.prepare(prose))], cues=CUES)
    assert prefill.reference is not None
    with pytest.raises(InvalidRequest, match="another document"):
        tiny.compressor.measure(tiny.compress(prose + " More."), prefill.reference)
    with pytest.raises(ModelMismatch):
        llama.engine.compressor.measure(prefill.compressions[0].cache, prefill.reference)


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
    for level, made in zip(levels, tiny.run_levels(levels, cues=FEW), strict=True):
        alone = own[id(level.job)]
        assert made.cache.identity == alone.identity == level.job.identity
        assert made.cache.to_bytes() == alone.to_bytes(level.codec)
        assert made.cache.codec == level.codec
        assert made.quality is not None


@pytest.mark.parametrize("policy", few(1, ["lagkv", "localkv"]))
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


@pytest.mark.slow
def test_levels_that_look_behind_the_document_in_other_ways_have_their_own_prefill(tiny, prose):
    encoded = tiny.encode_document(prose)
    jobs = [tiny.prepare(encoded, policy=policy) for policy in ("keydiff", "snapkv", "knorm", "tova", "kvzip")]
    groups = [[level.job.policy.name for level in group] for group in shared([Level(job) for job in jobs])]
    assert groups == [["keydiff", "knorm"], ["snapkv", "tova"], ["kvzip"]]
    for job, made in zip(jobs, tiny.run_levels([Level(job) for job in jobs]), strict=True):
        assert made.cache.to_bytes() == tiny.run(job).cache.to_bytes()


@pytest.mark.slow
def test_two_documents_share_nothing(tiny, prose):
    levels = [Level(tiny.prepare(text, compression_ratio=0.5)) for text in (prose, "A" + prose)]
    assert len(shared(levels)) == 2
    for level, made in zip(levels, tiny.run_levels(levels), strict=True):
        assert made.cache.to_bytes() == tiny.run(level.job).cache.to_bytes()


@pytest.fixture
def long_forwards(tiny, prose, monkeypatch):
    """How often the model ran, by its modules, over something as long as the document."""
    monkeypatch.setitem(tiny.passes.__dict__, "program", None)
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


def test_asking_ends_where_the_floor_is_out_of_reach(tiny, prose, monkeypatch):
    """And nowhere else: the quality of a cache that may reach it is the one that all cues give."""
    levels = [Level(tiny.prepare(prose, compression_ratio=ratio)) for ratio in (0.25, 0.9375)]
    made = tiny.compressor.prefill(levels, cues=CUES)
    asked = []
    ask = Compressor._answering
    monkeypatch.setattr(Compressor, "_answering", lambda *given: asked.append(len(given[2].places)) or ask(*given))
    good, bad = (tiny.compressor.measure(one.cache, made.reference) for one in made.compressions)
    assert asked == [good.cues, bad.cues] == [len(made.reference.probe.places)] * 2
    asked.clear()
    stopped = tiny.compressor.measure(made.compressions[1].cache, made.reference, 0.95)
    assert sum(asked) == stopped.cues < bad.cues / 2
    assert max(asked) <= 24
    assert stopped.high < 0.95
    assert "out of reach" in stopped.reason
    assert abs(stopped.agreement - bad.agreement) < 0.3
    for floor in (good.low, 0.5):
        again = tiny.compressor.measure(made.compressions[0].cache, made.reference, floor)
        assert replace_s(again) == replace_s(good)


def replace_s(quality):
    return quality.model_copy(update={"probe_s": 0.0, "kl": round(quality.kl, 5)})


@pytest.mark.slow
def test_the_figure_is_the_same_whatever_number_of_logits_is_held(tiny, prose, monkeypatch):
    """No call makes more than a part of them: 1,800 rows of a vocabulary of 150,000 are a gigabyte."""
    whole = measured(tiny, prose, compression_ratio=0.5)
    monkeypatch.setattr(quality, "_LOGITS", 12 * tiny.model.config.vocab_size)
    sizes = []
    events = quality._events
    monkeypatch.setattr(quality, "_events", lambda parts, tokens: events(map(noted(sizes), parts), tokens))
    assert replace_s(measured(tiny, prose, compression_ratio=0.5)) == replace_s(whole)
    assert max(sizes) == 12
    assert sum(sizes) >= 12 * whole.cues


def noted(sizes):
    def note(part):
        sizes.append(len(part))
        return part

    return note
