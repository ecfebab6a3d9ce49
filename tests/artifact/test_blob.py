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
from pydantic import ValidationError

from kvshelf.artifact import blob
from kvshelf.artifact.blob import header as headers
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.encoding import encode
from kvshelf.artifact.identity import Identity, ModelIdentity
from kvshelf.artifact.records import Kept, Merged, Parts
from kvshelf.artifact.shape import CODE_BYTES, MAX_CODES
from kvshelf.errors import InvalidRequest
from tests.amounts import amount
from tests.store.caches import (
    golden_caches,
    golden_merged,
    make_cache,
    make_identity,
    make_layer,
    make_merged,
    require_equal,
)
from tests.store.strategies import caches, encoded_caches

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.slow
@settings(deadline=None)
@given(caches())
def test_every_cache_comes_back_bit_for_bit(cache: CompressedCache) -> None:
    data = cache.to_bytes()
    found = CompressedCache.from_bytes(data)
    require_equal(cache, found)
    assert found.to_bytes() == data
    assert found.to_bytes(codec="none") == data


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(encoded_caches())
def test_every_encoded_cache_comes_back_bit_for_bit(cache: CompressedCache) -> None:
    data = cache.to_bytes()
    found = CompressedCache.from_bytes(data)
    require_equal(cache, found)
    assert found.to_bytes() == found.to_bytes(codec=cache.codec) == found.to_bytes(codec="none") == data


@pytest.mark.parametrize("name", sorted(golden_caches()))
def test_golden_blobs_are_read_and_written_the_same(name: str) -> None:
    data = (GOLDEN / f"{name}.kvb").read_bytes()
    assert golden_caches()[name].to_bytes() == data
    require_equal(golden_caches()[name], CompressedCache.from_bytes(data))


def test_golden_blobs_show_everything_that_the_format_has() -> None:
    headers = [blob.inspect(path.read_bytes()).header for path in GOLDEN.glob("*.kvb")]
    layers = [layer for header in headers for layer in header.layers]
    records = [record for layer in layers for record in layer.records]
    assert len(headers) == len(golden_caches())
    assert {layer.dtype for layer in layers} == {"float32", "bfloat16", "float16"}
    assert {record.position_encoding for record in records} == {"range", "bitmap", "delta"}
    merged = {(r.kind, r.rope_mode, r.codec) for r in records if r.kind == "merged"}
    assert merged == {("merged", mode, codec) for mode in ("baked", "pre") for codec in ("none", "int4")}
    kept = {record.codec for record in records if record.kind == "kept"}
    assert kept == {"none", "int8", "int4", "int3", "int2", "lossless"}
    for kind in ("latents", "pruned", "residuals"):
        assert {record.codec for record in records if record.kind == kind} == {"none", "int4"}
    assert {len(layer.records) for layer in layers} == {0, 1, 2}
    assert {state.role for layer in layers for state in layer.states} == {"conv", "recurrent"}
    assert any(0 in record.lengths for record in records)
    assert any(header.next_position < header.num_tokens for header in headers)
    assert {header.sentences for header in headers} == {(), (0, 8, 23)}


def test_ends_of_sentences_that_are_none_are_not_written() -> None:
    cache = make_cache()
    for ends, named in (((3, 3, 39), "must ascend"), ((9, 3, 39), "must ascend"), ((-1, 39), "must ascend")):
        with pytest.raises(InvalidRequest, match=named):
            replace(cache, sentence_ends=ends).to_bytes()
    for ends, named in (((3,), "the last sentence ends with token 3, and the document"), ((40,), "40 tokens")):
        with pytest.raises(InvalidRequest, match=named):
            replace(cache, sentence_ends=ends).to_bytes()


def test_codecs_take_the_bytes_that_docs_format_names() -> None:
    """64 dimensions, bfloat16, a thousand entries in each of two heads: bytes per entry, positions left out."""
    cache = make_cache(num_tokens=2048, lengths=((1024, 1024),), dims=(64, 64), dtype=torch.bfloat16)
    cache = replace(cache, layers=(replace(cache.layers[0], importance=torch.rand(2048)),))
    found = {}
    for codec in ("none", "int8:residual=0", "int4:residual=0", "int2:residual=0", "mixed"):
        (layer,) = blob.inspect(cache.to_bytes(codec)).header.layers
        arrays = [span.nbytes for spans in layer.arrays for name, span in spans.items() if name != "positions"]
        found[codec] = sum(arrays) / 2048
    assert found == {"none": 256, "int8:residual=0": 144, "int4:residual=0": 80, "int2:residual=0": 48, "mixed": 96}


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
        cache = CompressedCache.from_bytes(data)
    start = torch.frombuffer(bytearray(1), dtype=torch.uint8).data_ptr() if not data else _address(data)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            assert start <= tensor.data_ptr() < start + len(data)


def _address(data: bytes | bytearray | memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


@pytest.mark.slow
def test_tensors_keep_the_bytes_alive_and_no_longer_than_that() -> None:
    class Owner(bytearray):
        """A bytearray that can be watched."""

    data = Owner(make_cache().to_bytes())
    watch = weakref.ref(data)
    keys = CompressedCache.from_bytes(data).layers[1].keys
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
        require_equal(cache, CompressedCache.from_bytes(memoryview(message)[shift:]))


def test_every_tensor_begins_at_a_multiple_of_64() -> None:
    cache = make_cache(lengths=((20, 19), (31, 9), (1, 0)), dims=(3, 5), dtype=torch.bfloat16)
    data = bytearray(64) + cache.to_bytes()
    skip = -_address(data) % 64
    data[skip : skip + len(data) - 64] = cache.to_bytes()
    found = CompressedCache.from_bytes(memoryview(data)[skip : skip + len(data) - 64])
    assert [t.data_ptr() % 64 for layer in found.layers for t in (layer.keys, layer.values) if t.numel()] == [0] * 6


def test_a_file_is_verified_without_being_loaded() -> None:
    data = make_cache(num_tokens=5000, lengths=((5000, 3000),), dims=(64, 64)).to_bytes()
    assert len(data) > 2**21, "longer than the buffer it is read through"
    summary = blob.verify_file(io.BytesIO(data), len(data))
    assert (summary, summary.root, summary.nbytes) == (blob.inspect(data), data[-32:], len(data))


def test_the_header_has_every_field_of_an_identity() -> None:
    """A new field of the identity changes the format: it needs a new version of it, and golden blobs made anew."""
    assert set(headers.IdentityHeader.model_fields) == {field.name for field in fields(Identity)}
    assert set(headers.ModelHeader.model_fields) == {field.name for field in fields(ModelIdentity)}


PIXELS = "ab" * 32


@pytest.mark.parametrize(
    ("images", "fine"),
    [
        ([[0, 4, PIXELS], [4, 9, PIXELS]], True),
        ([], False),
        ([[4, 40, PIXELS]], True),
        ([[4, 41, PIXELS]], False),
        (None, False),
        ([[4, 4, PIXELS]], False),
        ([[4, 9, PIXELS], [0, 4, PIXELS]], False),
        ([[0, 4, "ab"]], False),
        ([["0", 4, PIXELS]], False),
        ([[0, 4]], False),
        ([[at, at + 1, PIXELS] for at in range(33)], False),
    ],
)
def test_images_of_a_header_ascend_and_have_a_digest(images: Any, fine: bool) -> None:
    fields = make_identity(40).to_dict() | {"images": images, "image_encoder": "0d" * 20}
    if fine:
        made = headers.IdentityHeader.model_validate(fields)
        assert made.model_dump() == fields
        assert Identity.from_dict(fields).to_dict() == fields
        return
    with pytest.raises(ValidationError):
        headers.IdentityHeader.model_validate(fields)
    with pytest.raises(ValidationError, match="together"):
        headers.IdentityHeader.model_validate(make_identity(40).to_dict() | {"images": [[0, 4, PIXELS]]})


@pytest.mark.slow
def test_two_hundred_layers_of_128_ragged_heads_fit() -> None:
    lengths = [[(head * 7 + layer) % 30 for head in range(128)] for layer in range(200)]
    cache = make_cache(num_tokens=30, lengths=lengths, dims=(1, 1))
    cache = replace(cache, sentence_ends=(29,), summary=(bytes(MAX_CODES * CODE_BYTES),) * 2)
    for codec in ("int4:residual=5", "none")[: amount(1, 2)]:
        data = cache.to_bytes(codec)
        require_equal(cache.encoded(codec), CompressedCache.from_bytes(data))
        assert len(blob.inspect(data).header.pack()) + headers.SENTENCE_BYTES <= headers.HEADER_LIMIT


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


def test_a_cache_that_contradicts_its_identity_is_not_written() -> None:
    with pytest.raises(InvalidRequest, match=r"contradicts itself: 41 tokens, 40 in the identity"):
        replace(make_cache(lengths=((40, 3),)), num_tokens=41).to_bytes()


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"torch\.float64.*float32, bfloat16, float16"):
        make_cache(dtype=torch.float64).to_bytes()


def test_unknown_codecs_are_refused_by_name() -> None:
    with pytest.raises(
        InvalidRequest, match=r"unknown codec 'int3' \(did you mean 'int[248]'\?\); this version has none,"
    ):
        make_cache().to_bytes(codec="int3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_classes": torch.tensor([1, 0, 2, 1, 0, 0], dtype=torch.int32)}, "slot 2 names class 2 of a head of 2"),
        ({"slot_classes": torch.tensor([0, 0, 0, 0, 0, 0], dtype=torch.int32)}, "a class has no slot"),
        ({"slot_scales": torch.tensor([1, 1, 1, 1, torch.inf, 1])}, "a slot whose scale is not finite"),
        ({"slot_positions": torch.tensor([2, 2, 9, 20, 23, 7], dtype=torch.int32)}, "must ascend"),
        ({"slot_positions": torch.tensor([2, 4, 9, 20, 24, 7], dtype=torch.int32)}, "at most 23"),
        ({"entries_at": torch.tensor([20, 4, 7], dtype=torch.int32)}, "must ascend"),
    ],
)
def test_merged_records_that_make_no_sense_are_not_written(changes: dict[str, Any], message: str) -> None:
    cache = CompressedCache((replace(golden_merged(), **changes),), 24, 24, make_identity(24))
    with pytest.raises(InvalidRequest, match=message):
        cache.to_bytes()


def test_parts_that_hold_a_token_twice_are_not_written() -> None:
    generator = torch.Generator().manual_seed(1)
    record = make_layer((9, 9), 20, generator=generator)
    merged = make_merged((9, 9), 20, generator=generator)
    chosen = torch.zeros(18, dtype=torch.bool)
    chosen[7:13] = True
    other = replace(
        merged.select(chosen), slot_positions=merged.select(~chosen).slot_positions[: merged.select(chosen).slots]
    )
    for parts in ((record.select(chosen), record), (merged.select(~chosen), other)):
        with pytest.raises(InvalidRequest, match="of a head in two records"):
            CompressedCache((Parts(parts),), 20, 20, make_identity(20)).to_bytes()


def test_keys_and_values_under_different_codecs_are_not_written() -> None:
    record = make_layer((40, 9), 60, generator=torch.Generator().manual_seed(1))
    four, eight = (encode(Codec.parse(f"{name}:residual=0"), record) for name in ("int4", "int8"))
    assert isinstance(four, Kept)
    assert isinstance(eight, Kept)
    for keys, values in ((four.keys, eight.values), (four.keys, record.values), (four.values, four.values)):
        cache = CompressedCache(
            (replace(record, keys=keys, values=values),), 60, 60, make_identity(60), "int4:residual=0"
        )
        with pytest.raises(InvalidRequest, match="keys and values under one codec"):
            cache.to_bytes()


def test_a_cache_that_lies_about_its_codec_is_not_written() -> None:
    cache = make_cache(num_tokens=100, lengths=((90, 80),)).encoded("int4")
    for codec in ("none", "int8", "int4:group=64", "int5", "int4:group=32"):
        with pytest.raises(InvalidRequest, match="codec"):
            replace(cache, codec=codec).to_bytes()


def test_more_classes_than_two_bytes_can_count() -> None:
    classes = (1 << 16) + 1
    record = Merged(
        keys=torch.zeros(classes, 1),
        values=torch.zeros(classes, 1),
        entries_at=torch.arange(classes, dtype=torch.int32),
        offsets=(0, classes),
        slot_scales=torch.ones(classes),
        slot_classes=torch.arange(classes, dtype=torch.int32),
        slot_positions=torch.arange(classes, dtype=torch.int32),
        slot_offsets=(0, classes),
    )
    for layer in (record, record.select(torch.arange(classes) < 1 << 16)):
        cache = CompressedCache((layer,), classes, classes, make_identity(classes))
        require_equal(cache, CompressedCache.from_bytes(cache.to_bytes()))


@pytest.mark.parametrize("data", ["text", None, 3, [1, 2]])
def test_what_is_not_bytes_is_refused_by_name(data: Any) -> None:
    with pytest.raises(InvalidRequest, match="a blob is a run of bytes"):
        CompressedCache.from_bytes(data)
