"""Decoding many streams side by side: under the interpreter against the naive form, and compiled for GPUs that are not
there."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvshelf.kernels import ans
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import ans as reference
from tests.kernels.streams import TABLES, drawn

CPU = torch.device("cpu")


def runs_of(numbers: ans.Ints, rows: list[int], order: list[int], entry_rows: int) -> ans.Runs:
    parts = np.split(numbers, np.cumsum(rows)[:-1], axis=1)
    streams = [ans.encode(part, TABLES, order, entry_rows=entry_rows) for part in parts]
    data = torch.frombuffer(bytearray(b"".join(streams)), dtype=torch.uint8)
    return ans.Runs(data, [len(stream) for stream in streams], rows, order)


@pytest.mark.usefixtures("forced_triton")
def test_arrays_of_all_shapes_come_back_together():
    """With entries and without, of several widths and tables, with escapes, channels of zeros, and runs of no rows."""
    shapes = [([5, 5, 3], 70, 4), ([4], 1, 1), ([0, 2], 33, 9), ([6], 40, 6)]
    arrays, expected = [], []
    for seed, (rows, channels, entry_rows) in enumerate(shapes):
        order = [(channel + seed) % 4 for channel in range(channels)]
        numbers = drawn(order, sum(rows), seed=seed, spread=4)
        numbers[1::3] = 0
        arrays.append(runs_of(numbers, rows, order, entry_rows))
        expected.append(numbers)
    assert ans.side_by_side(CPU)
    for numbers, (codes, sound) in zip(expected, ans.decode(arrays, TABLES), strict=True):
        assert all(sound)
        assert np.array_equal(codes.numpy(), numbers)
    assert ans.decode([], TABLES) == []


@pytest.mark.usefixtures("forced_triton")
def test_it_agrees_with_the_naive_form_on_any_bytes():
    """Bits flipped in each part of a stream, and streams cut short: what one form calls unsound the other does, too."""
    draw, order = random.Random(5), [0, 3, 1, 2] * 9
    run = ans.encode(drawn(order, 2, seed=8, spread=6), TABLES, order, entry_rows=1)
    others = [run]
    for number in range(60):
        other = bytearray(run)
        place = draw.randrange(28 if number % 2 else len(other))  # the head and the entry, or anywhere
        other[place] ^= 1 << draw.randrange(8)
        others.append(bytes(other[: len(other) - 4 * draw.choice([0, 0, 0, 1, len(other) // 4])]))
    data = torch.frombuffer(bytearray(b"".join(others)), dtype=torch.uint8)
    array = ans.Runs(data, list(map(len, others)), [2] * len(others), order)
    (codes, sound), (naive, also) = ans.decode([array], TABLES)[0], reference.decode(array, TABLES)
    assert sound == also
    assert sound[0]
    assert 0 < sum(sound) < len(others) / 2
    for run_number, kept in enumerate(sound):
        own = slice(2 * run_number, 2 * run_number + 2)
        assert not kept or torch.equal(codes[:, own], naive[:, own])


@pytest.mark.slow
def test_the_kernel_compiles_and_fits(compile_all):
    tables = {"words": "*i32", "escaped": "*u8", "orders": "*i32", "slots": "*i64", "runs": "*i64", "lanes": "*i32"}
    signature = {**tables, "num_lanes": "i32", "out": "*fp32", "bad": "*i32"}
    require_fits(
        compile_all("kvshelf.kernels.ans.triton", [Variant("_decode", signature, {"FIELDS": 7, "LANES": 32}, 1)])
    )
