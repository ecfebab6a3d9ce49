"""Cosines with the mean direction by Triton: under the interpreter against the reference, and compiled for GPUs that
are not there."""

from __future__ import annotations

import math

import pytest
import torch

from kvshelf.kernels.mean_cosines import mean_cosines
from tests.amounts import in_turn
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import mean_cosines as reference
from tests.kernels.tensors import random
from tests.kernels.test_row_norms import DTYPES, layouts

SHAPES = [(1, 1, 1), (2, 300, 24), (1, 2, 1100), (1, 700, 8), (1, 600, 3)]


@pytest.mark.usefixtures("forced_triton")
@in_turn({"heads, rows, dim": SHAPES, "dtype": DTYPES})
def test_equals_the_reference_in_every_layout(dtype, heads, rows, dim):
    states_of = layouts(heads, rows, dim, dtype)
    expected = reference.mean_cosines(states_of["head-major"])
    for layout, states in states_of.items():
        cosines = mean_cosines(states)
        assert (cosines.dtype, cosines.shape) == (torch.float32, (heads, rows))
        assert float((cosines - expected).abs().max()) < 2e-6, layout


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_of_zeros_is_like_nothing_and_a_bad_number_spoils_its_head(bad):
    states = random(2, 6, 20)
    states[:, 2] = 0
    expected = reference.mean_cosines(states)
    assert mean_cosines(states)[:, 2].tolist() == [0, 0]
    states[1, 4, 3] = bad
    cosines = mean_cosines(states)
    assert float((cosines[0] - expected[0]).abs().max()) < 2e-6
    assert cosines[1].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 1024])
def test_the_kernels_compile_and_fit(compile_all, dim):
    numbers = dict.fromkeys(("num_rows", "head_stride", "stride"), "i32")
    tile, variants = {"ROWS": 4096 // dim, "DIM": dim, "BLOCK_DIM": dim}, []
    for dtype in ("bf16", "fp32"):
        states = {"states": f"*{dtype}", **numbers}
        variants.append(Variant("_sum_directions", {**states, "sums": "*fp32"}, {"BLOCK": 256, **tile}, 8))
        variants.append(Variant("_cosines", {**states, "axes": "*fp32", "cosines": "*fp32"}, tile, 8))
    require_fits(compile_all("kvshelf.kernels.mean_cosines.triton", variants))
