"""Rotations: both forms of a CPU against the fp64 reference, in every layout of states and planes, and what is
refused."""

from __future__ import annotations

import math

import pytest
import torch

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.rotate import rotate
from tests.kernels.references import rotate as reference
from tests.kernels.tensors import random
from tests.kernels.test_row_norms import DTYPES, layouts

SHAPES = [(1, 1, 2), (2, 5, 6), (2, 9, 16), (3, 300, 24), (1, 33, 66), (2, 520, 64), (2, 5, 80), (1, 7, 320)]


def planes(dim):
    """The layouts that models have, and any other: which channel goes with each."""
    channels = torch.arange(dim)
    part = dim // 4 * 2  # of a head that is rotated in part
    return {
        "halves": channels.roll(dim // 2),
        "pairs": channels ^ 1,
        "a part in halves": torch.cat([channels[:part].roll(part // 2), channels[part:]]),
        "any": torch.randperm(dim, generator=torch.Generator().manual_seed(dim)),
    }


def tables(rows, dim):
    angles = random(rows, dim, seed=3) * 3
    return angles.cos(), angles.sin()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_equals_the_reference_in_every_layout(dtype, heads, rows, dim):
    states_of, (cos, sin) = layouts(heads, rows, dim, dtype), tables(rows, dim)
    for kind, partners in planes(dim).items():
        expected = reference.rotate(states_of["head-major"], cos, sin, partners)
        for layout, states in states_of.items():
            before = states.clone()
            ours = rotate(states, cos, sin, partners)
            assert (ours.dtype, ours.shape) == (torch.float32, states.shape)
            assert float((ours - expected).abs().max()) < 2e-6 * float(expected.abs().max()), (kind, layout)
            assert torch.equal(states, before)


def test_tables_may_be_views():
    states, (cos, sin), partners = random(2, 5, 32), tables(1, 32), planes(32)["halves"]
    ours = rotate(states, cos.expand(5, -1), sin.expand(5, -1), partners)
    assert torch.equal(ours, rotate(states, cos.repeat(5, 1), sin.repeat(5, 1), partners))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_own_plane(dtype, bad):
    states, (cos, sin) = random(2, 4, 32, dtype=dtype), tables(4, 32)
    states[1, 2, 3] = bad
    for kind, partners in planes(32).items():
        wrong = (~rotate(states, cos, sin, partners).isfinite()).nonzero().tolist()
        reading = [c for c, partner in enumerate(partners.tolist()) if 3 in (c, partner)]
        assert wrong == [[1, 2, channel] for channel in reading], kind


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_turn(shape):
    cos, sin = tables(*shape[1:])
    ours = rotate(torch.empty(shape, dtype=torch.bfloat16), cos, sin, torch.arange(shape[2]))
    assert ours.dtype == torch.float32
    assert ours.shape == shape


@pytest.mark.parametrize("partner", [-17, 16, 1 << 40])
def test_a_partner_outside_the_head_is_refused(partner):
    partners = torch.arange(16)
    partners[5] = partner
    with pytest.raises((IndexError, RuntimeError)):
        rotate(random(1, 3, 16), *tables(3, 16), partners)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"states": random(24, 4)}, r"3 dimensions; given states \[24, 4\] float32"),
        ({"states": random(2, 24, 4).double()}, r"float16; given states \[2, 24, 4\] float64"),
        ({"cos": random(4, 24)}, r"\[N, D\] float32.*cos \[4, 24\] float32"),
        ({"sin": random(24, 4).bfloat16()}, r"\[N, D\] float32.*sin \[24, 4\] bfloat16"),
        ({"partners": torch.arange(3)}, r"partners \[D\] int64.*partners \[3\] int64"),
        ({"partners": torch.arange(4).int()}, r"partners \[D\] int64.*partners \[4\] int32"),
    ],
)
def test_refuses_what_does_not_fit(change, shown):
    arguments = {"states": random(2, 24, 4), "cos": random(24, 4), "sin": random(24, 4), "partners": torch.arange(4)}
    with pytest.raises(InvalidTensor, match=f"rotate: .*{shown}"):
        rotate(**arguments | change)
