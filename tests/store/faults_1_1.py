"""Faults of what format 1.1 added: codecs, merged records, several records per layer."""

from __future__ import annotations

import struct

import numpy as np

from tests.store.hostile import Cases, Parts, aligned, encoded_blob, field, kept_blob, record_field, recorder

CASES: Cases = {}
case = recorder(CASES)

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
