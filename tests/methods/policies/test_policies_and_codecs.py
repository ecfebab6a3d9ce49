"""Every policy with every codec: to bytes and back, attached, asked; and the same bytes when it is all done again."""

from __future__ import annotations

import functools

import pytest
import torch

from kvshelf.artifact import blob
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.methods.policies import POLICIES
from kvshelf.samples.tasks import make_document
from tests.amounts import SOAK, few

CODECS = ("none", "lossless", "int8", "int4", "int2", "mixed", "klt")
CLASSES = "klt:steps=kl,classes=1.5/4,shares=20/30"

KINDS = ("full", "keydiff", "kvdirect", "ada", "ems", "think")
"""Policies that leave each kind of layer: whole, as long in each head, residuals, ragged, merged, pruned. Beside it, a
codec sees at most a policy's scores, as mixed does. So the others are tried with that one and klt, and in a soak with
all."""


@pytest.fixture(scope="module")
def tiny():
    return Engine.load("kvshelf-tiny")


@pytest.fixture(scope="module")
def document(tiny):
    return make_document("multikey", "prose", 700, 20_261_120, tiny.text.count_tokens)


def taken(policy, codecs):
    """Those that a policy takes: an index needs the entries of each block together, and klt whole keys."""
    apart = [codec for codec in codecs if not (POLICIES[policy].indexes and codec in ("mixed", CLASSES))]
    whole = not (POLICIES[policy].prunes or POLICIES[policy].has_residuals)
    return [codec for codec in apart if whole or not codec.startswith("klt")]


@pytest.fixture(scope="module")
def compressed(tiny, document):
    @functools.cache
    def of(policy):
        options = {"compression_ratio": 0.5} if POLICIES[policy].takes_budget else {}
        return tiny.compress(document.text, policy=policy, **options)

    return of


@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        (policy, codec)
        for number, policy in enumerate(POLICIES)
        for codec in taken(
            policy, (*CODECS, CLASSES) if policy in KINDS or SOAK else ("mixed", "klt")[number % 2 :][:1]
        )
    ],
)
def test_bytes_and_back(tiny, document, compressed, policy, codec):
    cache = compressed(policy)
    in_memory = tiny.encoded(cache, codec)
    data = in_memory.to_bytes()
    read = CompressedCache.from_bytes(data)
    assert read.to_bytes() == data
    assert (read.codec, read.next_position) == (in_memory.codec, cache.next_position)
    for record, decoded, exact in zip(in_memory.layers, read.layers, cache.layers, strict=True):
        for ours, theirs, original in zip(record.positions, decoded.positions, exact.positions, strict=True):
            assert ours.tolist() == theirs.tolist() == original.tolist()
    plain = [tiny.coders.decoded(cache).layers for cache in (in_memory, read)]
    for record, decoded in zip(*plain, strict=True):
        for ours, theirs in zip(record.dense(), decoded.dense(), strict=True):
            assert torch.equal(ours, theirs)
    question = document.questions[0].text
    # An answer from logits that are no numbers is an error.
    answers = [tiny.answer(cache, question, max_new_tokens=3) for cache in (in_memory, read)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].usage.cache_read_tokens == cache.num_tokens


@pytest.mark.parametrize("policy", few(15, POLICIES))
def test_done_again_the_segments_are_the_same(tiny, document, compressed, policy):
    options = {"compression_ratio": 0.5} if POLICIES[policy].takes_budget else {}
    again = tiny.compress(document.text, policy=policy, **options)
    for codec in taken(policy, ("none", "int4", "klt", CLASSES) if policy in KINDS or SOAK else ("none", "klt")):
        digests = [
            [layer.digest for layer in blob.inspect(tiny.encoded(cache, codec).to_bytes()).header.layers]
            for cache in (compressed(policy), again)
        ]
        assert digests[0] == digests[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_quantized_answers_stay_close(tiny, document, compressed, policy):
    """Next-token distributions under int8 are those of the exact cache but for rounding."""
    cache = compressed(policy)
    ids = torch.tensor([tiny.encode_query(cache, document.questions[0].text)])
    logits = []
    for codec in ("none", "int8"):
        with torch.no_grad(), tiny.attached(cache.encoded(codec)) as past:
            logits.append(tiny.model(ids, **{CACHE_ARGUMENT: past}).logits[0, -1].log_softmax(-1))
    assert torch.nn.functional.kl_div(logits[1], logits[0], log_target=True, reduction="sum") < 0.02


def test_fewer_bits_are_fewer_bytes(tiny, compressed):
    full = compressed("full")
    none, lossless, int8, int4, int2, mixed, klt, coarser = (
        len(tiny.encoded(full, codec).to_bytes()) - sum(map(len, full.summary))  # the same under every codec
        for codec in (*CODECS, "klt:classes=1.5/4,shares=20/30")
    )
    assert none > lossless > int8 > int4 > int2
    assert int8 > mixed > int2
    assert int2 < none / 6
    assert coarser < klt < none / 2 / 16, "16 times fewer than in 16 bits, with the rest of the header"
