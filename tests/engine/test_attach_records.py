"""Attaching every kind of layer record: merged tokens, quantized ones, keys without their rotation, several parts.

The oracle spells out every token that a record stands for, and masks what is not there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Merged, Parts
from kvshelf.engine.attention.attached import CACHE_ARGUMENT, AttachedCache
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.errors import StateConflict
from tests.amounts import pairwise
from tests.by_hand import Prefix, frequencies, greedy, logits_after
from tests.recorded import ARCHITECTURES
from tests.store.caches import from_heads

TOKENS, QUESTION, ANSWER = 300, 15, 8
CODECS = ["none", "int8", "int4:residual=16", "mixed"]


def relative_error(ours, expected):
    return float((ours.double() - expected).abs().max() / expected.abs().max())


def ems(oracle, **params):
    cache = oracle.engine.compress(oracle.ids[:TOKENS], policy="ems", budget_tokens=60, tau=0.3, **params)
    assert any(isinstance(part, Merged) for record in cache.layers for part in getattr(record, "parts", (record,)))
    return cache


def unrotated(oracle):
    """A cache of which a codec might keep keys as they were before RoPE; heads of different lengths, one empty."""
    cache = oracle.engine.compress(oracle.ids[:TOKENS], policy="keydiff", budget_tokens=60)
    layers = []
    for record in cache.layers:
        heads = list(zip(record.heads(), record.positions, strict=True))
        lengths = [60 - 25 * head for head in range(len(heads))]
        lengths[-1] *= len(heads) == 1  # the last of several keeps nothing
        keys = [oracle.engine.rope.unrotate(keys, at)[:n] for ((keys, _), at), n in zip(heads, lengths, strict=True)]
        values = [values[:n] for ((_, values), _), n in zip(heads, lengths, strict=True)]
        places = [at[:n] for (_, at), n in zip(heads, lengths, strict=True)]
        packed = from_heads(keys, values, places, rope_mode="pre")
        layers.append(replace(packed, importance=torch.arange(packed.entries).float()))
    return replace(cache, layers=tuple(layers))


CACHES = {
    "merged after RoPE": lambda oracle: ems(oracle, pos="post"),
    "merged before RoPE": lambda oracle: ems(oracle, pos="pre"),
    "kept before RoPE, ragged": unrotated,
    "pruned, ragged": lambda oracle: oracle.engine.compress(
        oracle.ids[:TOKENS], policy="think", base="ada", budget_tokens=80, whole_keys=12
    ),
}


@pytest.fixture(scope="module", params=CACHES)
def compressed(request, oracle):
    return CACHES[request.param](oracle)


EVERY_RECORD = {"oracle": ARCHITECTURES, "compressed": CACHES, "codec": CODECS}


@pairwise(EVERY_RECORD, indirect=["oracle", "compressed"])
def test_attached_equals_every_token_spelled_out(oracle, compressed, codec):
    cache = compressed.encoded(codec)
    if codec != "none":
        assert cache.nbytes < compressed.nbytes
    model, question = oracle.model, oracle.ids[TOKENS : TOKENS + QUESTION]
    by_hand = Prefix.spelled_out(cache, frequencies(model))
    expected = logits_after(model, by_hand, question, TOKENS)
    for source in (cache, CompressedCache.from_bytes(cache.to_bytes())):
        with oracle.engine.attached(source) as past, torch.no_grad():
            ours = model(torch.tensor([question]), **{CACHE_ARGUMENT: past}).logits[0]
        # Merged and quantized prefixes hold their sums in fp32; the models are badly conditioned (see test_attach).
        assert relative_error(ours, expected) < 1e-4


@pairwise(EVERY_RECORD, indirect=["oracle", "compressed"])
def test_generate_answers_as_spelled_out(oracle, compressed, codec):
    cache = compressed.encoded(codec)
    question = oracle.ids[TOKENS : TOKENS + QUESTION]
    with oracle.engine.attached(cache) as past:
        ids = past.with_document(torch.tensor([question]))
        out = oracle.model.generate(
            ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: past}, max_new_tokens=ANSWER, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    ours = out[0, ids.shape[1] :].tolist()
    by_hand = Prefix.spelled_out(cache, frequencies(oracle.model))
    expected = greedy(oracle.model, by_hand, question, TOKENS, ANSWER, guess=ours)
    assert len(expected) >= ANSWER // 2
    assert ours[: len(expected)] == expected
    answered = oracle.engine.answer(cache, question, max_new_tokens=len(expected)).token_ids  # may meet an end token
    assert answered == expected[: len(answered)]


def test_a_rotation_that_is_missing_changes_the_answer(oracle):
    """The spelled-out oracle would notice keys that were attended to without their rotation."""
    cache, question = unrotated(oracle), oracle.ids[TOKENS : TOKENS + QUESTION]
    bare = replace(cache, layers=tuple(replace(record, rope_mode="baked") for record in cache.layers))
    inv_freq = frequencies(oracle.model)
    answers = [logits_after(oracle.model, Prefix.spelled_out(c, inv_freq), question, TOKENS) for c in (cache, bare)]
    assert relative_error(*answers) > 1e-2


def test_codecs_make_parts_of_these_records(llama):
    cache = ems(llama, pos="pre")
    assert all(isinstance(record, Parts) for record in cache.encoded("mixed").layers)


def test_keys_without_rotation_are_refused_where_there_is_none_to_apply(llama):
    with pytest.raises(StateConflict, match="has none to apply"):
        AttachedCache(Attachment(unrotated(llama), llama.engine.passes.devices.layers, None))
