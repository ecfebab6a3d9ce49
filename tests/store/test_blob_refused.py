"""Whatever is not a blob is refused, each fault under one name."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from blake3 import blake3

from kvshelf.errors import BlobError, CacheCorrupt
from kvshelf.store import blob
from kvshelf.store.artifact import Kept
from kvshelf.store.artifact import Parts as PartsRecord
from tests.store.caches import make_cache, make_merged, parts_of, tensors_of

ROOT = Path(__file__).parent.parent.parent
Fields = dict[str, Any]


def aligned(size: int) -> int:
    return -(-size // 64) * 64


class Parts:
    """A blob taken apart without the reader's help, put together again with digests that fit: a hostile writer."""

    def __init__(self, data: bytes) -> None:
        self.magic, self.major, self.minor, length = struct.unpack_from("<8sHHI", data)
        self.fields: Fields = msgpack.unpackb(data[16 : 16 + length])
        self.body = bytearray(data[aligned(16 + length) : -40])
        self.padding = b"\0"
        self.header: bytes | None = None
        self.total: int | None = None

    @property
    def first(self) -> Fields:
        layer: Fields = self.fields["layers"][0]
        return layer

    def put_positions(self, data: bytes) -> None:
        """Replace the positions of the first and only layer."""
        part = self.first["positions"]
        part["nbytes"] = len(data)
        self.body[part["offset"] :] = data.ljust(aligned(len(data)), b"\0")
        self.first["nbytes"] = len(self.body)

    def array(self, record: int, name: str) -> memoryview:
        """One array of the first layer of 1.1, found by walking all before it as docs/format.md says; it may be written
        to."""
        start = self.first["offset"]
        for index, fields in enumerate(self.first["records"]):
            for found, size in zip(_names(fields), fields["sizes"], strict=True):
                if (index, found) == (record, name):
                    return memoryview(self.body)[start : start + size]
                start += aligned(size)
        raise KeyError(name)

    def join(self) -> bytes:
        for layer in self.fields.get("layers", ()):
            if isinstance(layer, dict) and {"offset", "nbytes", "digest"} <= layer.keys():
                layer["digest"] = blake3(self.body[layer["offset"] : layer["offset"] + layer["nbytes"]]).digest()
        header = msgpack.packb(_sorted(self.fields)) if self.header is None else self.header
        fixed = struct.pack("<8sHHI", self.magic, self.major, self.minor, len(header)) + header
        head = fixed.ljust(aligned(len(fixed)), self.padding)
        total = (len(head) + len(self.body) + 40 if self.total is None else self.total).to_bytes(8, "little")
        return head + self.body + total + blake3(head + total).digest()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _names(record: Fields) -> list[str]:
    """The arrays of a record of 1.1, in the order of docs/format.md."""
    names = ["keys", "values"]
    if record["codec"] != "none":
        names = [f"{rows} {what}" for rows in names for what in ("codes", "scales", "zeros")]
    names.append("positions")
    return [*names, "slot positions", "slot classes", "slot scales"] if record["kind"] == "merged" else names


def some_blob() -> bytes:
    # One layer; its positions are a bitmap of 2 * 5 bytes, keys 29 * 3 * 4 bytes: every part is followed by padding.
    return make_cache(lengths=((20, 9),), dims=(3, 5)).to_bytes()


def encoded_blob() -> bytes:
    # One layer of 1.1 with two merged records: [8, 5] classes under int4 and the residual's [4, 4]. Rows of 3 and 5
    # codes leave four bits of their last byte unused.
    generator = torch.Generator().manual_seed(4)
    layer = make_merged((12, 9), 40, dims=(3, 5), generator=generator)
    cache = replace(make_cache(), layers=(layer,))
    return cache.to_bytes("int4:group=8,residual=4")


def kept_blob() -> bytes:
    # One layer of 1.1 with two plain `Kept` records that share no position: [0, 2, 4, ...] and [1, 3, 5, ...].
    def record(first: int) -> Kept:
        positions = [torch.arange(first, 30, 2)] * 2
        rows = [torch.ones(15, 2)] * 2
        return Kept.from_heads(rows, rows, positions)

    return replace(make_cache(), layers=(PartsRecord((record(0), record(1))),)).to_bytes()


@pytest.mark.parametrize("make", [some_blob, encoded_blob, kept_blob])
def test_a_blob_put_together_again_is_the_same(make: Callable[[], bytes]) -> None:
    """Otherwise the cases below would be refused for the wrong cause."""
    assert Parts(make()).join() == make()


def test_the_arrays_are_where_the_format_says() -> None:
    """Otherwise the cases below would change other bytes than they say."""
    (layer,) = blob.decode(encoded_blob()).layers
    parts = Parts(encoded_blob())
    for index, part in enumerate(parts_of(layer)):
        for name, tensor in tensors_of(part).items():
            if name.startswith(("keys", "values", "slot_scales")):
                expected = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                assert bytes(parts.array(index, name.replace("_", " "))) == expected, name


CASES: dict[str, tuple[str, Callable[[], bytes], Callable[[Parts], None]]] = {}


def case(reason: str, make: Callable[[], bytes] = some_blob) -> Callable[[Callable[[Parts], None]], None]:
    def add(edit: Callable[[Parts], None]) -> None:
        CASES[edit.__name__] = (reason, make, edit)

    return add


def field(name: str, value: Any) -> Callable[[Parts], None]:
    """An edit of one field of the first layer."""

    def edit(parts: Parts) -> None:
        assert name in parts.first
        parts.first[name] = value

    return edit


def record_field(name: str, value: Any) -> Callable[[Parts], None]:
    """An edit of one field of the first record of the first layer."""

    def edit(parts: Parts) -> None:
        assert name in parts.first["records"][0]
        parts.first["records"][0][name] = value

    return edit


@case("bad_magic")
def other_magic(p: Parts) -> None:
    p.magic = b"KVSHELF\r"


@case("newer_major")
def next_major(p: Parts) -> None:
    p.major = 2


@case("unknown_major")
def major_zero(p: Parts) -> None:
    p.major = 0


@case("newer_minor")
def next_minor(p: Parts) -> None:
    p.minor = 2


@case("header_too_large")
def long_header(p: Parts) -> None:
    p.header = b"\xc0" * (256 * 1024 + 1)


@case("header_malformed")
def no_msgpack(p: Parts) -> None:
    p.header = b"\xc1"


@case("header_malformed")
def empty_header(p: Parts) -> None:
    p.header = b""


@case("header_malformed")
def two_headers(p: Parts) -> None:
    p.header = b"\x80\x80"


@case("header_malformed")
def header_cut_short(p: Parts) -> None:
    p.header = b"\x81\xa1a"


@case("header_malformed")
def array_of_a_billion(p: Parts) -> None:
    p.header = b"\xdd\x40\0\0\0"


@case("header_malformed")
def array_over_the_cap(p: Parts) -> None:
    p.header = msgpack.packb([0] * 4097)


@case("header_malformed")
def map_over_the_cap(p: Parts) -> None:
    p.header = msgpack.packb({str(i): 0 for i in range(257)})


@case("header_malformed")
def deep_nesting(p: Parts) -> None:
    p.header = b"\x91" * 100_000 + b"\xc0"


@case("header_malformed")
def bad_utf8(p: Parts) -> None:
    p.header = b"\xa2\xff\xff"


@case("header_malformed")
def integer_key(p: Parts) -> None:
    p.header = b"\x81\x01\x01"


@case("duplicate_key")
def same_key_twice(p: Parts) -> None:
    p.header = b"\x82\xa1a\x01\xa1a\x02"


@case("ext_type")
def extension(p: Parts) -> None:
    p.fields["identity"]["policy_params"]["x"] = msgpack.ExtType(4, b"code")


@case("ext_type")
def timestamp(p: Parts) -> None:
    p.fields["identity"]["policy_params"]["x"] = msgpack.Timestamp(1)


@case("not_finite")
def nan(p: Parts) -> None:
    p.fields["identity"]["compression_ratio"] = float("nan")


@case("not_finite")
def infinity_within(p: Parts) -> None:
    p.fields["identity"]["policy_params"]["x"] = [[{"y": float("inf")}]]


@case("missing_field")
def no_identity(p: Parts) -> None:
    del p.fields["identity"]


@case("missing_field")
def no_digest(p: Parts) -> None:
    del p.first["digest"]


@case("unknown_field")
def new_field(p: Parts) -> None:
    p.fields["comment"] = "hello"


@case("unknown_field")
def new_field_in_identity(p: Parts) -> None:
    p.fields["identity"]["model"]["author"] = "me"


@case("field_malformed")
def header_is_a_list(p: Parts) -> None:
    p.header = b"\x90"


@case("field_malformed")
def text_as_number(p: Parts) -> None:
    p.fields["num_tokens"] = "40"


@case("field_malformed")
def flag_as_number(p: Parts) -> None:
    p.first["key_dim"] = True


@case("field_malformed")
def no_tokens(p: Parts) -> None:
    p.fields["num_tokens"] = 0


@case("field_malformed")
def too_many_tokens(p: Parts) -> None:
    p.fields["num_tokens"] = 2**31


@case("field_malformed")
def negative_length(p: Parts) -> None:
    p.first["lengths"] = [30, -1]


@case("field_malformed")
def offset_that_wraps(p: Parts) -> None:
    p.first["keys"]["offset"] = 2**64 - 64


@case("field_malformed")
def no_heads(p: Parts) -> None:
    p.first["lengths"] = []


@case("field_malformed")
def no_layers(p: Parts) -> None:
    p.fields["layers"] = []


@case("field_malformed")
def zero_dimension(p: Parts) -> None:
    p.first["value_dim"] = 0


@case("field_malformed")
def bytes_among_parameters(p: Parts) -> None:
    p.fields["identity"]["policy_params"]["x"] = b"code"


@case("field_malformed")
def kind_as_number(p: Parts) -> None:
    p.first["kind"] = 1


for name, value in (
    ("kind", "merged"),
    ("codec", "int8"),
    ("dtype", "float64"),
    ("rope_mode", "post"),
    ("position_encoding", "int64"),
):
    CASES[f"other {name}"] = (f"unknown_{name}", some_blob, field(name, value))

for name, value, reason in (
    ("kind", "channels", "unknown_kind"),
    ("kind", None, "field_malformed"),
    ("codec", "int3", "unknown_codec"),
    ("codec", "none", "inconsistent"),
    ("codec", "int8", "inconsistent"),
    ("group", 16, "inconsistent"),
    ("group", 0, "inconsistent"),
    ("group", -8, "field_malformed"),
    ("group", 8.0, "field_malformed"),
    ("rope_mode", "post", "unknown_rope_mode"),
    ("position_encoding", "int64", "unknown_position_encoding"),
    ("slot_position_encoding", "int64", "unknown_position_encoding"),
    ("lengths", [8, 5, 0], "inconsistent"),
    ("lengths", [9, 5], "size_mismatch"),
    ("lengths", [2**31 - 1] * 2, "size_mismatch"),
    ("slot_lengths", [0, 0], "size_mismatch"),
    ("sizes", [], "size_mismatch"),
    ("sizes", [2**63 - 1] * 10, "size_mismatch"),
    ("sizes", [2**63], "field_malformed"),
):
    CASES[f"record {name} {value}"] = (reason, encoded_blob, record_field(name, value))

for name, value, reason in (
    ("kind", "mixed", "unknown_kind"),
    ("kind", 7, "field_malformed"),
    ("kind", ["kept"], "field_malformed"),
    ("dtype", "float64", "unknown_dtype"),
    ("key_dim", 2**31 - 1, "size_mismatch"),
    ("value_dim", 6, "size_mismatch"),
    ("records", [], "field_malformed"),
    ("nbytes", 64, "size_mismatch"),
    ("offset", 64, "hole"),
):
    CASES[f"layer {name} {value}"] = (reason, encoded_blob, field(name, value))


@case("missing_field", encoded_blob)
def no_kind(p: Parts) -> None:
    del p.first["kind"]


@case("missing_field", encoded_blob)
def no_kind_of_a_record(p: Parts) -> None:
    del p.first["records"][0]["kind"]


@case("missing_field", encoded_blob)
def no_slots(p: Parts) -> None:
    del p.first["records"][0]["slot_lengths"]


@case("unknown_field", kept_blob)
def slots_of_kept(p: Parts) -> None:
    p.first["records"][0]["slot_lengths"] = [15, 15]


@case("unknown_field", encoded_blob)
def places_of_arrays(p: Parts) -> None:
    p.first["records"][0]["keys"] = {"offset": 0, "nbytes": 20}


@case("unknown_field")
def codec_in_a_header_of_1_0(p: Parts) -> None:
    p.fields["codec"] = "none"


@case("missing_field")
def no_codec_in_a_header_of_1_1(p: Parts) -> None:
    p.minor = 1


@case("not_canonical")
def needless_minor(p: Parts) -> None:
    p.minor, p.fields["codec"] = 1, "none"


@case("unknown_kind", kept_blob)
def records_in_1_0(p: Parts) -> None:
    p.minor = 0


@case("not_canonical", kept_blob)
def one_plain_record(p: Parts) -> None:
    del p.first["records"][1]
    del p.body[p.first["nbytes"] // 2 :]
    p.first["nbytes"] //= 2


@case("field_malformed", kept_blob)
def seventeen_records(p: Parts) -> None:
    p.first["records"] *= 9


@case("unknown_codec", encoded_blob)
def other_codec_of_the_cache(p: Parts) -> None:
    p.fields["codec"] = "int3"


@case("unknown_codec", encoded_blob)
def other_parameter_of_the_codec(p: Parts) -> None:
    p.fields["codec"] = "int4:group=9"


@case("not_canonical", encoded_blob)
def default_in_the_codec(p: Parts) -> None:
    p.fields["codec"] = "int4:residual=4,group=8"


@case("inconsistent", encoded_blob)
def codes_under_no_codec(p: Parts) -> None:
    p.fields["codec"] = "none"


@case("inconsistent", encoded_blob)
def codes_under_another_codec(p: Parts) -> None:
    p.fields["codec"] = "int8:group=8"


@case("inconsistent", encoded_blob)
def groups_of_another_size(p: Parts) -> None:
    p.fields["codec"] = "int4:residual=4"


@case("inconsistent", kept_blob)
def other_number_of_heads(p: Parts) -> None:
    p.first["records"][0]["lengths"] = [10, 10, 10]


@case("class_out_of_range", encoded_blob)
def class_past_the_last(p: Parts) -> None:
    p.array(0, "slot classes")[0:2] = (8).to_bytes(2, "little")


@case("class_without_slot", encoded_blob)
def class_that_nobody_reads(p: Parts) -> None:
    classes = p.array(0, "slot classes").cast("H")
    for slot in range(len(classes)):
        classes[slot] = 0


@case("not_finite", encoded_blob)
def slot_scale_that_is_none(p: Parts) -> None:
    p.array(1, "slot scales")[0:4] = struct.pack("<f", float("nan"))


@case("not_finite", encoded_blob)
def zero_that_is_none(p: Parts) -> None:
    p.array(0, "keys zeros")[0:2] = b"\x80\xff"  # -infinity


@case("not_finite", encoded_blob)
def scale_whose_codes_reach_infinity(p: Parts) -> None:
    p.array(0, "values scales")[-2:] = b"\x7f\x7f"  # the largest number; 15 times that is not one


@case("nonzero_padding", encoded_blob)
def unused_bits_of_keys(p: Parts) -> None:
    p.array(0, "keys codes")[1] |= 0x10


@case("nonzero_padding", encoded_blob)
def unused_bits_of_values(p: Parts) -> None:
    p.array(0, "values codes")[-1] |= 0x80


@case("nonzero_padding", encoded_blob)
def padding_between_records(p: Parts) -> None:
    p.body[sum(map(aligned, p.first["records"][0]["sizes"])) - 1] = 1


@case("positions_overlap", kept_blob)
def position_in_two_records(p: Parts) -> None:
    p.array(1, "positions")[:] = bytes(p.array(0, "positions"))


@case("positions_overlap", encoded_blob)
def slot_in_two_records(p: Parts) -> None:
    assert {record["slot_position_encoding"] for record in p.first["records"]} == {"bitmap"}
    first, second = (np.unpackbits(p.array(i, "slot positions")[:5], bitorder="little") for i in (0, 1))
    second[second.argmax()] = 0
    second[first.argmax()] = 1
    p.array(1, "slot positions")[:5] = np.packbits(second, bitorder="little").tobytes()


@case("positions_out_of_range", encoded_blob)
def center_past_the_document(p: Parts) -> None:
    record = p.first["records"][1]
    assert (record["position_encoding"], record["lengths"]) == ("delta", [4, 4])
    p.array(1, "positions")[3] = 39


@case("positions_count", encoded_blob)
def more_slots_than_the_document_has_tokens(p: Parts) -> None:
    p.fields["num_tokens"] = p.fields["identity"]["num_tokens"] = max(p.first["records"][0]["slot_lengths"]) - 1


@case("inconsistent", encoded_blob)
def slots_of_one_head(p: Parts) -> None:
    record = p.first["records"][0]
    record["slot_lengths"] = [sum(record["slot_lengths"])]


@case("unknown_layout")
def other_layout(p: Parts) -> None:
    p.fields["identity"]["layout"] = "sideways"


@case("unknown_boundary")
def other_boundary(p: Parts) -> None:
    p.fields["identity"]["boundary"] = "nowhere"


@case("inconsistent")
def two_lengths(p: Parts) -> None:
    p.fields["identity"]["num_tokens"] = 41


@case("inconsistent")
def question_inside_document(p: Parts) -> None:
    p.fields["next_position"] = 39


@case("size_mismatch")
def wider_keys(p: Parts) -> None:
    p.first["key_dim"] = 4


@case("size_mismatch")
def shape_that_overflows(p: Parts) -> None:
    p.first["lengths"], p.first["key_dim"] = [2**31 - 1] * 4, 2**31 - 1


@case("size_mismatch")
def other_item_size(p: Parts) -> None:
    p.first["dtype"] = "float16"


@case("size_mismatch")
def longer_segment(p: Parts) -> None:
    p.body += bytes(64)
    p.first["nbytes"] += 64


@case("misaligned")
def shifted_values(p: Parts) -> None:
    p.first["values"]["offset"] += 8


@case("overlap")
def values_over_keys(p: Parts) -> None:
    p.first["values"]["offset"] = 0


@case("overlap")
def segment_over_segment(p: Parts) -> None:
    p.fields["layers"].append(dict(p.first))


@case("hole")
def values_later(p: Parts) -> None:
    p.first["values"]["offset"] += 64


@case("hole")
def segment_later(p: Parts) -> None:
    p.first["offset"] = 64


@case("not_canonical")
def keys_in_another_order(p: Parts) -> None:
    p.join()  # sets the digest
    p.header = msgpack.packb(dict(reversed(_sorted(p.fields).items())))


@case("not_canonical")
def short_floats(p: Parts) -> None:
    p.join()
    p.header = msgpack.packb(_sorted(p.fields), use_single_float=True)


@case("not_canonical")
def integer_for_a_float(p: Parts) -> None:
    p.fields["identity"]["compression_ratio"] = 0


@case("not_canonical")
def long_integer(p: Parts) -> None:
    p.join()
    packed = msgpack.packb(_sorted(p.fields))
    assert packed.count(b"\xaanum_tokens\x28") == 2
    p.header = packed.replace(b"\xaanum_tokens\x28", b"\xaanum_tokens\xcc\x28")


@case("not_canonical")
def bitmap_where_deltas_are_smaller(p: Parts) -> None:
    p.first["lengths"] = [1, 0]
    p.first["keys"] = {"offset": 0, "nbytes": 12}
    p.first["values"] = {"offset": 64, "nbytes": 20}
    p.first["positions"] = {"offset": 128, "nbytes": 0}
    p.body = bytearray(128)
    p.put_positions(b"\x01" + bytes(9))


@case("nonzero_padding")
def padding_after_header(p: Parts) -> None:
    p.padding = b"\1"


@case("nonzero_padding")
def padding_after_keys(p: Parts) -> None:
    p.body[p.first["keys"]["nbytes"]] = 1


@case("nonzero_padding")
def padding_at_the_end(p: Parts) -> None:
    p.body[-1] = 128


@case("positions_malformed")
def bitmap_too_long(p: Parts) -> None:
    p.put_positions(b"\xff" * 11)


@case("positions_malformed")
def varint_without_end(p: Parts) -> None:
    p.first["position_encoding"] = "delta"
    p.put_positions(bytes(28) + b"\x80")


@case("positions_count")
def more_marks_than_entries(p: Parts) -> None:
    p.put_positions(b"\xff" * 10)


@case("positions_count")
def head_longer_than_the_document(p: Parts) -> None:
    p.fields["num_tokens"] = p.fields["next_position"] = p.fields["identity"]["num_tokens"] = 28
    p.first["lengths"] = [29, 0]


@case("positions_out_of_range")
def delta_past_the_end(p: Parts) -> None:
    p.first["position_encoding"] = "delta"
    p.put_positions(bytes(19) + b"\x28" + bytes(9))


@case("length_mismatch")
def other_total(p: Parts) -> None:
    p.total = 10**15


@case("truncated")
def body_too_short(p: Parts) -> None:
    del p.body[-64:]


@case("trailing_bytes")
def body_too_long(p: Parts) -> None:
    p.body += bytes(64)


@pytest.mark.parametrize("name", CASES)
def test_each_fault_has_one_name(name: str) -> None:
    reason, make, edit = CASES[name]
    parts = Parts(make())
    edit(parts)
    with pytest.raises(BlobError) as refusal:
        blob.decode(parts.join())
    assert refusal.value.reason == reason, refusal.value
    assert refusal.value.details["reason"] == reason
    assert isinstance(refusal.value, CacheCorrupt)


def test_a_changed_segment_is_found_by_its_own_digest() -> None:
    data = bytearray(make_cache().to_bytes())
    data[-100] ^= 1
    with pytest.raises(BlobError, match="segment 1 is not what was written") as refusal:
        blob.decode(data)
    assert refusal.value.reason == "digest_mismatch"


def test_every_reason_is_tested_and_documented() -> None:
    source = "".join(path.read_text() for path in (ROOT / "kvshelf/store").glob("blob*.py"))
    source += (ROOT / "kvshelf/store/positions.py").read_text()
    named = set(re.findall(r'reason="(\w+)"', source))
    tested = {reason for reason, _, _ in CASES.values()} | {"digest_mismatch"}
    section = (ROOT / "docs/format.md").read_text().partition("## What is refused")[2]
    documented = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert tested == documented
    assert named <= tested


@pytest.mark.parametrize("make", [some_blob, encoded_blob])
def test_every_truncation_is_refused_as_such(make: Callable[[], bytes]) -> None:
    data = make()
    for size in range(len(data)):
        with pytest.raises(BlobError) as refusal:
            blob.decode(data[:size])
        assert refusal.value.reason == "truncated", size


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 64, b"x" * 1000])
def test_nothing_may_follow(extra: bytes) -> None:
    with pytest.raises(BlobError) as refusal:
        blob.decode(some_blob() + extra)
    assert refusal.value.reason == "trailing_bytes"


@pytest.mark.parametrize("make", [some_blob, encoded_blob])
def test_every_bit_of_a_small_blob_counts(make: Callable[[], bytes]) -> None:
    """Not a sample: all of them. The first 16 bytes have their own reasons, the rest are found by digests."""
    data = bytearray(make())
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobError) as refusal:
            blob.decode(data)
        assert bit < 128 or refusal.value.reason == "digest_mismatch"
        data[bit // 8] ^= 1 << bit % 8
    blob.decode(data)


@pytest.mark.parametrize("codec", ["none", "int2"])
def test_random_bit_flips_of_a_large_blob_are_refused(soak: bool, codec: str) -> None:
    rng = random.Random(20261120)
    data = bytearray(make_cache(num_tokens=4096, lengths=((2048, 1024),) * 4, dims=(32, 32)).to_bytes(codec))
    refused = 0
    for _ in range(1000 if soak else 50):
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobError):
            blob.decode(data)
        refused += 1
        data[bit // 8] ^= 1 << bit % 8
    blob.decode(data)
    assert refused == (1000 if soak else 50)
