"""Cosines with the mean direction: both forms of a CPU against the fp64 reference, in every layout, and what is
refused."""

from __future__ import annotations

import math

import pytest
import torch

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.mean_cosines import mean_cosines
from tests.kernels.references import mean_cosines as reference
from tests.kernels.tensors import random
from tests.kernels.test_row_norms import DTYPES, layouts

SHAPES = [(1, 1, 1), (2, 5, 3), (3, 7, 15), (2, 9, 16), (3, 300, 24), (1, 33, 65), (2, 520, 64), (4, 11, 1100)]


def largest_error(ours, expected):
    assert (ours.dtype, ours.shape) == (torch.float32, expected.shape)
    return float((ours - expected).abs().max())


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_equals_the_reference_in_every_layout(dtype, heads, rows, dim):
    states_of = layouts(heads, rows, dim, dtype)
    expected = reference.mean_cosines(states_of["head-major"])
    for layout, states in states_of.items():
        before = states.clone()
        assert largest_error(mean_cosines(states), expected) < 2e-6, layout
        assert torch.equal(states, before)


def test_the_number_of_threads_changes_no_bit():
    states, before, cosines = random(3, 1100, 64), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            cosines.append(mean_cosines(states))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(cosines[0], other) for other in cosines[1:])


def test_lengths_do_not_count():
    """Rows on one line have cosine 1 or -1, whatever their lengths, and the long ones draw the mean no more."""
    states = torch.tensor([1.0, 1e-6, 1e6, -1.0])[None, :, None] * random(1, 1, 40)
    assert mean_cosines(states)[0].tolist() == pytest.approx([1, 1, 1, -1], abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_zeros_is_like_nothing(dtype):
    states = random(2, 6, 20, dtype=dtype)
    expected = mean_cosines(torch.cat([states[:, :2], states[:, 3:]], dim=1))
    states[:, 2] = 0
    ours = mean_cosines(states)
    assert ours[:, 2].tolist() == [0, 0]
    assert largest_error(torch.cat([ours[:, :2], ours[:, 3:]], dim=1), expected) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [3, 16, 40])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_own_head(dtype, dim, bad):
    for channel in range(dim):
        states = random(2, 4, dim, dtype=dtype)
        states[1, 2, channel] = bad
        ours = mean_cosines(states)
        assert ours[1].isnan().all()
        assert ours[0].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_compare(shape):
    ours = mean_cosines(torch.empty(shape, dtype=torch.bfloat16))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, torch.zeros(shape[:2]))


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (random(24, 4), r"3 dimensions; given states \[24, 4\] float32"),
        (random(2, 24, 4).double(), r"float16; given states \[2, 24, 4\] float64"),
        (random(2, 4, 24).transpose(1, 2), r"contiguous.*; given states \[2, 24, 4\] float32 strides \[96, 1, 24\]"),
    ],
)
def test_refuses_what_does_not_fit(states, shown):
    with pytest.raises(InvalidTensor, match=f"mean_cosines: .*{shown}"):
        mean_cosines(states)
