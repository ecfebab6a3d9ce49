"""Rotations by Triton: under the interpreter against the reference, and compiled for GPUs that are not there."""

from __future__ import annotations

import pytest
import torch

from kvshelf.kernels.rotate import rotate
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import rotate as reference
from tests.kernels.test_rotate import planes, tables
from tests.kernels.test_row_norms import DTYPES, layouts

SHAPES = [(1, 1, 2), (2, 200, 24), (1, 7, 320)]


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_equals_the_reference_in_every_layout_of_states_and_planes(dtype, heads, rows, dim):
    states_of, (cos, sin) = layouts(heads, rows, dim, dtype), tables(rows, dim)
    for (kind, partners), (layout, states) in zip(planes(dim).items(), states_of.items(), strict=True):
        expected = reference.rotate(states_of["head-major"], cos, sin, partners)
        ours = rotate(states, cos, sin, partners)
        assert (ours.dtype, ours.shape) == (torch.float32, states.shape)
        assert float((ours - expected).abs().max()) < 2e-6 * float(expected.abs().max()), (kind, layout)


@pytest.mark.usefixtures("forced_triton")
def test_tables_may_be_views():
    states, (cos, sin), partners = torch.ones(2, 5, 32), tables(1, 32), planes(32)["halves"]
    ours = rotate(states, cos.expand(5, -1), sin.T.contiguous().T.expand(5, -1), partners)
    assert torch.equal(ours, rotate(states, cos.repeat(5, 1), sin.repeat(5, 1), partners))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_kernel_compiles_and_fits(compile_all, dim):
    strides = ("head_stride", "stride", "cos_row", "cos_stride", "sin_row", "sin_stride", "partner_stride")
    types = {"cos": "*fp32", "sin": "*fp32", "partners": "*i64", "out": "*fp32"}
    types |= dict.fromkeys(("num_rows", *strides), "i32")
    tile = {"ROWS": 4096 // dim, "DIM": dim, "BLOCK_DIM": dim}
    variants = [Variant("_rotate", {"states": f"*{dtype}", **types}, tile, 8) for dtype in ("bf16", "fp32")]
    require_fits(compile_all("kvshelf.kernels.rotate.triton", variants))
