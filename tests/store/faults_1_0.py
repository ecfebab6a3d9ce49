"""Faults of the frame, and of all that a blob of format 1.0 can hold."""

from __future__ import annotations

import msgpack

from tests.store.hostile import Cases, Parts, field, recorder, some_blob, sorted_fields

CASES: Cases = {}
case = recorder(CASES)


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
def whole_number_for_a_float(p: Parts) -> None:
    p.fields["identity"]["compression_ratio"] = 0


@case("not_canonical")
def keys_in_another_order(p: Parts) -> None:
    p.join()  # sets the digest
    p.header = msgpack.packb(dict(reversed(sorted_fields(p.fields).items())))


@case("not_canonical")
def short_floats(p: Parts) -> None:
    p.join()
    p.header = msgpack.packb(sorted_fields(p.fields), use_single_float=True)


@case("not_canonical")
def integer_for_a_float(p: Parts) -> None:
    p.fields["identity"]["compression_ratio"] = 0


@case("not_canonical")
def long_integer(p: Parts) -> None:
    p.join()
    packed = msgpack.packb(sorted_fields(p.fields))
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
