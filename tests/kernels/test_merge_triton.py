"""The kernels of the merge: under the interpreter against the references, and compiled for GPUs that are not there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.kernels.merge import merge_weighted, nearest_pair
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import merge as reference
from tests.kernels.tensors import random
from tests.kernels.test_merge import DTYPES, SHAPES, axes, pairs, require_means, require_nearest

MODULE = "kvshelf.kernels.merge.triton"
few = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("token_counts", "center_counts", "dim", "value_dim"), [*SHAPES, ([40, 3], [40, 17], 40, 128)])
def test_nearest_pair(dtype, token_counts, center_counts, dim, value_dim):
    states = pairs(token_counts, center_counts, dim, value_dim, dtype)
    ours = nearest_pair(*states)
    require_nearest(ours, states)
    wider = [random(len(s), s.shape[1] + 3).to(dtype) for s in states[:4]]
    for wide, given_states in zip(wider, states[:4], strict=True):
        wide[:, : given_states.shape[1]] = given_states
    strided = [wide[:, : s.shape[1]] for wide, s in zip(wider, states[:4], strict=True)]
    for first, second in zip(ours, nearest_pair(*strided, *states[4:]), strict=True):
        assert torch.equal(first, second)


@pytest.mark.usefixtures("forced_triton")
def test_keys_may_be_wider_than_values():
    keys, values, center_keys, center_values, *counts = pairs([9], [4], 8, 8)
    states = keys, values.bfloat16(), center_keys, center_values.bfloat16(), *counts
    require_nearest(nearest_pair(*states), states)


@pytest.mark.usefixtures("forced_triton")
@few
@given(st.data())
def test_of_equal_centers_the_first_is_taken(data):
    """Vectors along the axes, so that similarities are exactly -1, 0 or 1 and nearly every choice is a tie."""
    keys, centers = (axes(data, longest) for longest in (12, 150))
    arguments = keys, keys, centers, centers, [len(keys)], [len(centers)]
    similarity, index = nearest_pair(*arguments)
    expected, first = reference.nearest_pair(*arguments)
    assert torch.equal(similarity.double(), expected)
    assert torch.equal(index, first)


@pytest.mark.usefixtures("forced_triton")
def test_of_equal_centers_in_several_blocks_the_first_is_taken():
    tokens, centers = torch.eye(2)[[0, 1, 0]], torch.eye(2).repeat(60, 1)
    assert nearest_pair(tokens, tokens, centers, centers, [3], [120])[1].tolist() == [0, 1, 0]


@pytest.mark.usefixtures("forced_triton")
def test_what_is_not_a_number_never_looks_like_a_similarity():
    keys, values, center_keys, *others = pairs([3, 2], [4, 2], 8, 8)
    center_keys[2, 5] = torch.nan
    values[4, 0] = torch.nan
    similarity, index = nearest_pair(keys, values, center_keys, *others)
    assert similarity.isnan().tolist() == [True] * 3 + [False, True]
    assert index.tolist()[:3] == [2] * 3


@pytest.mark.usefixtures("forced_triton")
def test_without_centers_or_tokens():
    similarity, index = nearest_pair(*pairs([3, 1], [0, 2], 8, 8))
    assert similarity.isinf().tolist() == [True] * 3 + [False]
    assert index.tolist()[:3] == [-1] * 3
    for none in (pairs([0, 0], [3, 0], 8, 8), pairs([], [], 8, 8)):
        similarity, index = nearest_pair(*none)
        assert similarity.shape == index.shape == (0,)


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_classes", "dim", "value_dim"), [(1, 16, 16), (7, 5, 24), (40, 64, 3), (3, 1, 130)])
def test_merge_weighted(dtype, num_classes, dim, value_dim):
    """Classes of many, one and no members; twice with the same bits."""
    generator = torch.Generator().manual_seed(num_classes)
    classes = torch.randint(num_classes, (50,), generator=generator) // 2 * 2
    weights = torch.rand(100, generator=generator)[::2] * 100 + 1e-3
    keys, values = random(50, dim + 2, dtype=dtype)[:, 1:-1], random(50, value_dim, dtype=dtype, seed=1)
    keys[7] = 0
    ours = merge_weighted(keys, values, weights, classes, num_classes)
    require_means(ours, reference.merge_weighted(keys, values, weights, classes, num_classes))
    for first, second in zip(ours, merge_weighted(keys, values, weights, classes, num_classes), strict=True):
        assert torch.equal(first, second)


@pytest.mark.usefixtures("forced_triton")
def test_merge_weighted_without_classes_or_members():
    none = torch.zeros(0, dtype=torch.int64)
    assert [len(r) for r in merge_weighted(random(0, 3), random(0, 5), random(0), none, 0)] == [0, 0]
    directions, means = merge_weighted(random(0, 3), random(0, 5), random(0), none, 2)
    assert torch.equal(directions, torch.zeros(2, 3))
    assert torch.equal(means, torch.zeros(2, 5))


def nearest(dtype, dim, block):
    """The launch of `nearest_pair` for states of that dtype."""
    states = ("keys", "values", "center_keys", "center_values")
    signature = {}
    for name in states:
        signature |= {name: f"*{dtype}", f"{name.removesuffix('s')}_stride": "i32"}
    signature |= dict.fromkeys(("token_ends", "center_ends", "index"), "*i64") | {"num_centers": "i32"}
    signature |= dict.fromkeys(("inverse", "similarity"), "*fp32")
    constants = dict.fromkeys(("DIM", "BLOCK_DIM", "VALUE_DIM", "BLOCK_VALUE_DIM"), dim)
    constants |= {"BLOCK": block, "CENTERS": max(16, block // 2), "UPCAST": False}
    return Variant("_nearest_pair", signature, constants)


def merging(dtype, dim):
    """The launch of `merge_weighted` for states of that dtype."""
    signature = dict.fromkeys(("keys", "values"), f"*{dtype}") | dict.fromkeys(("order", "ends"), "*i64")
    signature |= dict.fromkeys(("weights", "directions", "means"), "*fp32")
    signature |= dict.fromkeys(("key_stride", "value_stride", "weight_stride"), "i32")
    constants = dict.fromkeys(("DIM", "BLOCK_DIM", "VALUE_DIM", "BLOCK_VALUE_DIM"), dim) | {"MEMBERS": 8}
    return Variant("_merge_weighted", signature, constants, num_warps=max(1, 8 * dim // 1024))


def test_compile_without_spills(compile_all):
    """Without hints of alignment, so with more registers than a launch takes."""
    pytest.importorskip("triton")
    usual = [nearest("bf16", 128, 64), nearest("fp16", 64, 64), nearest("fp32", 128, 32)]
    require_fits(compile_all(MODULE, [*usual, merging("bf16", 128), merging("fp32", 64)]))
