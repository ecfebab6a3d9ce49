"""Which tokens an answer says it read, against choices made by hand in fp64, and against the tables of each step."""

from __future__ import annotations

import pytest
import torch

from kvshelf.api.answers import Answer
from kvshelf.engine.decode.generation import Sampling
from kvshelf.kernels.prefix_attention import SelectedPrefix
from tests.by_hand import Prefix, frequencies, logits_after
from tests.engine.test_selecting import BUDGET, KINDS, pages_by_hand


@pytest.fixture(scope="module")
def caches(llama):
    made = [llama.engine.compress(llama.ids[i * 9 : i * 9 + 230], **kind) for i, (kind, _) in enumerate(KINDS)]
    return [cache.encoded(codec) for cache, (_, codec) in zip(made, KINDS, strict=True)]


def answered(engine, asked, question, select=None, tokens=BUDGET, count=12, after=lambda *_: None) -> Answer:
    """The answer with its passages. after: is called with the selection once a token of the answer has chosen."""
    document = engine.joined([engine.attach(cache) for cache in asked])
    selection = None
    if select is not None:
        selection = engine.select(document, select, question_tokens=len(question), tokens=tokens)
    generation, batch = engine.start(document, question, Sampling(count), selection, passages=True), engine.batch()
    while not generation.finished:
        answering, seen = bool(generation.token_ids), generation.seen
        assert batch.step([generation]) != [None]
        if answering and seen is selection:
            after(document, selection)
    return generation.answer()


def parts(record):
    return getattr(record, "parts", (record,))


def in_bytes(reads: torch.Tensor, most: int) -> bytes:
    return bytes(round(255 * count / most) for count in reads.tolist())


def held(cache) -> bytes:
    """The part of the heads that hold each token."""
    reads = torch.zeros(cache.num_tokens, dtype=torch.int64)
    for layer in cache.layers:
        for part in parts(layer):
            for positions in part.positions:
                reads[positions.long()] += 1
    return in_bytes(reads, sum(layer.kv_heads for layer in cache.layers))


@pytest.mark.parametrize(("number", "whole"), list(enumerate((0, 16, 0, 0))), ids=["full", "int4", "ragged", "int8"])
def test_the_shares_of_quest_are_those_of_its_definition(llama, caches, number, whole):
    cache, question = caches[number], llama.ids[3:14]
    answer = answered(llama.engine, [cache], question, "quest")
    assert len(answer.token_ids) > 4
    by_hand, shown = pages_by_hand(cache, len(question), 16, BUDGET, whole), {}

    def chosen(layer, queries, keys, visible):
        shown[layer] = by_hand(layer, queries, keys, visible)
        return shown[layer]

    prefix = Prefix.spelled_out(cache, frequencies(llama.model))
    run = question + answer.token_ids[:-1]
    logits_after(llama.model, prefix, run, cache.next_position, chosen)
    reads = torch.zeros(cache.num_tokens, dtype=torch.int64)
    for layer, record in enumerate(cache.layers):
        group = len(shown[layer]) // record.kv_heads
        for head in range(record.kv_heads):
            positions = torch.cat([part.positions[head] for part in parts(record)]).long()
            seen = shown[layer][head * group, len(question) :, : len(positions)]
            reads.index_add_(0, positions, seen.sum(0))
    tokens = len(answer.token_ids) - 1
    assert answer.passages == (in_bytes(reads, tokens * sum(record.kv_heads for record in cache.layers)),)
    assert len(set(answer.passages[0])) > 3


@pytest.mark.parametrize("select", ["quest", "sage", "policy:snapkv"])
def test_a_budget_for_all_reads_all_that_is_stored(llama, caches, select):
    answer = answered(llama.engine, [caches[0]], llama.ids[3:14], select, tokens=230)
    assert answer.passages == (bytes([255]) * 230,)
    evicted = answered(llama.engine, [caches[1]], llama.ids[3:14], select, tokens=230)
    assert evicted.passages == (held(caches[1]),)
    assert 0 < min(evicted.passages[0]) < max(evicted.passages[0]) == 255


def test_an_answer_of_one_token_comes_from_all_that_is_stored(llama, caches):
    assert answered(llama.engine, [caches[1]], llama.ids[3:14], "quest", count=1).passages == (held(caches[1]),)


@pytest.mark.parametrize("select", ["quest", "sage"])
def test_evicted_tokens_are_not_read(llama, select):
    cache = llama.engine.compress(llama.ids[:230], policy="streaming_llm", compression_ratio=0.25)
    kept = set(cache.layers[0].positions[0].tolist())
    (shares,) = answered(llama.engine, [cache], llama.ids[3:14], select).passages
    assert {token for token, share in enumerate(shares) if share} <= kept
    assert 0 < sum(shares) / 255 <= BUDGET + 0.5  # rounded bytes
    (everything,) = answered(llama.engine, [cache], llama.ids[3:14], select, tokens=230).passages
    assert everything == bytes(255 * (token in kept) for token in range(230))


@pytest.mark.parametrize("select", ["quest", "sage"])
def test_each_of_two_documents_has_its_own(llama, caches, select):
    """Against the tables after each step. The second document's heads hold different tokens in two records."""
    asked = [caches[0], caches[1]]
    reads, most = [torch.zeros(cache.num_tokens, dtype=torch.int64) for cache in asked], 0

    def count(document, selection):
        nonlocal most
        for layer, heads in enumerate(record.kv_heads for record in asked[0].layers):
            most += heads
            prefixes = iter(selection.prefixes(layer))
            for part, own in zip(document.parts, reads, strict=True):
                for record in part.entries(layer):
                    prefix = next(prefixes)
                    assert isinstance(prefix, SelectedPrefix)
                    for head, positions in enumerate(record.positions):
                        rows = prefix.chosen.rows[head, : int(prefix.chosen.counts[head])]
                        own[positions[rows.long()].long()] += 1

    answer = answered(llama.engine, asked, llama.ids[3:14], select, tokens=96, after=count)
    assert answer.passages == tuple(in_bytes(own, most) for own in reads)
    assert all(any(shares) for shares in answer.passages)
    total = sum(sum(shares) for shares in answer.passages) / 255
    assert total == pytest.approx(answer.usage.read_tokens, rel=0.15)  # that of the last token


def test_they_change_no_answer_and_are_absent_unless_asked_for(llama, caches):
    plain = llama.engine.answer(caches[1], llama.ids[3:14], max_new_tokens=12, select="quest", select_tokens=BUDGET)
    assert plain.passages is None
    told = answered(llama.engine, [caches[1]], llama.ids[3:14], "quest")
    assert (told.token_ids, told.usage) == (plain.token_ids, plain.usage)
