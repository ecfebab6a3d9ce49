"""Every fault of a blob that a hostile writer could make, under digests that fit: its reason, and how it is made."""

from __future__ import annotations

import struct
from dataclasses import replace

import msgpack
import numpy as np

from tests.store.caches import golden_pruned, golden_residuals, make_cache
from tests.store.hostile import (
    Cases,
    Parts,
    aligned,
    chunk_blob,
    columns_blob,
    encoded_blob,
    field,
    indexed_blob,
    kept_blob,
    latents_blob,
    pruned_blob,
    record_field,
    recorder,
    residuals_blob,
    runs_blob,
    some_blob,
    sorted_fields,
    state_blob,
    threes_blob,
    two_layers,
    whole_blob,
    window_blob,
)

CASES: Cases = {}
case = recorder(CASES)

# The frame, the header, plain records


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
    p.minor = 1


@case("field_malformed")
def summary_without_codes(p: Parts) -> None:
    p.fields["summary"] = [bytes(8), b""]


@case("field_malformed")
def summary_with_a_part_of_a_code(p: Parts) -> None:
    p.fields["summary"] = [bytes(12)]


@case("field_malformed")
def summary_with_too_many_codes(p: Parts) -> None:
    p.fields["summary"] = [bytes(8 * 4097)]


@case("field_malformed")
def summary_of_numbers(p: Parts) -> None:
    p.fields["summary"] = [[1, 2]]


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
    p.record["lengths"] = [30, -1]


@case("field_malformed")
def offset_that_wraps(p: Parts) -> None:
    p.first["offset"] = 2**64 - 64


@case("field_malformed")
def no_heads(p: Parts) -> None:
    p.record["lengths"] = []


@case("field_malformed")
def no_layers(p: Parts) -> None:
    p.fields["layers"] = []


@case("inconsistent")
def zero_dimension(p: Parts) -> None:
    p.first["value_dim"] = 0


@case("field_malformed")
def bytes_among_parameters(p: Parts) -> None:
    p.fields["identity"]["policy_params"]["x"] = b"code"


@case("field_malformed")
def long_sentence_ends(p: Parts) -> None:
    p.fields["sentence_ends"] = bytes(32 * 1024 + 1)


@case("field_malformed")
def sentence_ends_as_text(p: Parts) -> None:
    p.fields["sentence_ends"] = "\x1c"


@case("missing_field")
def no_sentence_ends(p: Parts) -> None:
    del p.fields["sentence_ends"]


@case("positions_malformed")
def sentence_ends_cut_short(p: Parts) -> None:
    p.fields["sentence_ends"] = b"\x03\x80"


@case("positions_malformed")
def sentence_end_in_two_bytes_instead_of_one(p: Parts) -> None:
    p.fields["sentence_ends"] = (p.fields["num_tokens"] - 1 | 0x80).to_bytes() + b"\0"


@case("positions_malformed")
def sentence_end_of_six_bytes(p: Parts) -> None:
    p.fields["sentence_ends"] = b"\x80\x80\x80\x80\x80\x01"


@case("positions_malformed")
def last_sentence_without_end(p: Parts) -> None:
    p.fields["sentence_ends"] = (p.fields["num_tokens"] - 2).to_bytes()


@case("positions_out_of_range")
def sentence_end_behind_the_document(p: Parts) -> None:
    p.fields["sentence_ends"] = p.fields["num_tokens"].to_bytes()


@case("positions_out_of_range")
def more_sentences_than_tokens(p: Parts) -> None:
    p.fields["sentence_ends"] = bytes(p.fields["num_tokens"] + 1)


@case("field_malformed")
def kind_as_number(p: Parts) -> None:
    p.record["kind"] = 1


@case("unknown_layout")
def other_layout(p: Parts) -> None:
    p.fields["identity"]["layout"] = "sideways"


@case("unknown_boundary")
def other_boundary(p: Parts) -> None:
    p.fields["identity"]["boundary"] = "nowhere"


@case("inconsistent")
def two_lengths(p: Parts) -> None:
    p.fields["identity"]["num_tokens"] = 41


@case("size_mismatch")
def wider_keys(p: Parts) -> None:
    p.first["key_dim"] = 4


@case("size_mismatch")
def shape_that_overflows(p: Parts) -> None:
    p.record["lengths"], p.first["key_dim"] = [2**31 - 1] * 4, 2**31 - 1


@case("size_mismatch")
def other_item_size(p: Parts) -> None:
    p.first["dtype"] = "float16"


@case("size_mismatch")
def longer_segment(p: Parts) -> None:
    p.body += bytes(64)
    p.first["nbytes"] += 64


@case("overlap")
def segment_over_segment(p: Parts) -> None:
    p.fields["layers"].append(dict(p.first))


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
def long_integer(p: Parts) -> None:
    p.join()
    packed = msgpack.packb(sorted_fields(p.fields))
    assert packed.count(b"\xaanum_tokens\x28") == 2
    p.header = packed.replace(b"\xaanum_tokens\x28", b"\xaanum_tokens\xcc\x28")


@case("not_canonical")
def bitmap_where_deltas_are_smaller(p: Parts) -> None:
    p.record["lengths"] = [1, 0]
    p.record["sizes"] = [12, 20, 0]
    p.body = bytearray(128)
    p.put_positions(b"\x01" + bytes(9))


@case("nonzero_padding")
def padding_after_header(p: Parts) -> None:
    p.padding = b"\1"


@case("nonzero_padding")
def padding_after_keys(p: Parts) -> None:
    p.body[p.record["sizes"][0]] = 1


@case("nonzero_padding")
def padding_at_the_end(p: Parts) -> None:
    p.body[-1] = 128


@case("positions_malformed")
def bitmap_too_long(p: Parts) -> None:
    p.put_positions(b"\xff" * 11)


@case("positions_malformed")
def varint_without_end(p: Parts) -> None:
    p.record["position_encoding"] = "delta"
    p.put_positions(bytes(28) + b"\x80")


@case("positions_count")
def more_marks_than_entries(p: Parts) -> None:
    p.put_positions(b"\xff" * 10)


@case("positions_count")
def head_longer_than_the_document(p: Parts) -> None:
    p.fields["num_tokens"] = p.fields["next_position"] = p.fields["identity"]["num_tokens"] = 28
    p.record["lengths"] = [29, 0]


@case("positions_out_of_range")
def delta_past_the_end(p: Parts) -> None:
    p.record["position_encoding"] = "delta"
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


# Codecs, merged records, several records in a layer

for name, value, reason in (
    ("kind", "channels", "unknown_kind"),
    ("kind", None, "field_malformed"),
    ("kind", ["kept"], "field_malformed"),
    ("codec", "int5", "unknown_codec"),
    ("codec", "int3", "inconsistent"),
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
    ("dtype", "float64", "unknown_dtype"),
    ("key_dim", 2**31 - 1, "size_mismatch"),
    ("value_dim", 6, "size_mismatch"),
    ("records", [], "inconsistent"),
    ("nbytes", 64, "size_mismatch"),
    ("offset", 64, "hole"),
):
    CASES[f"layer {name} {value}"] = (reason, encoded_blob, field(name, value))


@case("missing_field", encoded_blob)
def no_kind_of_a_record(p: Parts) -> None:
    del p.record["kind"]


@case("missing_field", encoded_blob)
def no_slots(p: Parts) -> None:
    del p.record["slot_lengths"]


@case("unknown_field", kept_blob)
def slots_of_kept(p: Parts) -> None:
    p.record["slot_lengths"] = [15, 15]


@case("unknown_field", encoded_blob)
def places_of_arrays(p: Parts) -> None:
    p.record["keys"] = {"offset": 0, "nbytes": 20}


@case("missing_field")
def no_codec(p: Parts) -> None:
    del p.fields["codec"]


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
    p.record["lengths"] = [10, 10, 10]


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


@case("nonzero_padding", threes_blob)
def unused_bits_of_keys_of_three_bits(p: Parts) -> None:
    p.array(1, "keys codes")[2] |= 0x04


@case("nonzero_padding", threes_blob)
def unused_bits_of_values_of_three_bits(p: Parts) -> None:
    p.array(1, "values codes")[-1] |= 0x10


@case("inconsistent", threes_blob)
def three_bits_under_a_codec_of_four(p: Parts) -> None:
    p.fields["codec"] = "mixed:low=int4,share=0.25,group=8"


@case("nonzero_padding", encoded_blob)
def unused_bits_of_values(p: Parts) -> None:
    p.array(0, "values codes")[-1] |= 0x80


@case("nonzero_padding", encoded_blob)
def padding_between_records(p: Parts) -> None:
    p.body[sum(map(aligned, p.record["sizes"])) - 1] = 1


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
    p.fields["num_tokens"] = p.fields["identity"]["num_tokens"] = max(p.record["slot_lengths"]) - 1


@case("inconsistent", encoded_blob)
def slots_of_one_head(p: Parts) -> None:
    record = p.record
    record["slot_lengths"] = [sum(record["slot_lengths"])]


# Absurd lengths, regions out of place, and what msgpack can express that no header holds

HUGE = 2**62

for name, value, reason in (
    ("key twice within", b"\x82\xa1a\x01\xa1a\x02", "duplicate_key"),
    ("key of bytes", b"\x81\xc4\x01a\x01", "header_malformed"),
    ("key that is an extension", b"\x81\xd4\x04a\x01", "header_malformed"),
    ("array of 2^32 - 1", b"\xdd\xff\xff\xff\xff", "header_malformed"),
    ("map of 2^32 - 1", b"\xdf\xff\xff\xff\xff", "header_malformed"),
    ("string of 2^32 - 1", b"\xdb\xff\xff\xff\xff", "header_malformed"),
    ("bytes of 2^32 - 1", b"\xc6\xff\xff\xff\xff", "header_malformed"),
    ("extension of 2^32 - 1", b"\xc9\xff\xff\xff\xff\x04", "header_malformed"),
    ("tower of arrays of 4096", b"\xdc\x10\x00" * 1000, "header_malformed"),
    ("tower of maps of 256", b"\xde\x01\x00\xa1a" * 1000, "header_malformed"),
    ("depth of 30", b"\x91" * 30 + b"\x01", "header_malformed"),
    ("depth of 600", b"\x91" * 600 + b"\x01", "header_malformed"),
    ("100,000 runs of bytes", b"\xdc\x00\x18" + (b"\xdc\x10\x00" + b"\xc4\x00" * 4096) * 24, "field_malformed"),
    ("digest that is none", b"\xc4\x20" + bytes(32), "field_malformed"),
):
    CASES[name] = (reason, some_blob, lambda p, value=value: p.put_raw(value))


@case("duplicate_key")
def field_twice(p: Parts) -> None:
    packed = p.packed()
    assert packed[0] == 0x87, "a map of seven"
    p.header = b"\x88" + packed[1:] + msgpack.packb("num_tokens") + msgpack.packb(40)


@case("newer_major")
def last_major(p: Parts) -> None:
    p.major = 2**16 - 1


@case("newer_minor")
def last_minor(p: Parts) -> None:
    p.minor = 2**16 - 1


@case("header_too_large")
def header_of_4_gigabytes(p: Parts) -> None:
    p.length = 2**32 - 1


@case("truncated")
def header_longer_than_the_blob(p: Parts) -> None:
    p.length = 256 * 1024


@case("header_malformed")
def header_that_ends_before_its_end(p: Parts) -> None:
    p.length = len(p.packed()) - 1


@case("header_malformed")
def header_that_ends_behind_its_end(p: Parts) -> None:
    p.length = len(p.packed()) + 1


@case("length_mismatch")
def total_of_all_bits(p: Parts) -> None:
    p.total = 2**64 - 1


@case("header_malformed")
def layers_over_the_cap(p: Parts) -> None:
    p.fields["layers"] = [{}] * 4097


@case("missing_field")
def layers_of_nothing(p: Parts) -> None:
    p.fields["layers"] = [{}] * 4096


@case("header_malformed")
def heads_over_the_cap(p: Parts) -> None:
    p.record["lengths"] = [0] * 4097


@case("field_malformed")
def no_length_in_any_head_of_any_layer(p: Parts) -> None:
    p.fields["layers"] = [p.first | {"records": [p.record | {"lengths": [None] * 4096}]}] * 60


@case("field_malformed", encoded_blob)
def no_length_in_any_head_of_any_record(p: Parts) -> None:
    nothing = dict.fromkeys(("lengths", "slot_lengths", "sizes"), [None] * 4096)
    p.first["records"] = [p.record | nothing] * 16


@case("header_malformed")
def a_billion_heads(p: Parts) -> None:
    p.record["lengths"] = "heads"
    p.header = p.packed().replace(msgpack.packb("heads"), b"\xdd\x3b\x9a\xca\x00")


@case("unknown_field")
def name_that_fills_the_header(p: Parts) -> None:
    p.fields["x" * 200_000] = 1


for name, value, reason in (
    ("offset", HUGE, "hole"),
    ("offset", 2**63, "field_malformed"),
    ("nbytes", HUGE, "size_mismatch"),
    ("nbytes", 2**63, "field_malformed"),
):
    CASES[f"plain {name} {value}"] = (reason, some_blob, field(name, value))

CASES["keys of 2^62 bytes"] = ("size_mismatch", some_blob, record_field("sizes", [HUGE, 29 * 5 * 4, 10]))
CASES["positions of one head"] = ("positions_malformed", some_blob, record_field("lengths", [29]))


@case("truncated")
def positions_as_long_as_they_say(p: Parts) -> None:
    p.record["sizes"][2] = HUGE
    p.first["nbytes"] = sum(map(aligned, p.record["sizes"]))


def _all_of_a_long_document(p: Parts, heads: int) -> int:
    """Each of so many heads keeps every token of the longest document. Returns the number of entries."""
    p.fields["num_tokens"] = p.fields["next_position"] = p.fields["identity"]["num_tokens"] = 2**31 - 1
    return heads * (2**31 - 1)


@case("digest_mismatch", runs_blob)
def digests_of_two_runs_swapped(p: Parts) -> None:
    digests = bytes(p.digests[:64])
    p.digests[:64] = digests[32:] + digests[:32]


@case("digest_mismatch", runs_blob)
def rows_of_a_run_changed(p: Parts) -> None:
    p.array(0, "keys")[5000] ^= 1


@case("digest_mismatch", runs_blob)
def digest_of_all_rows_changed(p: Parts) -> None:
    p.digests[70] ^= 1


@case("nonzero_padding", runs_blob)
def padding_behind_digests(p: Parts) -> None:
    p.digests[-1] = 1


@case("size_mismatch", runs_blob)
def too_few_digests(p: Parts) -> None:
    del p.body[-64:]
    p.first["nbytes"] -= 64


@case("size_mismatch", runs_blob)
def too_many_digests(p: Parts) -> None:
    p.body += bytes(64)
    p.first["nbytes"] += 64


@case("truncated")
def sizes_that_fit_but_for_the_file(p: Parts) -> None:
    entries = _all_of_a_long_document(p, 4096)
    keys, values = entries * 3 * 4, entries * 5 * 4
    p.record.update(lengths=[2**31 - 1] * 4096, position_encoding="range", sizes=[keys, values, 0])
    digests = (2**21 + 1) * 32  # of the runs, and of all rows
    p.first["nbytes"] = aligned(keys) + aligned(values) + aligned(digests)


@case("truncated", encoded_blob)
def sizes_of_records_that_fit_but_for_the_file(p: Parts) -> None:
    entries = _all_of_a_long_document(p, 2)
    record = p.first["records"][1]
    assert (record["codec"], len(record["sizes"])) == ("none", 6)
    record.update(lengths=[2**31 - 1] * 2, slot_lengths=[2**31 - 1] * 2)
    record.update(position_encoding="range", slot_position_encoding="range")
    record["sizes"] = [entries * 3 * 4, entries * 5 * 4, 0, 0, entries * 4, entries * 4]
    p.first["nbytes"] = sum(aligned(size) for record in p.first["records"] for size in record["sizes"])


@case("field_malformed", encoded_blob)
def group_of_2_to_the_64(p: Parts) -> None:
    p.record["group"] = 2**64 - 1


@case("hole", two_layers)
def first_layer_missing(p: Parts) -> None:
    del p.fields["layers"][0]


@case("trailing_bytes", two_layers)
def last_layer_missing(p: Parts) -> None:
    del p.fields["layers"][1]


@case("truncated", two_layers)
def last_segment_missing(p: Parts) -> None:
    del p.body[p.fields["layers"][1]["offset"] :]


@case("hole", two_layers)
def layers_in_another_order(p: Parts) -> None:
    p.fields["layers"].reverse()


@case("overlap", two_layers)
def segment_inside_another(p: Parts) -> None:
    p.fields["layers"][1]["offset"] -= 64


@case("misaligned", two_layers)
def segment_at_an_odd_place(p: Parts) -> None:
    p.fields["layers"][1]["offset"] += 8


@case("hole", two_layers)
def bytes_between_segments(p: Parts) -> None:
    second = p.fields["layers"][1]
    p.body[second["offset"] : second["offset"]] = bytes(64)
    second["offset"] += 64


@case("positions_malformed")
def range_of_some(p: Parts) -> None:
    p.record["position_encoding"] = "range"
    p.put_positions(b"")


@case("positions_malformed", whole_blob)
def range_with_bytes(p: Parts) -> None:
    p.put_positions(b"\1")


@case("not_canonical", whole_blob)
def bitmap_where_all_is_kept(p: Parts) -> None:
    p.record["position_encoding"] = "bitmap"
    p.put_positions(b"\xff" * 10)


@case("not_canonical")
def deltas_where_a_bitmap_is_smaller(p: Parts) -> None:
    p.record["position_encoding"] = "delta"
    p.put_positions(bytes(29))


@case("positions_count")
def deltas_of_many_more_entries(p: Parts) -> None:
    p.record["position_encoding"] = "delta"
    p.put_positions(bytes(16 << 20))  # an index of them would take forty times as many bytes


@case("positions_malformed")
def varint_of_six_bytes(p: Parts) -> None:
    p.record["position_encoding"] = "delta"
    p.put_positions(b"\x81\x80\x80\x80\x80\x01" + bytes(28))


@case("positions_malformed")
def varint_with_a_needless_byte(p: Parts) -> None:
    p.record["position_encoding"] = "delta"
    p.put_positions(b"\x81\x00" + bytes(28))


@case("positions_out_of_range")
def bit_past_the_document(p: Parts) -> None:
    p.fields["num_tokens"] = p.fields["next_position"] = p.fields["identity"]["num_tokens"] = 39
    p.put_positions(b"\xff" * 10)


@case("positions_count", encoded_blob)
def slot_without_its_mark(p: Parts) -> None:
    assert p.record["slot_position_encoding"] == "bitmap"
    p.array(0, "slot positions")[0] ^= 1


# Windows and chunks


@case("inconsistent", window_blob)
def window_of_another_size(p: Parts) -> None:
    p.record["window"] = 9


@case("inconsistent", chunk_blob)
def chunk_of_another_size(p: Parts) -> None:
    p.record["chunk"] = 30


@case("inconsistent", chunk_blob)
def chunk_without_rotation(p: Parts) -> None:
    p.record["rope_mode"] = "pre"


@case("inconsistent", chunk_blob)
def chunk_beside_a_record(p: Parts) -> None:
    p.first["records"].append(p.record)


@case("inconsistent", chunk_blob)
def chunk_under_a_codec(p: Parts) -> None:
    p.record["codec"] = "int4"


@case("inconsistent", chunk_blob)
def chunk_of_other_tokens(p: Parts) -> None:
    bitmap = p.array(0, "positions")
    bitmap[3] ^= 0b1100_0000  # token 30 of the first head in place of 31


@case("field_malformed", chunk_blob)
def chunk_of_no_tokens(p: Parts) -> None:
    p.record["chunk"] = 0


@case("unknown_field", chunk_blob)
def chunk_with_a_window(p: Parts) -> None:
    p.record["window"] = 10


@case("inconsistent", window_blob)
def window_without_rotation(p: Parts) -> None:
    p.record["rope_mode"] = "pre"


@case("inconsistent", window_blob)
def window_beside_a_record(p: Parts) -> None:
    p.first["records"].append(p.record)


@case("inconsistent", window_blob)
def window_under_a_codec(p: Parts) -> None:
    p.record["codec"] = "int4"


@case("inconsistent", window_blob)
def window_of_other_tokens(p: Parts) -> None:
    bitmap = p.array(0, "positions")
    bitmap[3] ^= 0b1100_0000  # token 30 of the first head in place of 31


@case("missing_field", window_blob)
def window_of_no_size(p: Parts) -> None:
    del p.record["window"]


# Indexes


@case("inconsistent", indexed_blob)
def index_of_heads_of_two_lengths(p: Parts) -> None:
    p.record["lengths"] = [38, 36]


@case("inconsistent", indexed_blob)
def index_of_no_tokens(p: Parts) -> None:
    p.record["lengths"] = [0, 0]
    p.record["sizes"] = [0, 0, 0, 0, 0, 0, p.record["sizes"][6], 0]


@case("inconsistent", indexed_blob)
def index_of_blocks_that_share_a_scale(p: Parts) -> None:
    p.record["block"] = 18


@case("size_mismatch", indexed_blob)
def index_of_fewer_blocks(p: Parts) -> None:
    p.record["block"] = 24


@case("inconsistent", indexed_blob)
def index_of_other_tokens(p: Parts) -> None:
    bitmap = p.array(0, "positions")
    bitmap[4] ^= 0b0011_0000  # token 37 of the first head in place of 36


@case("not_finite", indexed_blob)
def index_of_no_number(p: Parts) -> None:
    p.array(0, "summaries")[0:2] = b"\xc0\x7f"


@case("missing_field", indexed_blob)
def index_of_no_blocks(p: Parts) -> None:
    del p.record["block"]


# Pruned keys


@case("channel_out_of_range", pruned_blob)
def channel_that_no_query_has(p: Parts) -> None:
    p.array(0, "channels")[4:6] = (7).to_bytes(2, "little")


@case("channel_out_of_range", pruned_blob)
def channel_before_the_first(p: Parts) -> None:
    p.array(0, "channels")[0:2] = b"\xff\xff"


@case("inconsistent", pruned_blob)
def channel_twice(p: Parts) -> None:
    p.array(0, "channels")[2:4] = (0).to_bytes(2, "little")


@case("inconsistent", pruned_blob)
def channels_out_of_order(p: Parts) -> None:
    channels = p.array(0, "channels")
    channels[6:8], channels[8:10] = bytes(channels[8:10]), bytes(channels[6:8])


@case("inconsistent", pruned_blob)
def more_channels_than_there_are(p: Parts) -> None:
    p.first["key_dim"] = 2


@case("size_mismatch", pruned_blob)
def other_number_of_channels(p: Parts) -> None:
    p.record["channels"] = 4


@case("field_malformed", pruned_blob)
def no_channels(p: Parts) -> None:
    p.record["channels"] = 0


@case("missing_field", pruned_blob)
def number_of_channels_unsaid(p: Parts) -> None:
    del p.record["channels"]


@case("inconsistent", pruned_blob)
def pruned_without_rotation(p: Parts) -> None:
    p.record["rope_mode"] = "pre"


@case("inconsistent", lambda: replace(make_cache(), layers=(golden_pruned(),)).to_bytes())
def pruned_under_transforms(p: Parts) -> None:
    p.fields["codec"] = "klt"
    p.fields["identity"]["transforms"] = "a"


# Residuals


@case("inconsistent", residuals_blob)
def residuals_without_rotation(p: Parts) -> None:
    p.record["rope_mode"] = "pre"


@case("inconsistent", residuals_blob)
def residuals_of_ragged_heads(p: Parts) -> None:
    p.record["lengths"] = [10, 10, 9]


@case("inconsistent", lambda: replace(make_cache(), layers=(golden_residuals(),)).to_bytes())
def residuals_of_other_tokens_in_a_head(p: Parts) -> None:
    positions = p.array(0, "positions")  # a bitmap of 5 bytes for each of three heads
    positions[0:1] = (positions[0] ^ 0b11).to_bytes(1, "little")


@case("size_mismatch", residuals_blob)
def other_width_of_residuals(p: Parts) -> None:
    p.record["width"] = 8


@case("field_malformed", residuals_blob)
def residuals_of_no_width(p: Parts) -> None:
    p.record["width"] = 0


@case("missing_field", residuals_blob)
def width_of_residuals_unsaid(p: Parts) -> None:
    del p.record["width"]


@case("unknown_field", residuals_blob)
def width_of_a_kept_record(p: Parts) -> None:
    p.record["kind"] = "kept"


@case("inconsistent", lambda: replace(make_cache(), layers=(golden_residuals(),)).to_bytes())
def residuals_under_transforms(p: Parts) -> None:
    p.fields["codec"] = "klt"
    p.fields["identity"]["transforms"] = "a"


# Latents


@case("inconsistent", latents_blob)
def latents_without_rotation(p: Parts) -> None:
    p.record["rope_mode"] = "pre"


@case("inconsistent", latents_blob)
def latents_beside_a_record(p: Parts) -> None:
    p.record["kind"] = "kept"


@case("inconsistent", some_blob)
def latents_of_two_heads(p: Parts) -> None:
    p.record["kind"] = "latents"


@case("inconsistent", latents_blob)
def latents_under_transforms(p: Parts) -> None:
    p.fields["codec"] = "klt"
    p.fields["identity"]["transforms"] = "a"
    del p.first["records"][0]


@case("unknown_field", some_blob)
def kept_with_a_window(p: Parts) -> None:
    p.record["window"] = 10


# States


@case("inconsistent", state_blob)
def channels_without_records(p: Parts) -> None:
    p.fields["layers"][1]["key_dim"] = p.fields["layers"][1]["value_dim"] = 4


@case("inconsistent", state_blob)
def another_dtype_without_records(p: Parts) -> None:
    p.fields["layers"][2]["dtype"] = "float16"


@case("inconsistent", state_blob)
def states_out_of_order(p: Parts) -> None:
    p.first["states"].reverse()


@case("inconsistent", state_blob)
def a_state_twice(p: Parts) -> None:
    p.first["states"].append(p.first["states"][0])


@case("size_mismatch", state_blob)
def larger_state(p: Parts) -> None:
    p.first["states"][1]["dims"] = [200, 3, 4]


@case("size_mismatch", state_blob)
def state_that_overflows(p: Parts) -> None:
    p.first["states"][1]["dims"] = [2**31 - 1] * 8


@case("field_malformed", state_blob)
def state_of_no_size(p: Parts) -> None:
    p.first["states"][0]["dims"] = []


@case("field_malformed", state_blob)
def state_of_many_dimensions(p: Parts) -> None:
    p.first["states"][0]["dims"] = [1] * 9


@case("unknown_role", state_blob)
def state_of_another_role(p: Parts) -> None:
    p.first["states"][0]["role"] = "memory"


@case("unknown_dtype", state_blob)
def state_of_another_dtype(p: Parts) -> None:
    p.first["states"][0]["dtype"] = "float64"


@case("missing_field", state_blob)
def layer_without_its_states(p: Parts) -> None:
    del p.first["states"]


@case("unknown_field", state_blob)
def state_with_a_position(p: Parts) -> None:
    p.first["states"][0]["position"] = 3


# Columns


@case("not_finite", columns_blob)
def column_that_is_no_number(p: Parts) -> None:
    p.array(1, "columns")[-4:] = struct.pack("<f", float("nan"))


@case("not_finite", columns_blob)
def column_without_an_end(p: Parts) -> None:
    p.array(0, "columns")[:4] = struct.pack("<f", float("-inf"))


@case("field_malformed", columns_blob)
def columns_out_of_order(p: Parts) -> None:
    p.record["columns"] = ["past", "all"]


@case("field_malformed", columns_blob)
def column_twice(p: Parts) -> None:
    p.record["columns"] = ["all", "all"]


@case("field_malformed", columns_blob)
def no_columns_but_the_field(p: Parts) -> None:
    p.record["columns"] = []


@case("field_malformed", columns_blob)
def columns_that_are_nothing(p: Parts) -> None:
    p.record["columns"] = None


@case("size_mismatch", columns_blob)
def more_columns_than_numbers(p: Parts) -> None:
    p.record["columns"] = ["all", "past", "sum"]


@case("size_mismatch", columns_blob)
def columns_unsaid(p: Parts) -> None:
    del p.record["columns"]
