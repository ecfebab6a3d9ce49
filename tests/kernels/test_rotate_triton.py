"""The kernel of rotations: under the interpreter against the reference, and compiled for GPUs that are not there."""

from __future__ import annotations

import pytest
import torch

from kvshelf.kernels.rotate import reference, rotate
from tests.kernels.compiling import Variant, compile_all, require_fits
from tests.kernels.test_rotate import DTYPES, layouts, planes, tables

MODULE = "kvshelf.kernels.rotate.triton"
SHAPES = [(1, 1, 2), (2, 5, 6), (3, 300, 24), (2, 130, 64), (2, 3, 2050)]


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_equals_the_reference_in_every_layout(dtype, heads, rows, dim):
    """Also of rows that are longer than a tile."""
    found, (cos, sin) = layouts(heads, rows, dim, dtype), tables(rows, dim)
    for kind in ("halves", "any"):
        partners = planes(dim)[kind]
        expected = reference.rotate(found["head-major"], cos, sin, partners)
        for layout, states in found.items():
            ours = rotate(states, cos, sin, partners)
            assert float((ours - expected).abs().max()) < 2e-6 * float(expected.abs().max()), (kind, layout)


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_turn(shape):
    cos, sin = tables(*shape[1:])
    assert rotate(torch.empty(shape), cos, sin, torch.arange(shape[2])).shape == shape


def variant(dtype, dim):
    """The launch of `rotate` for states of that dtype."""
    block_dim = min(2048, 1 << (dim - 1).bit_length())
    arguments = {
        "states": f"*{dtype}", "head_stride": "i32", "stride": "i32", "cos": "*fp32", "sin": "*fp32",
        "partners": "*i64", "out": "*fp32", "num_rows": "i32",
    }  # fmt: skip
    return Variant("_rotate", arguments, {"DIM": dim, "BLOCK_DIM": block_dim, "BLOCK": 2048 // block_dim}, num_warps=4)


def test_compiles_without_spills():
    pytest.importorskip("triton")
    usual = [variant(dtype, dim) for dtype in ("bf16", "fp16", "fp32") for dim in (64, 128)]
    require_fits(compile_all(MODULE, [*usual, variant("bf16", 80), variant("fp32", 3000), variant("bf16", 2)]))
