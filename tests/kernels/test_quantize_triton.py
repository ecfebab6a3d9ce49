"""Triton's quantization: bit by bit that of the CPU under the interpreter, and compiled for GPUs that are not there."""

from __future__ import annotations

import pytest
import torch

from kvshelf.kernels.quantize import Coded, dequantize, eager, quantize
from tests.amounts import pairwise
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.tensors import random

pytestmark = pytest.mark.usefixtures("forced_triton")

BITS = [2, 3, 4, 8]
AXES = ["tokens", "channels"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(64, 16, 32), (33, 7, 8), (1, 1, 8), (5, 33, 32), (40, 40, 12), (70, 128, 64)]


def states(num_rows, num_channels, dtype):
    """Rows with a constant channel, one of a tiny range, and both zeros."""
    x = random(num_rows, num_channels, dtype=dtype) * 3
    x[:, 0] = 1001.0
    x[:, -1] *= 1e-5
    x[0, num_channels // 2] = -0.0
    return x


@pairwise({"axis": AXES, "bits": BITS, "dtype": DTYPES})
def test_codes_scales_and_zeros_are_those_of_the_cpu(axis, bits, dtype):
    for num_rows, num_channels, group in SIZES:
        x = states(num_rows, num_channels, dtype)
        ours = quantize(x, bits, group, axis)
        for mine, theirs in zip(ours, eager.quantize(x, bits, group, axis), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pairwise({"axis": AXES, "bits": BITS, "dtype": DTYPES})
def test_dequantized_is_that_of_the_cpu(axis, bits, dtype):
    for num_rows, num_channels, group in SIZES:
        stored = eager.quantize(states(num_rows, num_channels, torch.float32), bits, group, axis)
        rows = (num_rows // 3, num_rows - num_rows // 4)  # not on the edges of groups
        coded = Coded(*stored, bits, group, axis, num_channels, dtype)
        ours, theirs = dequantize(coded, *rows), eager.dequantize(coded, *rows)
        assert ours.dtype == dtype
        if dtype == torch.bfloat16:  # the interpreter cuts fp32 to bf16, where a GPU rounds
            assert torch.allclose(ours.float(), theirs.float(), rtol=2**-7, atol=0)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("axis", AXES)
def test_strides_two_runs_and_no_rows(axis):
    x = random(40, 70).T[::2]  # every other row of a transposed view
    ours = quantize(x, 4, 16, axis)
    for mine, again, theirs in zip(ours, quantize(x, 4, 16, axis), eager.quantize(x, 4, 16, axis), strict=True):
        assert torch.equal(mine, again)
        assert torch.equal(mine, theirs)
    nothing = quantize(random(0, 8), 4, 8, axis)
    assert [len(part) for part in nothing] == [0, 0, 0]
    assert dequantize(Coded(*nothing, 4, 8, axis, 8, torch.float32)).shape == (0, 8)


def test_groups_within_a_byte_are_left_to_torch():
    x = random(9, 10)
    for mine, theirs in zip(quantize(x, 2, 1, "channels"), eager.quantize(x, 2, 1, "channels"), strict=True):
        assert torch.equal(mine, theirs)


def test_every_kernel_compiles_and_fits(compile_all):
    variants = [variant for dtype in ("bf16", "fp16", "fp32") for variant in _variants(dtype, 4)]
    variants += [_variants("bf16", bits)[1] for bits in (2, 8)]
    long = {"BITS": 4, "ROWS": 1024, "CHANNELS": 16}
    variants.append(Variant("_quantize_tokens", _QUANTIZE | {"num_rows": "i32", "x": "*bf16"}, long, num_warps=16))
    require_fits(compile_all("kvshelf.kernels.quantize.triton", variants))


_STORED = {"codes": "*u8", "scales": "*bf16", "zeros": "*bf16"}
_QUANTIZE = _STORED | dict.fromkeys(("num_channels", "row_stride", "stride", "row_bytes", "group"), "i32")
_STRIDES = ("codes_stride", "scales_stride", "zeros_stride")
_DEQUANTIZE = _STORED | dict.fromkeys(
    ("start", "stop", "num_channels", *_STRIDES, "group_rows", "group_channels"), "i32"
)


def _variants(dtype: str, bits: int) -> list[Variant]:
    """Llama's rows of 128 channels in groups of 32."""
    by_rows = _QUANTIZE | {"x": f"*{dtype}", "num_rows": "i32"}
    by_channels = _QUANTIZE | {"x": f"*{dtype}", "total": "i32", "num_groups": "i32"}
    back = {"BITS": bits, "ROWS": 16, "BYTES": 16 * bits}
    return [
        Variant("_quantize_tokens", by_rows, {"BITS": bits, "ROWS": 32, "CHANNELS": 64}),
        Variant("_quantize_channels", by_channels, {"BITS": bits, "GROUPS": 64, "CHANNELS": 32}),
        Variant("_dequantize", _DEQUANTIZE | {"out": f"*{dtype}"}, back),
    ]
