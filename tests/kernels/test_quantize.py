"""Quantization against the fp64 reference, its error bound, and partial dequantization."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvshelf.kernels.quantize import Coded, dequantize, quantize
from tests.amounts import amount, pairwise
from tests.kernels.references import quantize as reference
from tests.kernels.tensors import random

BITS = [2, 3, 4, 8]
AXES = ["tokens", "channels"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

SMALLEST_BF16 = 2.0**-133
finite = st.floats(-(2.0**126), 2.0**126, width=32)


@st.composite
def rows(draw):
    """Rows of any shape, empty ones included: of few values (constant groups), of near and of far magnitudes."""
    num_rows, num_channels = draw(st.integers(0, 40)), draw(st.integers(1, 20))
    elements = draw(
        st.sampled_from(
            [
                finite,
                st.sampled_from([0.0, 1001.0, -7e-3]),
                st.floats(-4, 4, width=16),
                st.floats(1000, 1001, width=32),
            ]
        )
    )
    values = draw(st.lists(elements, min_size=num_rows * num_channels, max_size=num_rows * num_channels))
    return torch.tensor(values, dtype=torch.float32).view(num_rows, num_channels)


def per_element(scales, axis, group, shape):
    """The scale of each element's group."""
    repeated = scales.float().repeat_interleave(group, dim=0 if axis == "tokens" else 1)
    return repeated[: shape[0], : shape[1]]


@pytest.mark.parametrize("axis", AXES)
@settings(max_examples=amount(60, 150), deadline=None)
@given(x=rows(), bits=st.sampled_from(BITS), group=st.sampled_from([1, 3, 8, 16, 32]))
@example(x=torch.zeros(1, 4), bits=2, group=3)  # a single row, whose stride is that of its whole groups
def test_error_is_at_most_half_a_step(axis, x, bits, group):
    codes, scales, zeros = quantize(x, bits, group, axis)
    back = dequantize(Coded(codes, scales, zeros, bits, group, axis, x.shape[1], torch.float32))
    assert back.shape == x.shape
    assert not back.isnan().any()
    half = per_element(scales, axis, group, x.shape).double() / 2
    # 8-bit codes are up to 255 times the rounding of (x - zero) away from a tie; the sum itself rounds to 2^-24 of x;
    # a range below 255 of the least fp32, 2^-149, has a step that underflows to 0.
    bound = half * (1 + 2**-13) + 2**-23 * (x.double().abs() + 2 * half) + 2**-141
    assert ((back.double() - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("axis", AXES)
@settings(max_examples=amount(30, 60), deadline=None)
@given(x=rows(), bits=st.sampled_from(BITS), group=st.sampled_from([1, 8, 32]))
def test_equals_the_reference(axis, x, bits, group):
    """Scales within one bf16 step (fp32 and fp64 may fall on two sides of a bf16), and codes never far from a tie."""
    codes, scales, zeros = quantize(x, bits, group, axis)
    expected_codes, expected_scales, expected_zeros = reference.quantize(x, bits, group, axis)
    assert codes.shape == expected_codes.shape
    assert torch.equal(zeros, expected_zeros)
    assert scales.shape == expected_scales.shape
    assert torch.allclose(scales.double(), expected_scales.double(), rtol=2**-7, atol=SMALLEST_BF16)
    if torch.equal(scales, expected_scales):
        args = (bits, group, axis, x.shape[1])
        ours = reference.dequantize(codes, scales, zeros, *args)
        expected = reference.dequantize(expected_codes, scales, zeros, *args)
        # Codes differ only where x is on the tie of two.
        tie = (ours != expected) & ((ours + expected) / 2 - x.double()).abs().gt(
            2**-13 * per_element(scales, axis, group, x.shape).double()
        )
        assert not tie.any()


@pairwise(
    {
        "axis": AXES,
        "dtype": DTYPES,
        "bits": BITS,
        "num_rows, num_channels, group": [(64, 16, 32), (33, 7, 8), (1, 1, 8), (5, 33, 32)],
    }
)
def test_dequantized_is_the_reference_rounded_once(axis, dtype, bits, num_rows, num_channels, group):
    x = random(num_rows, num_channels, dtype=dtype)
    codes, scales, zeros = quantize(x, bits, group, axis)
    assert (codes.dtype, scales.dtype, zeros.dtype) == (torch.uint8, torch.bfloat16, torch.bfloat16)
    assert codes.shape == (num_rows, math.ceil(num_channels * bits / 8))
    groups = (math.ceil(num_rows / group), num_channels), (num_rows, math.ceil(num_channels / group))
    assert scales.shape == zeros.shape == groups[AXES.index(axis)]
    ours = dequantize(Coded(codes, scales, zeros, bits, group, axis, num_channels, dtype))
    expected = reference.dequantize(codes, scales, zeros, bits, group, axis, num_channels)
    assert ours.dtype == dtype
    if dtype == torch.float32:
        assert torch.equal(ours, expected.float())
    else:
        assert torch.equal(ours, expected.float().to(dtype))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=amount(20, 40), deadline=None)
@given(data=st.data())
def test_a_range_of_rows_equals_that_range_of_all_rows(axis, bits, data):
    num_rows, num_channels = data.draw(st.integers(0, 100)), data.draw(st.integers(1, 40))
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.none() | st.integers(start, num_rows))
    group = data.draw(st.sampled_from([1, 5, 8, 32]))
    stored = quantize(random(num_rows, num_channels), bits, group, axis)
    coded = Coded(*stored, bits, group, axis, num_channels, torch.bfloat16)
    assert torch.equal(dequantize(coded, start, stop), dequantize(coded)[start:stop])


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1001.0, -1001.0, 3.1415927, -1e-20, 65504.0])
def test_a_constant_group_is_closer_than_bf16(axis, bits, value):
    x = torch.full((9, 11), value)
    back = dequantize(Coded(*quantize(x, bits, 8, axis), bits, 8, axis, 11, torch.float32))
    gap = abs(value) * 2**-7  # between neighbouring bf16
    assert float((back - x).abs().max()) <= gap / (2**bits - 1)
    if torch.equal(x.bfloat16().float(), x):
        assert torch.equal(back, x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_channels", [1, 2, 3, 4, 5, 7, 8, 64])
def test_codes_lie_little_end_first_and_padding_is_zero(bits, num_channels):
    levels = 2**bits - 1
    x = torch.randint(levels + 1, (6, num_channels), generator=torch.Generator().manual_seed(0)).float()
    x[0], x[1] = 0, levels  # so that zero is 0 and step is 1: the codes are x
    codes, scales, zeros = quantize(x, bits, 8, "tokens")
    assert (scales == 1).all()
    assert (zeros == 0).all()
    assert torch.equal(codes, reference.pack(x.long(), bits))


def test_outlying_channels_do_not_disturb_the_others():
    x = random(64, 8)
    x[:, 3] *= 1000
    back = dequantize(Coded(*quantize(x, 8, 32, "tokens"), 8, 32, "tokens", 8, torch.float32))
    others = [c for c in range(8) if c != 3]
    assert float((back - x)[:, others].abs().max()) < 0.02


@pytest.mark.parametrize("axis", AXES)
def test_strided_input_is_not_changed(axis):
    x = random(8, 40).T  # [40, 8], as a transposed view
    before = x.clone()
    for ours, expected in zip(quantize(x, 4, 16, axis), quantize(x.contiguous(), 4, 16, axis), strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(x, before)
