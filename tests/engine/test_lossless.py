"""Codec lossless through the engine: answers, exports, appended text and indexed caches are those of codec none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.planes import PlaneRows
from kvshelf.artifact.records import parts_of
from kvshelf.engine.engine import Engine
from tests.conftest import save_random_model
from tests.store.caches import require_equal

TEXT = " ".join(f"Item {i} weighs {i * i % 97} grams and lies in box {i * 7 % 31}." for i in range(40))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def engine(request, tmp_path_factory):
    folder = save_random_model(tmp_path_factory.mktemp("model") / "m", seed=3)
    return Engine.load(str(folder), device="cpu", dtype=request.param)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("full", {}), ("kvzip", {"compression_ratio": 0.5}), ("infllm", {}), ("think", {"compression_ratio": 0.5})],
)
def test_a_cache_reads_as_the_same_without_it(engine, policy, options):
    cache = engine.compress(TEXT, policy=policy, **options)
    coded = engine.encoded(cache, "lossless")
    assert all(isinstance(part.keys, PlaneRows) for layer in coded.layers for part in parts_of(layer))
    read = CompressedCache.from_bytes(coded.to_bytes())
    require_equal(engine.coders.decoded(read), replace(cache, codec="lossless"))
    asked = {"max_new_tokens": 6}
    assert engine.answer(read, "What?", **asked) == engine.answer(cache, "What?", **asked)


def test_an_export_has_the_same_tensors(engine):
    cache = engine.compress(TEXT, policy="keydiff", compression_ratio=0.5)
    ours, exact = engine.export(engine.encoded(cache, "lossless")), engine.export(cache)
    for one, other in zip(ours.layers, exact.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_it_is_appended_to_without_end(engine):
    ids = engine.text.encode(TEXT)[:250]
    plain = engine.compress(ids[:60], policy="full")
    coded = engine.encoded(plain, "lossless")
    for start in range(60, 250, 10):
        more = ids[start : start + 10]
        plain, coded = engine.extend(plain, more, policy="full"), engine.extend(coded, more, policy="full")
    assert coded.codec == "lossless"
    assert max(len(parts_of(layer)) for layer in coded.layers) <= 12
    decoded = engine.coders.decoded(CompressedCache.from_bytes(coded.to_bytes()))
    for ours, exact in zip(decoded.layers, plain.layers, strict=True):
        for one, other in zip(ours.dense(), exact.dense(), strict=True):
            assert torch.equal(one, other)
