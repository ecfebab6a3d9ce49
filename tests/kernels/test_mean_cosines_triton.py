"""The kernels of mean cosines: under the interpreter against the reference, and compiled for GPUs."""

from __future__ import annotations

import math

import pytest
import torch

from kvshelf.kernels.mean_cosines import mean_cosines, reference
from tests.kernels.compiling import Variant, compile_all, require_fits
from tests.kernels.tensors import random
from tests.kernels.test_mean_cosines import DTYPES, largest_error, layouts

MODULE = "kvshelf.kernels.mean_cosines.triton"
SHAPES = [(1, 1, 1), (2, 5, 3), (3, 300, 24), (2, 130, 64), (2, 3, 4097)]


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_equals_the_reference_in_every_layout(dtype, heads, rows, dim):
    """Rows that are longer than a tile are computed by torch's own operations."""
    found = layouts(heads, rows, dim, dtype)
    expected = reference.mean_cosines(found["head-major"])
    for layout, states in found.items():
        assert largest_error(mean_cosines(states), expected) < 2e-6, layout


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_own_head(bad):
    states = random(2, 4, 40)
    states[1, 2, 39] = bad
    ours = mean_cosines(states)
    assert ours[1].isnan().all()
    assert ours[0].isfinite().all()


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_compare(shape):
    assert torch.equal(mean_cosines(torch.empty(shape)), torch.zeros(shape[:2]))


def variants(dtype, dim):
    """The two launches of `mean_cosines` for states of that dtype."""
    block_dim = 1 << (dim - 1).bit_length()
    sizes = dict.fromkeys(("head_stride", "stride", "num_rows"), "i32")
    constants = {"DIM": dim, "BLOCK_DIM": block_dim, "BLOCK": 4096 // block_dim}
    first = {"states": f"*{dtype}", **sizes, "inverses": "*fp32", "sums": "*fp32"}
    second = {"states": f"*{dtype}", **sizes, "inverses": "*fp32", "axes": "*fp32", "cosines": "*fp32"}
    return [
        Variant("_add_directions", first, constants, num_warps=8),
        Variant("_cosines", second, constants, num_warps=8),
    ]


def test_compiles_without_spills():
    pytest.importorskip("triton")
    shapes = [(dtype, dim) for dtype in ("bf16", "fp16", "fp32") for dim in (64, 128)] + [("bf16", 80), ("bf16", 1)]
    require_fits(compile_all(MODULE, [variant for shape in shapes for variant in variants(*shape)]))
