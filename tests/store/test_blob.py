from __future__ import annotations

import gc
import io
import warnings
import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import InvalidRequest
from kvshelf.store import blob, blob_header
from kvshelf.store.artifact import CompressedCache, Kept
from kvshelf.store.identity import Identity, ModelIdentity
from tests.store.caches import golden_caches, make_cache, make_identity, require_equal

GOLDEN = Path(__file__).parent / "golden"


@st.composite
def caches(draw: st.DrawFn) -> CompressedCache:
    """Any cache the format can hold: every bit pattern as a number, heads without entries, D != Dv."""
    num_tokens = draw(st.integers(1, 80))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def bits(rows: int, dim: int) -> torch.Tensor:
        raw = torch.randint(0, 256, (rows * dim * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).view(rows, dim)

    def layer() -> Kept:
        dims = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        lengths = draw(st.lists(st.integers(0, num_tokens) | st.just(num_tokens), min_size=1, max_size=4))
        order = [torch.randperm(num_tokens, generator=generator)[:length].sort().values for length in lengths]
        return Kept.from_heads(
            keys=[bits(length, dims[0]) for length in lengths],
            values=[bits(length, dims[1]) for length in lengths],
            positions=order,
            rope_mode=draw(st.sampled_from(["baked", "pre"])),
        )

    params = draw(
        st.dictionaries(
            st.text(max_size=5), st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
        )
    )
    questions = tuple(draw(st.lists(st.text(max_size=9), max_size=3)))
    return CompressedCache(
        tuple(layer() for _ in range(draw(st.integers(1, 3)))),
        num_tokens,
        num_tokens + draw(st.integers(0, 3)),
        make_identity(num_tokens, policy_params=params, expected_questions=questions),
    )


@settings(deadline=None)
@given(caches())
def test_every_cache_comes_back_bit_for_bit(cache: CompressedCache) -> None:
    data = cache.to_bytes()
    found = CompressedCache.from_bytes(data)
    require_equal(cache, found)
    assert found.to_bytes() == data
    assert found.to_bytes(codec="none") == data


@pytest.mark.parametrize("name", sorted(golden_caches()))
def test_blobs_of_the_past_are_read_and_written_the_same(name: str) -> None:
    data = (GOLDEN / f"{name}.kvb").read_bytes()
    assert blob.encode(golden_caches()[name]) == data
    require_equal(golden_caches()[name], blob.decode(data))


def test_golden_blobs_show_every_encoding_and_dtype() -> None:
    headers = [blob.inspect(path.read_bytes()).header for path in GOLDEN.glob("*.kvb")]
    layers = [layer for header in headers for layer in header.layers]
    assert {layer.position_encoding for layer in layers} == {"range", "bitmap", "delta"}
    assert {layer.dtype for layer in layers} == {"float32", "bfloat16", "float16"}
    assert {layer.rope_mode for layer in layers} == {"baked", "pre"}
    assert any(0 in layer.lengths for layer in layers)


def test_equal_caches_give_equal_bytes_whatever_the_order_of_their_parameters() -> None:
    params = {"window": 8, "sink": 4}
    reversed_params = dict(reversed(params.items()))
    assert list(params) != list(reversed_params)
    assert make_cache(policy_params=params).to_bytes() == make_cache(policy_params=reversed_params).to_bytes()


def test_tensors_in_any_layout_are_written_as_their_values() -> None:
    cache = make_cache(dims=(8, 6))
    layer = cache.layers[0]
    strided = replace(layer, keys=layer.keys.t().contiguous().t(), values=layer.values.repeat(1, 2)[:, :6])
    assert not strided.keys.is_contiguous()
    assert replace(cache, layers=(strided, cache.layers[1])).to_bytes() == cache.to_bytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda data: memoryview(bytearray(data))])
def test_tensors_are_views_of_the_bytes(kind: Any) -> None:
    data = kind(make_cache().to_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = blob.decode(data)
    start = torch.frombuffer(bytearray(1), dtype=torch.uint8).data_ptr() if not data else _address(data)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            assert start <= tensor.data_ptr() < start + len(data)


def _address(data: bytes | bytearray | memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def test_tensors_keep_the_bytes_alive_and_no_longer_than_that() -> None:
    class Owner(bytearray):
        """A bytearray that can be watched."""

    data = Owner(make_cache().to_bytes())
    watch = weakref.ref(data)
    keys = blob.decode(data).layers[1].keys
    expected = keys.clone()
    del data
    gc.collect()
    assert watch() is not None
    assert torch.equal(keys, expected)
    del keys
    gc.collect()
    assert watch() is None


def test_bytes_at_an_odd_address_are_read_too() -> None:
    cache = make_cache()
    data = cache.to_bytes()
    for shift in range(1, 4):
        message = bytearray(shift) + data
        require_equal(cache, blob.decode(memoryview(message)[shift:]))


def test_every_tensor_begins_at_a_multiple_of_64() -> None:
    cache = make_cache(lengths=((20, 19), (31, 9), (1, 0)), dims=(3, 5), dtype=torch.bfloat16)
    data = bytearray(64) + cache.to_bytes()
    skip = -_address(data) % 64
    data[skip : skip + len(data) - 64] = cache.to_bytes()
    found = blob.decode(memoryview(data)[skip : skip + len(data) - 64])
    assert [t.data_ptr() % 64 for layer in found.layers for t in (layer.keys, layer.values) if t.numel()] == [0] * 6


def test_a_file_is_verified_without_being_loaded() -> None:
    data = make_cache(num_tokens=5000, lengths=((5000, 3000),), dims=(64, 64)).to_bytes()
    assert len(data) > 2**21, "longer than the buffer it is read through"
    summary = blob.verify_file(io.BytesIO(data), len(data))
    assert (summary, summary.root, summary.nbytes) == (blob.inspect(data), blob.root(data), len(data))


def test_the_header_has_every_field_of_an_identity() -> None:
    """A new field of the identity changes the format: it needs a new minor version and a golden blob."""
    assert set(blob_header.IdentityHeader.model_fields) == {field.name for field in fields(Identity)}
    assert set(blob_header.ModelHeader.model_fields) == {field.name for field in fields(ModelIdentity)}


def test_two_hundred_layers_of_128_ragged_heads_fit() -> None:
    lengths = [[(head * 7 + layer) % 30 for head in range(128)] for layer in range(200)]
    cache = make_cache(num_tokens=30, lengths=lengths, dims=(1, 1))
    require_equal(cache, blob.decode(blob.encode(cache)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_params": {"beta": float("nan")}}, "nan"),
        ({"policy_params": {"beta": float("inf")}}, "inf"),
        ({"policy_params": {"pair": (1, 2)}}, "policy_params.pair"),
        ({"policy_params": {"text": "\ud800"}}, "surrogates"),
        ({"policy_params": {1: 2}}, "policy_params"),
        ({"layout": "sideways"}, "layout"),
        ({"policy_params": {"sink": -(2**63) - 1}}, "out of range"),
        ({"expected_questions": ("why?" * 80_000,)}, "262144"),
    ],
)
def test_a_description_that_cannot_be_read_back_is_not_written(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_cache(**changes).to_bytes()


@pytest.mark.parametrize("changes", [{"num_tokens": 41}, {"next_position": 39}])
def test_a_cache_that_contradicts_its_identity_is_not_written(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"contradicts itself: 4\d tokens, 40 in the identity"):
        replace(make_cache(lengths=((40, 3),)), **changes).to_bytes()


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"torch\.float64.*float32, bfloat16, float16"):
        make_cache(dtype=torch.float64).to_bytes()


def test_unknown_codecs_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="unknown codec 'int3'; this version has none"):
        make_cache().to_bytes(codec="int3")


@pytest.mark.parametrize("data", ["text", None, 3, [1, 2]])
def test_what_is_not_bytes_is_refused_by_name(data: Any) -> None:
    with pytest.raises(InvalidRequest, match="a blob is a run of bytes"):
        CompressedCache.from_bytes(data)
