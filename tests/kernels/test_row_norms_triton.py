"""The kernel of row norms: under the interpreter against the reference, and compiled for GPUs that are not there."""

from __future__ import annotations

import math

import pytest
import torch

from kvshelf.kernels.row_norms import reference, row_norms
from tests.kernels.compiling import Variant, compile_all, require_fits
from tests.kernels.tensors import random
from tests.kernels.test_row_norms import DTYPES, largest_error, layouts

MODULE = "kvshelf.kernels.row_norms.triton"
SHAPES = [(1, 1, 1), (2, 5, 3), (3, 300, 24), (2, 130, 64), (2, 3, 4097)]


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_equals_the_reference_in_every_layout(dtype, heads, rows, dim):
    """Also of rows that are longer than a tile, by one channel."""
    found = layouts(heads, rows, dim, dtype)
    expected = reference.row_norms(found["head-major"])
    for layout, states in found.items():
        assert largest_error(row_norms(states), expected) < 1e-6, layout


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_in_its_own_row(bad):
    states = random(2, 4, 40)
    states[1, 2, 39] = bad
    ours = row_norms(states)
    assert ours[1, 2].isnan() if math.isnan(bad) else ours[1, 2] == math.inf
    assert ours.isfinite().sum() == 7


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_add_up(shape):
    assert torch.equal(row_norms(torch.empty(shape)), torch.zeros(shape[:2]))


def variant(dtype, dim):
    """The launch of `row_norms` for states of that dtype."""
    block_dim = min(4096, 1 << (dim - 1).bit_length())
    arguments = {"states": f"*{dtype}", "norms": "*fp32"} | dict.fromkeys(("head_stride", "stride", "num_rows"), "i32")
    constants = {"DIM": dim, "BLOCK_DIM": block_dim, "BLOCK": 4096 // block_dim}
    return Variant("_row_norms", arguments, constants, num_warps=8)


def test_compiles_without_spills():
    pytest.importorskip("triton")
    usual = [variant(dtype, dim) for dtype in ("bf16", "fp16", "fp32") for dim in (64, 128)]
    require_fits(compile_all(MODULE, [*usual, variant("bf16", 80), variant("fp32", 5000), variant("bf16", 1)]))
