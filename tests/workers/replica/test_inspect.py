"""Which tokens a cache kept, told beside their text: on real caches of every kind of record, from a real shelf."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvshelf.api.inspect import KeptLayer
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, ModelMismatch, SourceNotKept, StateConflict
from kvshelf.methods.policies import POLICIES
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica import inspect as module
from kvshelf.workers.replica.inspect import kept_tokens, pieces
from tests.amounts import few
from tests.byte_fallback import byte_fallback_tokenizer, ids_of
from tests.store.caches import make_cache, make_merged

DOCUMENT = "The harbour master keeps the tide tables in a green book — über 3.14 日本語 🎉. " * 12
MESSAGES = [{"role": "user", "content": "Keep this: " + DOCUMENT}, {"role": "assistant", "content": "I do."}]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore.open(tmp_path / "home") as opened:
        yield opened


def bits(text: str, num_tokens: int) -> np.ndarray:
    raw = np.frombuffer(base64.b64decode(text), np.uint8)
    return np.unpackbits(raw, bitorder="little", count=num_tokens).astype(bool)


@pytest.mark.parametrize("policy", few(15, POLICIES))
def test_the_marks_are_the_positions_of_the_cache(policy: str, tiny: Engine, store: DiskStore) -> None:
    ratio = {"compression_ratio": 0.5} if POLICIES[policy].takes_budget else {}
    cache = tiny.compress(DOCUMENT, policy=policy, **ratio)
    found = kept_tokens(tiny, store, store.put(cache, source=DOCUMENT).id, None, tenant="default")
    assert "".join(found.tokens[found.template_tokens :]) == DOCUMENT
    assert found.template_tokens > 0
    assert (len(found.tokens), found.num_layers) == (cache.num_tokens, len(cache.layers))
    counts = np.zeros(cache.num_tokens, int)
    for told, layer in zip(found.layers, cache.layers, strict=True):
        marks = [bits(head, cache.num_tokens) for head in told.kept]
        assert [np.flatnonzero(head).tolist() for head in marks] == [head.tolist() for head in layer.positions]
        counts += np.sum(marks, axis=0)
    assert found.counts == counts.tolist()
    assert found.num_heads == sum(layer.kv_heads for layer in cache.layers)
    assert sum(found.counts) == sum(layer.entries for layer in cache.layers)
    assert (found.merged_counts is not None) == ("class" in found.meaning) == (policy == "ems")


def test_a_merged_token_is_told_apart_from_a_kept_one(tiny: Engine, store: DiskStore) -> None:
    """EMS: a token is a center, a member of another's class, or evicted, and every slot is one of the first two."""
    cache = tiny.compress(DOCUMENT, policy="ems", compression_ratio=0.75, tau=0.3)
    found = kept_tokens(tiny, store, store.put(cache).id, DOCUMENT, tenant="default")
    assert sum(found.merged_counts) > 0
    for told, layer in zip(found.layers, cache.layers, strict=True):
        starts = layer.slot_offsets
        for head in range(layer.kv_heads):
            own, merged = (bits(marks[head], cache.num_tokens) for marks in (told.kept, told.merged))
            assert not (own & merged).any()
            slots = layer.slot_positions[starts[head] : starts[head + 1]].tolist()
            assert np.flatnonzero(own | merged).tolist() == sorted(slots)


@pytest.mark.parametrize("codec", ["int4", "mixed"])
def test_a_codec_moves_no_mark(codec: str, tiny: Engine, store: DiskStore) -> None:
    cache = tiny.compress(DOCUMENT, policy="snapkv", compression_ratio=0.5)
    plain, coded = (
        kept_tokens(tiny, store, store.put(cache, codec=name, source=DOCUMENT).id, None, tenant="default")
        for name in ("none", codec)
    )
    assert coded.layers == plain.layers
    assert coded.counts == plain.counts


def test_keys_that_were_moved_are_said_to_be(tiny: Engine, store: DiskStore) -> None:
    for positions, moved in (("absolute", False), ("cache", True)):
        cache = tiny.compress(DOCUMENT, policy="streaming_llm", compression_ratio=0.5, positions=positions)
        found = kept_tokens(tiny, store, store.put(cache).id, DOCUMENT, tenant="default")
        assert ("side by side" in found.meaning) == moved


def test_a_conversation_and_token_ids_have_their_tokens_too(tiny: Engine, store: DiskStore) -> None:
    from kvshelf.artifact.identity import canonical_json

    cache = tiny.compress(MESSAGES, compression_ratio=0.5)
    stored = store.put(cache, source=canonical_json(MESSAGES))
    found = kept_tokens(tiny, store, stored.id, None, tenant="default")
    assert DOCUMENT in "".join(found.tokens)
    assert kept_tokens(tiny, store, stored.id, MESSAGES, tenant="default") == found
    ids = [5 + n % 300 for n in range(200)]
    stored = store.put(tiny.compress(ids, compression_ratio=0.5))
    found = kept_tokens(tiny, store, stored.id, ids, tenant="default")
    assert (found.num_tokens, found.template_tokens) == (200, 0)


def test_another_document_is_refused_and_so_is_a_missing_source(tiny: Engine, store: DiskStore) -> None:
    stored = store.put(tiny.compress(DOCUMENT, compression_ratio=0.5))
    with pytest.raises(SourceNotKept):
        kept_tokens(tiny, store, stored.id, None, tenant="default")
    for other in (DOCUMENT + ".", DOCUMENT.replace("green", "grey "), [5, 6, 7], MESSAGES):
        with pytest.raises(StateConflict, match=stored.document_id) as caught:
            kept_tokens(tiny, store, stored.id, other, tenant="default")
        assert caught.value.param == "document"
    with pytest.raises(InvalidRequest, match="layers 0 to"):
        kept_tokens(tiny, store, stored.id, DOCUMENT, tenant="default", first_layer=len(tiny.model.model.layers))


def test_a_cache_of_another_model_is_refused(tiny: Engine, store: DiskStore) -> None:
    stored = store.put(make_cache(1))
    with pytest.raises(ModelMismatch):
        kept_tokens(tiny, store, stored.id, DOCUMENT, tenant="default")


def test_what_one_answer_does_not_hold_comes_in_pages(
    tiny: Engine, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store.put(tiny.compress(DOCUMENT, policy="ems", compression_ratio=0.5), source=DOCUMENT)
    whole = kept_tokens(tiny, store, stored.id, None, tenant="default")
    assert whole.next_layer is None
    one_layer = sum(map(len, whole.layers[0].kept + whole.layers[0].merged))
    for bound, pages in ((1, [1, 1, 1, 1]), (one_layer, [1, 1, 1, 1]), (3 * one_layer, [3, 1])):
        monkeypatch.setattr(module, "BITMAP_BYTES", bound)
        found, sizes, following = list[KeptLayer](), list[int](), 0
        while following is not None:
            page = kept_tokens(tiny, store, stored.id, None, tenant="default", first_layer=following)
            assert bool(page.tokens) == bool(page.counts) == (following == 0)
            found += page.layers
            sizes.append(len(page.layers))
            following = page.next_layer
        assert (found, sizes) == (whole.layers, pages)


def test_the_pieces_of_any_text_are_that_text(tiny: Engine) -> None:
    """Characters of one to four bytes in any order, which the tokenizer cuts anywhere."""
    assert tiny.text is not None
    alphabet = "ab 1\n\té日🎉\u0301\u200d<|end|>" + "\u2028\x00"
    for seed in range(30):
        text = "".join(random.Random(seed).choices(alphabet, k=200))
        ids = tiny.text.encode(text)
        found = pieces(tiny.text.decoder(), ids)
        assert len(found) == len(ids)
        assert "".join(found) == text


def test_the_pieces_of_bytes_that_are_no_text_keep_the_words_beside_them() -> None:
    """A tokenizer that falls back to bytes takes back what it had read: the library's stream raises."""
    decoder = byte_fallback_tokenizer()
    ids = ids_of(decoder, "▁bal", "é".encode(), b"\xc3", "▁gon", b"\x80")
    assert pieces(decoder, ids) == ["bal", "", "é", "", "\ufffd gon", "\ufffd"]
    assert pieces(decoder, []) == []


def test_tokens_that_are_no_text_take_no_time(tiny: Engine) -> None:
    """A run of bytes that never makes a character must not be decoded again from its beginning with each token."""
    assert tiny.text is not None
    (byte,) = tiny.text.encode("日")[:1]
    found = pieces(tiny.text.decoder(), [byte] * 20_000)
    assert len(found) == 20_000
    assert set("".join(found)) == {"\ufffd"}


def test_merged_records_within_parts_are_seen() -> None:
    """As codec `mixed` leaves them: each part has its own slots."""
    import torch

    from tests.store.caches import split_at_random

    generator = torch.Generator().manual_seed(3)
    record = make_merged((6, 9), 40, generator=generator)
    whole, split = (module.marks_of(each, 40) for each in (record, split_at_random(record, generator)))
    assert whole.merged.any()
    assert np.array_equal(whole.kept, split.kept)
    assert np.array_equal(whole.merged, split.merged)
