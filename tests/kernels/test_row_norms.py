"""Norms of rows: both forms of a CPU against the fp64 reference, in every layout, and what is refused."""

from __future__ import annotations

import math
import platform

import pytest
import torch

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.row_norms import eager, row_norms
from tests.kernels.references import row_norms as reference
from tests.kernels.tensors import random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (2, 5, 3), (3, 7, 15), (2, 9, 16), (3, 300, 24), (1, 33, 65), (2, 520, 64), (4, 11, 1100)]


def layouts(heads, rows, dim, dtype):
    """The same numbers in the layouts that models and policies have: also between other numbers, on odd addresses."""
    states = random(heads, rows, dim, dtype=dtype)
    wide = random(heads + 1, rows + 2, dim + 3, dtype=dtype, seed=1)
    wide[1:, 2:, 1:-2] = states
    every_third = random(heads, 3 * rows, dim, dtype=dtype, seed=2)
    every_third[:, 1::3] = states
    return {
        "head-major": states,
        "token-major": states.transpose(0, 1).contiguous().transpose(0, 1),
        "within others": wide[1:, 2:, 1:-2],
        "every third": every_third[:, 1::3],
    }


def largest_error(ours, expected):
    """Relative, of each row by itself."""
    assert (ours.dtype, ours.shape) == (torch.float32, expected.shape)
    return float((ours / expected - 1).abs().max())


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_equals_the_reference_in_every_layout(dtype, heads, rows, dim):
    states_of = layouts(heads, rows, dim, dtype)
    expected = reference.row_norms(states_of["head-major"])
    for layout, states in states_of.items():
        before = states.clone()
        assert largest_error(row_norms(states), expected) < 1e-6, layout
        assert torch.equal(states, before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch adds in another order there")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
def test_every_bit_is_torchs(dtype, dim):
    """Tokens that are repeated differ in the last bit only, and a policy that goes by norms keeps some of them."""
    for layout, states in layouts(2, 500, dim, dtype).items():
        assert torch.equal(row_norms(states), eager.row_norms(states)), layout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [3, 16, 40])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_in_its_own_row(dtype, dim, bad):
    for channel in range(dim):
        states = random(2, 4, dim, dtype=dtype)
        states[1, 2, channel] = bad
        ours = row_norms(states)
        assert ours[1, 2].isnan() if math.isnan(bad) else ours[1, 2] == math.inf
        assert ours.isfinite().sum() == 7


def test_what_is_not_a_number_stays_so_beside_infinity():
    states = random(1, 2, 40)
    states[0, 1, 3], states[0, 1, 39] = math.inf, math.nan
    assert row_norms(states).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_zeros_has_length_0(dtype):
    assert row_norms(torch.zeros(2, 3, 20, dtype=dtype)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_add_up(shape):
    ours = row_norms(torch.empty(shape, dtype=torch.bfloat16))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, torch.zeros(shape[:2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_fp32_whatever_a_process_makes_its_tensors_of(dtype):
    states = random(2, 3, 20, dtype=dtype)
    expected = reference.row_norms(states)
    torch.set_default_dtype(torch.bfloat16)  # as while a model is loaded
    try:
        assert largest_error(row_norms(states), expected) < 1e-6
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (random(24, 4), r"3 dimensions; given states \[24, 4\] float32"),
        (random(1, 2, 24, 4), r"3 dimensions; given states \[1, 2, 24, 4\] float32"),
        (random(2, 24, 4).int(), r"float16; given states \[2, 24, 4\] int32"),
        (random(2, 24, 4).double(), r"float16; given states \[2, 24, 4\] float64"),
        (random(2, 4, 24).transpose(1, 2), r"contiguous.*; given states \[2, 24, 4\] float32 strides \[96, 1, 24\]"),
    ],
)
def test_refuses_what_does_not_fit(states, shown):
    with pytest.raises(InvalidTensor, match=f"row_norms: .*{shown}"):
        row_norms(states)
