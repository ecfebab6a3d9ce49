"""A stored cache under another codec: what a creation under it makes, to the bit, or the errors of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.packed import in_spans
from kvshelf.artifact.records import entries_from, entries_of, parts_of
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from tests.engine.forward.test_projection import many_heads

TEXT = "The code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 12
CODECS = ("lossless", "int8", "int4:group=16,residual=8", "int2", "klt")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("kvshelf-tiny", device="cpu")


@pytest.fixture(scope="module", params=["full", "knorm", "think", "ems", "protected"])
def cache(request: pytest.FixtureRequest, engine: Engine) -> CompressedCache:
    if request.param == "protected":
        return engine.compress(TEXT, policy="knorm", compression_ratio=0.5, protect=["first:8"])
    ratio = None if request.param == "full" else 0.5
    return engine.compress(TEXT, policy=request.param, compression_ratio=ratio)


def read_back(cache: CompressedCache) -> CompressedCache:
    """As a home gives it, without what only memory has."""
    return CompressedCache.from_bytes(cache.to_bytes())


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_not_rounded_becomes_what_a_creation_makes(engine: Engine, cache: CompressedCache, codec: str) -> None:
    if codec == "klt" and cache.identity.policy == "think":
        with pytest.raises(InvalidRequest, match="whole keys"):
            engine.coders.recoded(read_back(cache), codec)
        return
    direct = engine.encoded(cache, codec).to_bytes()
    for before in ("none", "lossless"):
        stored = read_back(engine.encoded(cache, before))
        assert engine.coders.recoded(stored, codec).to_bytes() == direct


def test_what_was_rounded_is_rounded_again_where_that_can_be(engine: Engine, cache: CompressedCache) -> None:
    """Each step of codes is at most half a step off, so the second is near the first, and both are near the cache."""
    if cache.identity.policy in ("ems", "think"):  # their records do not continue one another
        with pytest.raises(InvalidRequest, match="not coded a second time"):
            engine.coders.recoded(read_back(engine.encoded(cache, "int8")), "int4")
        return
    line = [read_back(engine.encoded(cache, "int8"))]
    for codec in ("int4", "int2"):
        line.append(read_back(engine.coders.recoded(line[-1], codec)))
    assert [each.codec for each in line] == ["int8", "int4", "int2"]
    assert all(len(b.to_bytes()) < len(a.to_bytes()) for a, b in pairwise(line))
    for coded, most in zip(line, (0.02, 0.3, 1.0), strict=True):
        for layer, own in zip(coded.layers, cache.layers, strict=True):
            entries, whole = entries_of(layer), entries_of(own)
            assert entries is not None
            assert whole is not None
            assert all(torch.equal(a, b) for a, b in zip(entries.positions, whole.positions, strict=True))
            for rows, plain in zip(entries.dense()[:2], whole.dense()[:2], strict=True):
                assert (rows - plain).norm() <= most * plain.norm()
                if spans := cache.identity.protect:
                    kept = [in_spans(head, spans) for head in whole.positions]
                    assert all(torch.equal(rows[h, : len(m)][m], plain[h, : len(m)][m]) for h, m in enumerate(kept))


def test_records_with_other_columns_are_refused_a_second_time_by_name() -> None:
    """No creation makes such, but what comes from elsewhere may have them."""
    engine = many_heads("llama")
    cache = engine.compress(list(range(5, 65)), policy="h2o", compression_ratio=0.2, keep_scores=True)
    coded = read_back(engine.encoded(cache, "int8:group=8,residual=8"))
    layers = []
    for layer in coded.layers:
        first, *others = parts_of(layer)
        layers.append(entries_from([first, *(replace(part, columns={}) for part in others)]))
    with pytest.raises(InvalidRequest, match="not coded a second time"):
        engine.coders.recoded(replace(coded, layers=tuple(layers)), "int4")


def test_rounded_residuals_are_refused_a_second_time_by_name() -> None:
    engine = many_heads("llama")
    cache = engine.encoded(engine.compress(list(range(5, 65)), policy="kvdirect"), "int8")
    with pytest.raises(InvalidRequest, match="residuals under int8 are not coded a second time"):
        engine.coders.recoded(read_back(cache), "int4")
