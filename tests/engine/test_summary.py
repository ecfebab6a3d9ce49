"""Summaries: codes of keys that say which documents hold the words of a question."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.shape import MAX_CODES
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.summary import LAYERS, _projections, packed, score, unpacked
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.samples.tasks import make_document
from kvshelf_bench.models.small import small_model
from kvshelf_bench.quality.retrieval import counter
from tests.engine.asking import ids

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20


@pytest.mark.slow
def test_the_right_document_is_among_the_first(tiny: Engine) -> None:
    """Of 40 documents with 16 facts each: chance finds 1 of 40 first, and BM25 half as many as summaries do."""
    made = [make_document("multikey", "prose", 512, 3_000_000 + i, counter(tiny)) for i in range(40)]
    summaries = [unpacked(tiny.compress(each.text, policy="knorm").summary) for each in made]
    first = 0
    for number, each in enumerate(made):
        scores = score(tiny.searcher.codes(tiny.searcher.encode(each.questions[0].text)), summaries)
        assert all(0 <= found <= 1 for found in scores)
        first += scores.index(max(scores)) == number
    assert first >= 32


def test_codes_are_the_signs_of_projected_keys(tiny: Engine) -> None:
    """By hand, from transformers' own keys: those of the first layer, before their rotation."""
    document = tiny.encode_document(DOCUMENT)
    layer = tiny.model.base_model.layers[0]

    def keys(token_ids: list[int]) -> torch.Tensor:
        states = layer.input_layernorm(tiny.model.base_model.embed_tokens(torch.tensor(token_ids)))
        return layer.self_attn.k_proj(states).detach()

    vocabulary = tiny.model.config.vocab_size
    mean = keys([i * vocabulary // 64 for i in range(64)]).mean(0)
    made = keys(list(document.token_ids)) - mean
    bits = (made @ _projections(made.shape[1])) > 0
    expected = {sum(1 << place for place, bit in enumerate(row) if bit) for row in bits.tolist()}
    found = {int(code) for code in unpacked(tiny.compress(DOCUMENT, policy="full").summary)[0]}
    assert len(found ^ expected) <= 0.05 * len(expected)  # a sign near zero may come out either way


def test_levels_and_codecs_share_the_summary_and_blobs_keep_it(tiny: Engine) -> None:
    jobs = [tiny.prepare(DOCUMENT, policy=policy, compression_ratio=0.5) for policy in ("keydiff", "snapkv")]
    levels = [Level(jobs[0], "int4"), Level(jobs[1], "none")]
    caches = [made.cache for made in tiny.run_levels(levels, cues=0)]
    whole = tiny.compress(DOCUMENT, policy="full")
    assert len(whole.summary) == LAYERS
    assert {cache.summary for cache in caches} == {whole.summary}
    for cache in caches:
        assert CompressedCache.from_bytes(cache.to_bytes()).summary == whole.summary
    assert sum(map(len, whole.summary)) < 0.05 * tiny.encoded(whole, "int4").nbytes


def test_a_cache_answers_alike_without_its_summary(tiny: Engine) -> None:
    cache = tiny.compress(DOCUMENT, policy="full")
    plain = replace(cache, summary=())
    assert plain.identity == cache.identity
    assert tiny.answer(plain, "Who keeps it?").token_ids == tiny.answer(cache, "Who keeps it?").token_ids


def test_codes_are_distinct_ascending_and_as_many_as_a_header_holds() -> None:
    codes = np.arange(3 * MAX_CODES, dtype=np.uint64) * 7 % (2 * MAX_CODES + 1)
    (kept,) = unpacked([packed(codes)])
    assert len(kept) == MAX_CODES
    assert (np.diff(kept.astype(np.int64)) > 0).all()
    places = [int(np.flatnonzero(codes == code)[0]) for code in kept]
    assert max(np.diff(sorted(places))) <= 3, "they are spread over the whole document"
    assert packed(codes[:5]) == np.sort(codes[:5]).tobytes()


def test_a_score_is_weighed_by_how_few_documents_have_a_code() -> None:
    def layer(*codes: int) -> np.ndarray:
        return np.array(codes, np.uint64)

    common, rare, absent = 0, 0xFFFF_FFFF, 0xFFFF_FFFF_0000_0000
    documents = [[layer(common, rare)], [layer(common)], [layer(common)]]
    question = [layer(common, rare)]
    found = score(question, documents)
    assert found[0] == pytest.approx(1)
    assert found[1] == found[2] < 0.2  # what all have says little
    near = score([layer(rare ^ 0b11)], documents)
    assert near[0] == pytest.approx(1 - 2 / 6.4)
    assert near[1:] == [0, 0]
    assert score([layer(absent)], documents) == [0, 0, 0]


@pytest.mark.parametrize(
    ("query", "about"), [("", "empty"), (" \n ", "empty"), ("tide " * 20_000, "tokens, and .* takes")]
)
def test_a_question_that_cannot_be_searched_is_refused(tiny: Engine, query: str, about: str) -> None:
    with pytest.raises(InvalidRequest, match=about) as refusal:
        tiny.searcher.encode(query)
    assert refusal.value.param == "query"


def test_a_model_without_summaries_says_why_and_its_caches_have_none() -> None:
    engine = Engine(small_model("gemma2"))
    with pytest.raises(PolicyUnsupported, match="windows") as refusal:
        engine.searcher.encode("tide")
    assert refusal.value.param == "model"
    assert engine.compress(ids(96), policy="full").summary == ()
