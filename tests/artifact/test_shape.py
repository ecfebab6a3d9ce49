"""What a header says is compared with its model before anything is allocated for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvshelf import CompressedCache, Engine
from kvshelf.artifact.blob import inspect
from kvshelf.errors import BlobError
from tests.store.bounds import memory_bounded
from tests.store.caches import make_cache
from tests.store.hostile import Parts
from tests.store.processes import run_in_child

DOCUMENT = "The keeper counts the lamps. " * 5

Edit = Callable[[Parts], None]


def forged(cache: CompressedCache, edit: Edit) -> bytes:
    parts = Parts(cache.to_bytes())
    edit(parts)
    return parts.join()


def claims(tokens: int) -> Edit:
    """More tokens, of which no head keeps any: a blob of a kilobyte."""

    def edit(parts: Parts) -> None:
        parts.fields["num_tokens"] = parts.fields["next_position"] = parts.fields["identity"]["num_tokens"] = tokens
        parts.fields["sentence_ends"] = b""

    return edit


def empty(cache: CompressedCache, heads: int) -> CompressedCache:
    """As large a cache as a header can claim without bytes."""
    layers = make_cache(lengths=((0,) * heads,) * len(cache.layers), dims=(32, 32)).layers
    return replace(cache, layers=layers)


@pytest.fixture(scope="module")
def cache(tiny: Engine) -> CompressedCache:
    return tiny.compress(DOCUMENT)


def test_a_cache_of_the_model_is_within_bounds(tiny: Engine, cache: CompressedCache) -> None:
    for found in (cache.shape, inspect(cache.to_bytes("int4")).header.shape):
        found.require_bounds(tiny.identity)
        found.require_layers(tiny.passes.layer_shapes)


def _set(**changes: Any) -> Edit:
    return lambda parts: parts.fields.update(changes)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda cache: forged(empty(cache, 2), claims(20_000_000)), "20000000 tokens"),
        (lambda cache: forged(empty(cache, 300), claims(1000)), "300 KV heads"),
        (lambda cache: forged(cache, _set(next_position=cache.num_tokens + 1)), "a question at position"),
        (lambda cache: replace(cache, layers=cache.layers[:-1]).to_bytes(), "layers"),
        (lambda cache: replace(cache, layers=cache.layers * 2).to_bytes(), "layers"),
    ],
    ids=["tokens", "heads", "position", "a layer less", "more layers"],
)
def test_a_shape_beyond_the_configuration_of_its_model_is_refused(
    cache: CompressedCache, make: Callable[[CompressedCache], bytes], problem: str
) -> None:
    header = inspect(make(cache)).header
    with pytest.raises(BlobError, match=problem) as refused:
        header.shape.require_bounds(header.to_identity().model)
    assert refused.value.reason == "wrong_shape"


@pytest.mark.parametrize(("lengths", "dims"), [((9,), (32, 32)), ((9, 9), (16, 32)), ((9, 9), (32, 8))])
def test_layers_that_the_model_does_not_make_are_refused(
    tiny: Engine, cache: CompressedCache, lengths: tuple[int, ...], dims: tuple[int, int]
) -> None:
    other = make_cache(lengths=(lengths,) * len(cache.layers), dims=dims, num_tokens=cache.num_tokens)
    found = replace(cache, layers=other.layers)
    assert other.layers[0].kv_heads != 2 or dims != (32, 32)
    with pytest.raises(BlobError, match="in layer 0") as refused:
        tiny.attach(found)
    assert refused.value.reason == "wrong_shape"


def test_a_blob_that_arrives_is_refused_before_its_layers_are_read(tiny: Engine, cache: CompressedCache) -> None:
    data = forged(empty(cache, tiny.passes.layer_shapes[0].kv_heads), claims(20_000_000))
    assert len(data) < 8000

    def child() -> None:
        with memory_bounded(64 << 20), pytest.raises(BlobError, match="20000000 tokens"):
            tiny.attach(CompressedCache.from_bytes(data))

    run_in_child(child)


def test_whatever_the_identity_says_of_its_model_is_read_without_an_error(cache: CompressedCache) -> None:
    model = cache.identity.model
    for text in ("", "[]", "1", "[" * 5000, '{"num_attention_heads": "two"}', '{"num_hidden_layers": true}', "\ud800"):
        cache.shape.require_bounds(replace(model, attention=text, rope=text))
