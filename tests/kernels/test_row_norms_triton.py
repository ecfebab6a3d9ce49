"""Norms of rows by Triton: under the interpreter against the reference, and compiled for GPUs that are not there."""

from __future__ import annotations

import math

import pytest
import torch

from kvshelf.kernels.row_norms import row_norms
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import row_norms as reference
from tests.kernels.test_row_norms import DTYPES, layouts

SHAPES = [(1, 1, 1), (2, 300, 24), (1, 2, 1100)]


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_equals_the_reference_in_every_layout(dtype, heads, rows, dim):
    states_of = layouts(heads, rows, dim, dtype)
    expected = reference.row_norms(states_of["head-major"])
    for layout, states in states_of.items():
        norms = row_norms(states)
        assert (norms.dtype, norms.shape) == (torch.float32, (heads, rows))
        assert float((norms / expected - 1).abs().max()) < 1e-6, layout


@pytest.mark.usefixtures("forced_triton")
def test_what_is_not_finite_stays_in_its_row():
    states = torch.ones(1, 4, 5)
    states[0, 1, 2], states[0, 2, 0] = math.nan, -math.inf
    assert str(row_norms(states).tolist()) == str([[math.sqrt(5), math.nan, math.inf, math.sqrt(5)]]).replace(
        str(math.sqrt(5)), str(float(torch.tensor(5.0).sqrt()))
    )


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 1024])
def test_the_kernel_compiles_and_fits(compile_all, dim):
    numbers = dict.fromkeys(("num_rows", "head_stride", "stride"), "i32")
    tile = {"ROWS": 4096 // dim, "DIM": dim, "BLOCK_DIM": dim}
    variants = [
        Variant("_row_norms", {"states": f"*{dtype}", "norms": "*fp32", **numbers}, tile, 8)
        for dtype in ("bf16", "fp32")
    ]
    require_fits(compile_all("kvshelf.kernels.row_norms.triton", variants))
