"""SABlock against its formulas in loops, and what the paper says of them as properties."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.policies import build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.segments import best_blocks
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.source import bundled_folder
from kvshelf.model.text import TextFormat
from tests.views import best, observed, random_layer

CASES = [{}, {"protected": 3, "group": 4}, {"probes": (3,), "protected": 1}, {"probes": (9, 12)}]
WINDOW = 6


@functools.cache
def text():
    return TextFormat(AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny")))


def written_layer(tokens, *, longest=25, protected=0, seed=0, **case):
    """A random layer of a document of words, with a comma or a full stop after 1 to `longest` of them."""
    rng = random.Random(seed)
    word, comma, stop = (text().encode(part)[0] for part in (" the", ",", "."))
    ids = [word] * tokens
    at = rng.randint(1, longest)
    while at < tokens:
        ids[at] = rng.choice((comma, stop))
        at += rng.randint(1, longest)
    layer = random_layer(tokens, protected=protected, seed=seed, **case)
    return replace(layer, document=DocumentView(ids, protected, text=text()))


def segments_of(layer, stop):
    """Lists of positions, cut after each comma and full stop and after 64 tokens."""
    segments = [[]]
    for j in range(layer.protected_prefix, stop):
        segments[-1].append(j)
        if text().decode([layer.document.token_ids[j]]) in (",", ".") or len(segments[-1]) == 64:
            segments.append([])
    return [segment for segment in segments if segment]


def guided_scores(layer, alpha, diversity, form):
    """s~ of each token that can be evicted, as a dict, and the segments: eq. 3 to 8 in fp64."""
    s = observed(layer, WINDOW).mean(dim=(0, 1))
    return guided(s.tolist(), segments_of(layer, len(s)), alpha, diversity, form)


def guided(s, segments, alpha=0.5, diversity=0.5, form="scaled"):
    """s~ from the attention s of each token, and the segments: eq. 5 to 8 in fp64."""
    importances = [sum(float(s[j]) for j in segment) / len(segment) for segment in segments]
    scores = {}
    for segment, importance in zip(segments, importances, strict=True):
        p = [float(s[j]) / sum(float(s[i]) for i in segment) for j in segment]
        entropy = -sum(x * math.log(x + 1e-8) for x in p)
        weight = importance / max(importances) * (1 + diversity * entropy / math.log(max(2, len(segment))))
        for j in segment:
            scores[j] = float(s[j]) * (1 + alpha * weight) if form == "scaled" else float(s[j]) * weight**alpha
    return scores, segments


def blocks_of(segment, scores, count, size):
    """C_k(b): blocks by their mean until `count` tokens are there, the best ones of the last block only."""
    blocks = [segment[i : i + size] for i in range(0, len(segment), size)]
    chosen = []
    for block in sorted(blocks, key=lambda block: -sum(scores[j] for j in block) / len(block)):
        left = count - len(chosen)
        chosen += sorted(block, key=lambda j: -scores[j])[:left]
    return chosen


SIZES = {"odd": [1, 3, 5, 7, 9, 11, 13, 15], "all": range(1, 16), "powers": [1, 2, 4, 8]}


def naive(layer, budget, *, alpha=0.5, diversity=0.5, block=9, tau=0.9, form="scaled", sizes="odd"):
    scores, segments = guided_scores(layer, alpha, diversity, form)
    return filled(scores, segments, layer.num_tokens, budget, block=block, tau=tau, sizes=sizes)


def filled(scores, segments, tokens, budget, *, block=9, tau=0.9, sizes="odd"):
    """The tokens that stay by these s~ of those in segments: eq. 9 to 13."""
    always = set(range(tokens)) - set(scores)
    everything = [scores.get(j, 0.0) for j in range(tokens)]
    top = set(best(everything, always, budget)) - always  # eq. 9
    kept = set(always)
    for segment in segments:
        own = [j for j in segment if j in top]  # eq. 10
        for size in sorted((size for size in SIZES[sizes] if size <= block), reverse=True):
            candidates = blocks_of(segment, scores, len(own), size)
            rho = sum(scores[j] for j in candidates) / sum(scores[j] for j in own) if own else 1.0
            if size <= max(1, len(own)) and (size == 1 or rho >= tau):  # eq. 11, 12
                kept |= set(candidates)
                break
    return sorted(kept)


def kept(layer, budget, **params):
    policy = build("sablock", {"window": WINDOW, **params})
    record = policy.reduce(layer, LayerBudget.uniform(layer.kv_heads, budget))
    first, *others = (head.tolist() for head in record.positions)
    assert all(other == first for other in others), "one set for all heads of a layer"
    return first


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", ["scaled", "power"])
@pytest.mark.parametrize(("alpha", "diversity"), [(0.0, 0.5), (0.5, 0.5), (2.0, 0.0)])
def test_the_scores_are_those_of_the_formulas(case, form, alpha, diversity):
    layer = written_layer(200, **case)
    policy = build("sablock", {"window": WINDOW, "form": form, "alpha": alpha, "diversity": diversity})
    expected, _ = guided_scores(layer, alpha, diversity, form)
    scores = policy.score(layer)
    assert scores.dtype == torch.float32
    assert torch.equal(scores[0], scores[-1])
    for j, score in expected.items():
        assert float(scores[0, j]) == pytest.approx(score, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", ["scaled", "power"])
@pytest.mark.parametrize(
    ("budget", "tau", "block", "longest"), [(60, 0.9, 9, 25), (120, 0.7, 5, 12), (100, 0.8, 15, 90)]
)
def test_keeps_what_the_formulas_say(case, form, budget, tau, block, longest):
    layer = written_layer(220, longest=longest, seed=budget, **case)
    params = {"form": form, "tau": tau, "block": block}
    assert kept(layer, budget, **params) == naive(layer, budget, **params)


@pytest.mark.parametrize(("sizes", "block"), [("all", 10), ("powers", 8)])
def test_sizes_are_tried_from_the_largest_down(sizes, block):
    layer = written_layer(220, longest=25, seed=60)
    tokens = kept(layer, 60, sizes=sizes, block=block, tau=0.8)
    assert tokens == naive(layer, 60, sizes=sizes, block=block, tau=0.8)
    assert tokens != kept(layer, 60, tau=0.8)


@pytest.mark.parametrize(("sizes", "block"), [("odd", 8), ("powers", 9)])
def test_a_largest_block_that_is_no_size_is_refused(sizes, block):
    policy = build("sablock", {"sizes": sizes, "block": block})
    with pytest.raises(PolicyUnsupported, match=f"largest block is {block}, and sizes={sizes}") as refused:
        policy.fitted(DocumentView(range(100)), Budget(50, 0.5), frozenset({"block"}))
    assert refused.value.param == "policy_params.block"


def test_the_tail_is_kept_behind_a_probe_if_that_is_asked_for():
    layer = written_layer(220, probes=(9,), seed=3)
    tail = set(range(220 - WINDOW, 220))
    assert not tail <= set(kept(layer, 60))
    assert tail <= set(kept(layer, 60, keep_tail=True))
    without = written_layer(220, seed=3)
    assert kept(without, 60, keep_tail=True) == kept(without, 60), "the document's own rows observe"


def test_the_cases_above_use_blocks():
    """Or the comparison of sets would say nothing of them."""
    layer = written_layer(220, seed=60)
    assert kept(layer, 60, tau=0.9) != kept(layer, 60, tau=1.0) != kept(layer, 60, tau=0.0)


layers = st.builds(
    written_layer,
    tokens=st.integers(30, 200),
    longest=st.integers(1, 100),
    protected=st.integers(0, 3),
    seed=st.integers(0, 999),
)


@settings(max_examples=40, deadline=None)
@given(
    layer=layers,
    share=st.floats(0.35, 0.95),
    alpha=st.floats(0, 2),
    tau=st.floats(0, 1),
    block=st.sampled_from([1, 3, 9, 21, 63]),
    form=st.sampled_from(["scaled", "power"]),
)
def test_every_segment_keeps_as_many_as_its_best_tokens_are(layer, share, alpha, tau, block, form):
    """sum m_k = B - w, and no block size moves a token from one segment to another."""
    budget = int(layer.num_tokens * share)
    tokens, top = (set(kept(layer, budget, alpha=alpha, tau=tau, block=size, form=form)) for size in (block, 1))
    assert len(tokens) == len(top) == budget
    for segment in segments_of(layer, layer.num_tokens - WINDOW):
        assert len(tokens & set(segment)) == len(top & set(segment))


@settings(max_examples=40, deadline=None)
@given(layer=layers, share=st.floats(0.35, 0.95), alpha=st.floats(0, 2), form=st.sampled_from(["scaled", "power"]))
def test_tau_1_is_the_best_tokens_and_alpha_0_is_attention(layer, share, alpha, form):
    budget = int(layer.num_tokens * share)
    policy = build("sablock", {"window": WINDOW, "alpha": alpha, "form": form})
    always = set(torch.nonzero(policy.protected(layer)).flatten().tolist())
    assert kept(layer, budget, alpha=alpha, form=form, tau=1.0) == best(policy.score(layer)[0].tolist(), always, budget)
    attention = layer.window(WINDOW)
    plain = attention.pad(attention.mean().mean(dim=0)).tolist()  # SnapKV's mean over heads, without pooling
    assert kept(layer, budget, alpha=0.0, form=form, tau=1.0) == best(plain, always, budget)


@settings(max_examples=40, deadline=None)
@given(layer=layers, alpha=st.floats(0, 2), diversity=st.floats(0, 2), form=st.sampled_from(["scaled", "power"]))
def test_segments_never_change_the_order_within(layer, alpha, diversity, form):
    plain, guided = (
        build("sablock", {"window": WINDOW, "alpha": strength, "diversity": diversity, "form": form}).score(layer)[0]
        for strength in (0.0, alpha)
    )
    for segment in segments_of(layer, layer.num_tokens - WINDOW):
        order = plain[segment].argsort()
        assert (guided[segment][order].diff() >= 0).all()


@settings(max_examples=40, deadline=None)
@given(layer=layers, share=st.floats(0.35, 0.95), block=st.sampled_from([3, 9, 21]))
def test_tau_0_always_takes_the_largest_block(layer, share, block):
    budget = int(layer.num_tokens * share)
    tokens, top = (set(kept(layer, budget, tau=tau, block=block)) for tau in (0.0, 1.0))
    scores = build("sablock", {"window": WINDOW}).score(layer)[0].tolist()
    for segment in segments_of(layer, layer.num_tokens - WINDOW):
        count = len(top & set(segment))
        largest = max(size for size in range(1, block + 1, 2) if size <= max(1, count))
        assert tokens & set(segment) == set(blocks_of(segment, scores, count, largest))


def test_blocks_of_one_token_are_the_best_tokens():
    """rho(1) = 1."""
    scores = torch.rand(50, 20, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(50) % 21
    for row, blocks, count in zip(
        scores, best_blocks(scores, torch.ones(50, 20, dtype=torch.bool), counts, 1), counts, strict=True
    ):
        assert blocks.nonzero().flatten().tolist() == best(row.tolist(), set(), int(count))


def test_attention_that_underflows_everywhere_still_gives_the_budget():
    """All weight on the first key: segments without any score have neither a mean nor a distribution."""
    layer = written_layer(80)
    for head in range(2):
        layer.keys[head, 0] = 0
        layer.keys[head, 1:] = -1000 * layer.queries[2 * head, -1]
    layer = replace(layer, queries=layer.queries[[0, 0, 2, 2]])
    for form in ("scaled", "power"):
        assert len(kept(layer, 30, form=form)) == 30


def test_heads_with_unequal_budgets_keep_their_own():
    layer = written_layer(100)
    record = build("sablock", {"window": WINDOW}).reduce(layer, LayerBudget((30, 41)))
    assert [head.tolist() for head in record.positions] == [kept(layer, 30), kept(layer, 41)]
