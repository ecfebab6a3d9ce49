"""Entropy coding: every form decodes what was encoded, and says of anything else that it is not."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.kernels import ans
from kvshelf.kernels.ans import eager, native
from kvshelf.kernels.native import library
from tests.amounts import amount
from tests.kernels.references import ans as reference
from tests.kernels.streams import DEVIATIONS, TABLES, drawn

ORACLES = Path(__file__).parents[1] / "oracles"

OTHERS = [eager, pytest.param(native, marks=pytest.mark.skipif(library() is None, reason="not compiled"))]
FORMS = [*OTHERS, reference]


def decoded(form, runs: list[bytes], rows: list[int], order: list[int]):
    data = torch.frombuffer(bytearray(b"".join(runs) or b"\0"), dtype=torch.uint8)[: sum(map(len, runs))]
    return form.decode(ans.Runs(data, [len(run) for run in runs], rows, order), TABLES)


@pytest.mark.parametrize("module", FORMS)
@pytest.mark.parametrize("rows", [[1], [64] * 4, [64] * 9 + [5], [0]])
@pytest.mark.parametrize(("channels", "entry_rows"), [(1, 512), (31, 512), (70, 512), (33, 5), (70, 0)])
def test_what_was_encoded_comes_back(module, rows: list[int], channels: int, entry_rows: int) -> None:
    order = [channel % len(DEVIATIONS) for channel in range(channels)]
    numbers = drawn(order, sum(rows), spread=2)
    numbers[1::3] = 0  # whole channels of zeros
    parts = np.split(numbers, np.cumsum(rows)[:-1], axis=1)
    runs = [ans.encode(part, TABLES, order, entry_rows=entry_rows) for part in parts]
    out, sound = decoded(module, runs, rows, order)
    assert all(sound)
    assert np.array_equal(out.numpy(), numbers)


@pytest.mark.parametrize("module", FORMS)
@pytest.mark.parametrize("name", ["ans_streams", "ans_entries"])
def test_streams_of_an_earlier_day_and_another_machine_are_read(module, name) -> None:
    """Made once, on x86: `ans.encode` of `drawn([channel % 4 ...], rows)`; `ans_entries` with entries and escapes, 70
    channels, some of them zeros, `spread=3, entry_rows=5`. ARM can read them without constriction."""
    with np.load(ORACLES / f"{name}.npz") as kept:
        runs = np.split(kept["bytes"], np.cumsum(kept["sizes"])[:-1])
        out, sound = decoded(module, [run.tobytes() for run in runs], list(kept["rows"]), list(kept["order"]))
        assert all(sound)
        assert np.array_equal(out.numpy(), kept["numbers"])


@pytest.mark.parametrize("module", FORMS)
def test_numbers_outside_their_table_come_back(module) -> None:
    numbers = np.array([[0, 1 << 22, -5, 3, -(1 << 24)], [99, -99, 0, 0, 64]], np.int32)
    out, sound = decoded(module, [ans.encode(numbers, TABLES, [0, 1])], [5], [0, 1])
    assert sound == [True]
    assert np.array_equal(out.numpy(), numbers)


def test_a_stream_has_as_many_bits_as_its_tables_say() -> None:
    """The library's, so within 64 bits of the sum of the logarithms, but for flags and an entry."""
    order = [2] * 40
    numbers = np.clip(drawn(order, 1024), -TABLES.reach(2), TABLES.reach(2))
    ideal = -np.log2(TABLES.frequencies[2][numbers + TABLES.reach(2)] / 4096).sum()
    beside = 4 + 4 * 2 + 16
    assert 0 <= 8 * (len(ans.encode(numbers, TABLES, order)) - beside) - ideal < 64


@pytest.mark.parametrize("module", FORMS)
def test_every_bit_counts(module) -> None:
    """A flipped bit is found, or changes the numbers and nothing else; a digest finds those."""
    order = [0, 1, 2, 3]
    run = ans.encode(drawn(order, 30, seed=2, spread=3), TABLES, order)
    unsound = 0
    for bit in range(8 * len(run)):
        other = bytearray(run)
        other[bit // 8] ^= 1 << bit % 8
        out, sound = decoded(module, [bytes(other)], [30], order)
        assert out.shape == (4, 30)
        unsound += not sound[0]
    assert unsound > 0.8 * 8 * len(run)


@pytest.mark.parametrize("module", OTHERS)
@given(data=st.binary(max_size=400), rows=st.integers(0, 40), seed=st.integers(0, 99), cut=st.integers(0, 100))
@settings(max_examples=amount(100, 300), deadline=None)
def test_the_forms_agree_on_any_bytes(module, data: bytes, rows: int, seed: int, cut: int) -> None:
    """Noise, and streams with noise in them or cut short."""
    order = random.Random(seed).choices(range(4), k=7)
    run = ans.encode(drawn(order, rows, seed), TABLES, order) if seed % 2 else b""
    mixed = run[: 4 * cut] + data
    agree(module, mixed[: len(mixed) // 4 * 4], rows, order)


@pytest.mark.parametrize("module", OTHERS)
@pytest.mark.parametrize("channels", [33, 64, 70])
def test_the_forms_agree_on_streams_with_entries_of_which_a_bit_is_wrong(module, channels: int) -> None:
    """Any bit of the entries makes a stream unsound: the numbers alone would be the right ones."""
    order = [channel % 4 for channel in range(channels)]
    run, width = ans.encode(drawn(order, 6, channels, spread=5), TABLES, order, entry_rows=0), -(-channels // 32)
    draw, head = random.Random(channels), 4 + 4 * width
    assert agree(module, run, 6, order)
    for place in [*range(head, head + 16 * (width - 1)), *draw.choices(range(len(run)), k=40)]:
        other = bytearray(run)
        other[place] ^= 1 << draw.randrange(8)
        sound = agree(module, bytes(other), 6, order)
        assert not (sound and head <= place < head + 16 * (width - 1))
    for size in range(0, len(run), 4):
        agree(module, run[:size], 6, order)


def agree(form, run: bytes, rows: int, order: list[int]) -> bool:
    """Whether a run is sound, of which a form says what the naive one does."""
    (one, sound), (other, also) = (decoded(decoder, [run], [rows], order) for decoder in (form, reference))
    assert sound == also
    if sound[0]:
        assert torch.equal(one, other)
    return sound[0]


def test_tables_add_up() -> None:
    with pytest.raises(AssertionError):
        ans.Tables([np.array([1, 2, 3, 4], np.int32)])
