"""Fair eviction: shares of sections against a loop that gives one seat after another, and what sections are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.method import Needs
from kvshelf.methods.policies import POLICIES, build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.fair import Fair
from kvshelf_bench.models.small import small_model
from tests.views import random_layer

LATENTS = pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="older transformers cache expanded keys")
RULES = "".join(
    f"## Part {i}\nThe code of room {i} is {i * 7919 % 1000}. " + "The tide turns. " * i + "\n" for i in range(9)
)


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return Engine.load("kvshelf-tiny", device="cpu")


def reference(scores: list[float], protected: list[bool], starts: list[int], entries: int) -> list[int]:
    """The tokens of one head that stay: protected ones, then one seat after another."""
    spans = list(zip(starts, [*starts[1:], len(scores)], strict=True))
    left = [
        sorted((at for at in range(*span) if not protected[at]), key=lambda at: (-scores[at], at)) for span in spans
    ]
    stays = [at for at, always in enumerate(protected) if always]
    taken = [sum(protected[first:end]) for first, end in spans]
    while len(stays) < entries:
        # Before any section has a second entry, each has its first; then who is owed most; equals by their place.
        waiting = [s for s in range(len(spans)) if left[s]]
        first = [s for s in waiting if taken[s] == 0] or waiting
        size = [end - begin for begin, end in spans]
        best = min(first, key=lambda s: (-size[s] / (2 * taken[s] + 1), left[s][0]))
        stays.append(left[best].pop(0))
        taken[best] += 1
    return sorted(stays)


def stay_always(layer: Any) -> list[set[int]]:
    """The tokens of each head that stay whatever their scores."""
    importance = torch.split(layer.importance, list(layer.lengths))
    return [{*head[scores.isposinf()].tolist()} for head, scores in zip(layer.positions, importance, strict=True)]


@settings(deadline=None, max_examples=80)
@given(
    base=st.sampled_from(["keydiff", "knorm", "snapkv"]),
    edges=st.lists(st.integers(1, 49), max_size=7, unique=True),
    tokens=st.integers(50, 80),
    template=st.integers(0, 5),
    entries=st.integers(9, 49),
    seed=st.integers(0, 999),
)
def test_it_keeps_what_the_loop_keeps(
    base: str, edges: list[int], tokens: int, template: int, entries: int, seed: int
) -> None:
    layer = random_layer(tokens, kv_heads=2, seed=seed, protected=template)
    edges = sorted(edges)
    by = (
        "tokens:" + ",".join(f"{a}-{b}" for a, b in zip(edges, [*edges[1:], tokens], strict=True))
        if edges
        else "blocks"
    )
    window = {"window": 3} if base == "snapkv" else {}
    fair = build("fair", {"base": base, "by": by, **window})
    if edges:
        fair = fair.fitted(layer.document, Budget(entries, 1 - entries / tokens), frozenset(window))
    assert isinstance(fair, Fair)
    record = fair.reduce(layer, LayerBudget.uniform(2, entries))
    scores, protected = fair.score(layer).tolist(), fair.protected(layer).tolist()
    assert [kept.tolist() for kept in record.positions] == [
        reference(head, protected, [0, *edges], entries) for head in scores
    ]


@pytest.mark.parametrize("base", ["kvzip", "cake", "pyramidkv", "defensivekv"])
def test_heads_and_layers_share_as_the_base_says(base: str, tiny: Engine) -> None:
    """Also where layers are reduced in cascade, before the others are there."""
    alone = tiny.compress(RULES, policy=base, compression_ratio=0.75)
    job = tiny.prepare(RULES, policy="fair", policy_params={"base": base}, compression_ratio=0.75)
    cache = tiny.run(job).cache
    assert isinstance(job.policy, Fair)
    scores = tiny.compressor.scores(job)
    assert cache.kept_tokens == alone.kept_tokens
    for layer, other, score in zip(cache.reduced, alone.reduced, scores, strict=True):
        assert [len(head) for head in layer.positions] == [len(head) for head in other.positions]
        always = stay_always(other)[0]
        for head, of_head in zip(layer.positions, score.tolist(), strict=True):
            protected = [at in always for at in range(job.num_tokens)]
            assert head.tolist() == reference(of_head, protected, list(job.policy.starts), len(head))


@pytest.mark.parametrize("base", Fair.bases(POLICIES))
def test_every_base_keeps_its_number_of_entries_and_some_of_each_section(base: str, tiny: Engine) -> None:
    fields: dict[str, Any] = {"compression_ratio": 0.75} if POLICIES[base].takes_budget else {}
    alone = tiny.compress(RULES, policy=base, **fields)
    cache = tiny.compress(RULES, policy="fair", base=base, **fields)
    assert cache.kept_tokens == alone.kept_tokens
    starts = tiny.prepare(RULES, policy="fair", policy_params={"base": base}, **fields).policy.starts  # type: ignore[attr-defined]
    assert len(starts) == 10, "the template's first line, and nine parts"
    for layer in cache.reduced:
        for head, always in zip(layer.positions, stay_always(layer), strict=True):
            first, every = (
                len(torch.bucketize(torch.tensor(sorted(tokens)), torch.tensor(starts[1:]), right=True).unique())
                for tokens in (always, {*head.tolist()})
            )
            assert every == min(len(starts), first + len(head) - len(always))


def test_one_section_is_the_base_alone(tiny: Engine) -> None:
    text = "The mill has 12 wheels. " * 40
    for base in ("keydiff", "snapkv", "kvzip"):
        alone = tiny.compress(text, policy=base, compression_ratio=0.75, layout="plain")
        cache = tiny.compress(text, policy="fair", base=base, compression_ratio=0.75, layout="plain")
        for one, other in zip(cache.reduced, alone.reduced, strict=True):
            assert torch.equal(one.entry_positions, other.entry_positions)  # type: ignore[union-attr]
            assert torch.equal(one.keys, other.keys)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("by", "begun"),
    [
        ("section", ["# One", "Two", "1. Do this", "2) Do that", "3.1 Or"]),
        ("blocks", ["1. Do this", "Other words", "3.1 Or"]),
        ("lines:^(Other|red 3)", ["red 34", "Other words"]),
        ("tokens:5-9,9-20", None),
    ],
)
def test_sections_are_where_they_are_said_to_be(by: str, begun: list[str] | None, tiny: Engine) -> None:
    text = "# One\nred 12.\nTwo\n===\nred 34\n\n1. Do this.\n2) Do that.\n\nOther words.\n\n\n3.1 Or: 1990 was fine.\n"
    form = tiny.encoder.require_text("text")
    job = tiny.prepare(text, policy="fair", policy_params={"by": by}, compression_ratio=0.5)
    assert isinstance(job.policy, Fair)
    first, *starts = job.policy.starts
    assert first == 0
    if begun is None:
        assert starts == [5, 9, 20]
    else:
        texts = [form.decode(job.document.token_ids[at : at + 40]) for at in starts]
        assert [text[: len(said)] for text, said in zip(texts, begun, strict=True)] == begun
    if by == "section":
        more = {"protect": ["headings", "text:1. Do"]}
        job = tiny.prepare(text, policy="fair", policy_params={"by": by}, compression_ratio=0.25, **more)  # type: ignore[arg-type]
        places = job.document.judged.places
        assert isinstance(job.policy, Fair)
        assert places is not None
        # Each begins with its first token that is not protected.
        assert job.policy.starts == (0, *(sum(place < at for place in places) for at in starts))


def test_protected_tokens_stay_beside_shares(tiny: Engine) -> None:
    fields: dict[str, Any] = {"policy": "fair", "policy_params": {"base": "kvzip"}, "compression_ratio": 0.75}
    job = tiny.prepare(RULES, **fields, protect=["headings"])
    inside = {at for first, end in job.document.protect for at in range(first, end)}
    cache = tiny.run(job).cache
    assert sum(len(head) for layer in cache.reduced for head in layer.positions) == sum(
        job.budget.tokens * layer.kv_heads for layer in cache.reduced
    )
    assert all(inside <= set(head.tolist()) for layer in cache.reduced for head in layer.positions)


@LATENTS
def test_heads_that_share_latents_keep_the_same() -> None:
    engine = Engine(small_model("deepseek_v3"), name="m")
    cache = engine.compress(
        list(range(3, 103)), policy="fair", base="keydiff", by="tokens:10-40,40-41", compression_ratio=0.75
    )
    for layer in cache.reduced:
        (head,) = layer.positions
        assert {int(at) for at in head if 10 <= at < 40}
        assert 40 in head.tolist()


def test_it_takes_what_is_appended(tiny: Engine) -> None:
    cache = tiny.compress("The harbour master keeps the tide tables. " * 9, policy="full", layout="plain")
    grown = tiny.extend(cache, RULES, policy="fair", base="keydiff", compression_ratio=0.75)
    assert grown.identity.policy_params == {"base": "keydiff", "by": "section"}
    assert grown.kept_tokens < cache.num_tokens + 0.3 * (grown.num_tokens - cache.num_tokens)


def test_what_is_no_section_or_no_base_is_refused_by_name(tiny: Engine) -> None:
    for by, message in {
        "sections": "none of section, blocks",
        "lines:(a": "cannot be read",
        "lines:": "from 1 to 512",
        "lines:zebra": "no line of the document is that",
        "tokens:": "are no tokens",
        "tokens:1": "are no tokens",
        "tokens:9-3": "do not ascend",
        "tokens:0-9,5-12": "do not ascend",
        "tokens:0-99999": "the document has",
    }.items():
        with pytest.raises(InvalidRequest, match=message) as refused:
            tiny.prepare(RULES, policy="fair", policy_params={"by": by}, compression_ratio=0.5)
        assert refused.value.param == "policy_params.by"
        assert repr(by)[:20] in str(refused.value)
    for base in ("full", "ada", "chunkkv", "lagkv", "ems", "headkv", "arkv", "fair", "streaming_llm", "nothing"):
        with pytest.raises(InvalidRequest, match="fair can be built around") as refused:
            build("fair", {"base": base})
        assert refused.value.param == "policy_params.base"
    with pytest.raises(InvalidRequest, match="works on whole layers"):
        build("fair", {"base": "kvzip", "prefill": "chunked"})
    with pytest.raises(PolicyUnsupported, match="no tokenizer"):
        Engine(small_model("llama"), name="m").compress(list(range(3, 103)), policy="fair", base="keydiff")


def test_it_needs_the_text_where_sections_are_of_the_text() -> None:
    assert build("fair", {"base": "keydiff"}).needs is Needs.TEXT
    assert build("fair", {"base": "keydiff", "by": "tokens:0-9"}).needs is Needs.NOTHING
    fair = build("fair", {"by": "blocks", "window": 9, "base": "pyramidkv"})
    assert build("fair", fair.parameters()) == fair
    assert fair.takes_questions
    assert build("fair", {"base": "kvzip"}).phase == "cascade"
