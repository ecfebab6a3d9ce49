"""Absurd lengths, regions out of their place, and what msgpack can say that no header says."""

from __future__ import annotations

import msgpack

from tests.store.hostile import (
    Cases,
    Parts,
    aligned,
    encoded_blob,
    field,
    recorder,
    some_blob,
    two_layers,
    whole_blob,
)

CASES: Cases = {}
case = recorder(CASES)

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
    assert packed[0] == 0x84, "a map of four"
    p.header = b"\x85" + packed[1:] + msgpack.packb("num_tokens") + msgpack.packb(40)


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
    p.first["lengths"] = [0] * 4097


@case("field_malformed")
def no_length_in_any_head_of_any_layer(p: Parts) -> None:
    p.fields["layers"] = [p.first | {"lengths": [None] * 4096}] * 60


@case("field_malformed", encoded_blob)
def no_length_in_any_head_of_any_record(p: Parts) -> None:
    nothing = dict.fromkeys(("lengths", "slot_lengths", "sizes"), [None] * 4096)
    p.first["records"] = [p.first["records"][0] | nothing] * 16


@case("header_malformed")
def a_billion_heads(p: Parts) -> None:
    p.first["lengths"] = "heads"
    p.header = p.packed().replace(msgpack.packb("heads"), b"\xdd\x3b\x9a\xca\x00")


@case("unknown_field")
def name_that_fills_the_header(p: Parts) -> None:
    p.fields["x" * 200_000] = 1


for name, value, reason in (
    ("offset", HUGE, "hole"),
    ("offset", 2**63, "field_malformed"),
    ("nbytes", HUGE, "size_mismatch"),
    ("nbytes", 2**63, "field_malformed"),
    ("keys", {"offset": 0, "nbytes": HUGE}, "size_mismatch"),
    ("values", {"offset": HUGE, "nbytes": 29 * 5 * 4}, "hole"),
    ("positions", {"offset": 0, "nbytes": 10}, "overlap"),
    ("lengths", [29], "positions_malformed"),
):
    CASES[f"plain {name} {value}"] = (reason, some_blob, field(name, value))


@case("truncated")
def positions_as_long_as_they_say(p: Parts) -> None:
    p.first["positions"]["nbytes"] = HUGE
    p.first["nbytes"] = p.first["positions"]["offset"] + HUGE


def _all_of_a_long_document(p: Parts, heads: int) -> int:
    """Each of so many heads keeps every token of the longest document. Returns the number of entries."""
    p.fields["num_tokens"] = p.fields["next_position"] = p.fields["identity"]["num_tokens"] = 2**31 - 1
    return heads * (2**31 - 1)


@case("truncated")
def sizes_that_fit_but_for_the_file(p: Parts) -> None:
    entries = _all_of_a_long_document(p, 4096)
    keys, values = entries * 3 * 4, entries * 5 * 4
    p.first.update(
        lengths=[2**31 - 1] * 4096,
        position_encoding="range",
        keys={"offset": 0, "nbytes": keys},
        values={"offset": aligned(keys), "nbytes": values},
        positions={"offset": aligned(keys) + aligned(values), "nbytes": 0},
        nbytes=aligned(keys) + aligned(values),
    )


@case("truncated", encoded_blob)
def sizes_of_records_that_fit_but_for_the_file(p: Parts) -> None:
    entries = _all_of_a_long_document(p, 2)
    record = p.first["records"][1]
    assert (record["codec"], len(record["sizes"])) == ("none", 6)
    record.update(lengths=[2**31 - 1] * 2, slot_lengths=[2**31 - 1] * 2)
    record.update(position_encoding="range", slot_position_encoding="range")
    record["sizes"] = [entries * 3 * 4, entries * 5 * 4, 0, 0, entries * 4, entries * 4]
    p.first["nbytes"] = sum(aligned(size) for each in p.first["records"] for size in each["sizes"])


@case("field_malformed", encoded_blob)
def group_of_2_to_the_64(p: Parts) -> None:
    p.first["records"][0]["group"] = 2**64 - 1


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
    p.first["position_encoding"] = "range"
    p.put_positions(b"")


@case("positions_malformed", whole_blob)
def range_with_bytes(p: Parts) -> None:
    p.put_positions(b"\1")


@case("not_canonical", whole_blob)
def bitmap_where_all_is_kept(p: Parts) -> None:
    p.first["position_encoding"] = "bitmap"
    p.put_positions(b"\xff" * 10)


@case("not_canonical")
def deltas_where_a_bitmap_is_smaller(p: Parts) -> None:
    p.first["position_encoding"] = "delta"
    p.put_positions(bytes(29))


@case("positions_count")
def deltas_of_many_more_entries(p: Parts) -> None:
    p.first["position_encoding"] = "delta"
    p.put_positions(bytes(16 << 20))  # an index of them would take forty times as many bytes


@case("positions_malformed")
def varint_of_six_bytes(p: Parts) -> None:
    p.first["position_encoding"] = "delta"
    p.put_positions(b"\x81\x80\x80\x80\x80\x01" + bytes(28))


@case("positions_malformed")
def varint_with_a_needless_byte(p: Parts) -> None:
    p.first["position_encoding"] = "delta"
    p.put_positions(b"\x81\x00" + bytes(28))


@case("positions_out_of_range")
def bit_past_the_document(p: Parts) -> None:
    p.fields["num_tokens"] = p.fields["next_position"] = p.fields["identity"]["num_tokens"] = 39
    p.put_positions(b"\xff" * 10)


@case("positions_count", encoded_blob)
def slot_without_its_mark(p: Parts) -> None:
    assert p.first["records"][0]["slot_position_encoding"] == "bitmap"
    p.array(0, "slot positions")[0] ^= 1
