from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.artifact import positions
from kvshelf.errors import BlobError, InvalidRequest

INT32_MAX = 2**31 - 1


@st.composite
def heads(draw: st.DrawFn, tokens: st.SearchStrategy[int]) -> tuple[int, list[list[int]]]:
    num_tokens = draw(tokens)
    position = st.integers(0, num_tokens - 1)
    found = draw(st.lists(st.lists(position, unique=True, max_size=min(40, num_tokens)), min_size=1, max_size=5))
    return num_tokens, [sorted(head) for head in found]


def flat(found: list[list[int]]) -> positions.Ints:
    return np.array([position for head in found for position in head], np.int64)


@settings(deadline=None)
@given(heads(st.integers(1, 50) | st.integers(1, 100_000)))
def test_what_is_encoded_comes_back(case: tuple[int, list[list[int]]]) -> None:
    num_tokens, found = case
    lengths = [len(head) for head in found]
    name, data = positions.encode(flat(found), lengths, num_tokens)
    assert positions.decode(name, memoryview(data), lengths, num_tokens)().tolist() == flat(found).tolist()


@settings(deadline=None)
@given(heads(st.just(INT32_MAX)))
def test_positions_of_the_longest_document_the_format_allows(case: tuple[int, list[list[int]]]) -> None:
    num_tokens, found = case
    lengths = [len(head) for head in found]
    name, data = positions.encode(flat(found), lengths, num_tokens)
    assert name == "delta"
    assert positions.decode(name, memoryview(data), lengths, num_tokens)().tolist() == flat(found).tolist()


@settings(deadline=None)
@given(heads(st.integers(1, 300)))
def test_the_smallest_encoding_is_taken(case: tuple[int, list[list[int]]]) -> None:
    """Sizes computed here in the slow and obvious way: a varint has one byte per seven bits."""
    num_tokens, found = case
    gaps = [b - a - 1 for head in found for a, b in zip([-1, *head], head, strict=False)]
    sizes = {
        "bitmap": len(found) * -(-num_tokens // 8),
        "delta": sum(max(1, -(-gap.bit_length() // 7)) for gap in gaps),
    }
    if all(len(head) == num_tokens for head in found):
        sizes["range"] = 0
    name, data = positions.encode(flat(found), [len(head) for head in found], num_tokens)
    assert len(data) == min(sizes.values()) == sizes[name]


@pytest.mark.parametrize(("name", "found"), [("range", [0, 1, 2]), ("bitmap", [0, 2]), ("delta", [])])
def test_encodings_on_paper(name: str, found: list[int]) -> None:
    expected = {"range": b"", "bitmap": b"\x05", "delta": b""}
    assert positions.encode(flat([found]), [len(found)], 3) == (name, expected[name])


def test_deltas_on_paper() -> None:
    # 5; then 7 with one skipped; then 7 + 1 + 300, written as 300 = 0b10_0101100 in seven-bit groups, low group first.
    data = bytes([5, 1, 0b1010_1100, 0b10])
    assert positions.encode(flat([[5, 7, 308]]), [3], 100_000) == ("delta", data)


@pytest.mark.parametrize("found", [[3, 2], [2, 2], [-1], [10]])
def test_positions_out_of_order_or_range_are_not_written(found: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="ascend from 0 to at most 9"):
        positions.encode(np.array(found, np.int64), [len(found)], 10)


@pytest.mark.parametrize(
    ("name", "data", "lengths", "reason"),
    [
        ("range", b"\0", [100], "positions_malformed"),
        ("range", b"", [99], "positions_malformed"),
        ("bitmap", b"\xff" * 12, [96], "positions_malformed"),
        ("bitmap", b"\xff" * 13, [100], "positions_out_of_range"),
        ("bitmap", b"\xff" * 12 + b"\x0f", [99], "positions_count"),
        ("bitmap", b"\xff" * 12 + b"\x0f", [100], "not_canonical"),
        ("bitmap", b"\x01" + b"\0" * 12, [1], "not_canonical"),
        ("delta", b"\x05\x80", [2], "positions_malformed"),
        ("delta", b"\x85\x00", [1], "positions_malformed"),
        ("delta", b"\x80\x80\x80\x80\x80\x01", [1], "positions_malformed"),
        ("delta", b"\xff\xff\xff\xff\x7f", [1], "positions_out_of_range"),
        ("delta", b"\x64", [1], "positions_out_of_range"),
        ("delta", b"\x32\x31", [2], "positions_out_of_range"),
        ("delta", b"\x05", [2], "positions_count"),
        ("delta", b"\0" * 50, [50], "not_canonical"),
    ],
)
def test_bytes_that_no_writer_makes_are_refused(name: str, data: bytes, lengths: list[int], reason: str) -> None:
    with pytest.raises(BlobError) as refusal:
        positions.decode(name, memoryview(data), lengths, 100)
    assert refusal.value.reason == reason
