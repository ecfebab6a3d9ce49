"""Nearest centers and weighted means: the eager forms against their fp64 references, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.merge import eager, merge_weighted, nearest_pair
from tests.kernels.references import merge as reference
from tests.kernels.tensors import LargestTensor, error, random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pairs(token_counts, center_counts, dim, value_dim, dtype=torch.float32):
    """The arguments of `nearest_pair`."""
    num_tokens, num_centers = sum(token_counts), sum(center_counts)
    shapes = (num_tokens, dim), (num_tokens, value_dim), (num_centers, dim), (num_centers, value_dim)
    states = [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    return *states, token_counts, center_counts


def require_nearest(ours, states):
    """The right similarity, and a center of that similarity: another one only where fp32 cannot tell them apart."""
    similarity, index = ours
    expected, _ = reference.nearest_pair(*states)
    assert (similarity.dtype, index.dtype) == (torch.float32, torch.int64)
    assert error(similarity, expected) < 2e-6
    firsts = [0]
    for count in states[5]:
        firsts.append(firsts[-1] + count)
    heads = torch.repeat_interleave(torch.arange(len(states[4])), torch.tensor(states[4]))
    for i, (j, head) in enumerate(zip(index.tolist(), heads.tolist(), strict=True)):
        assert firsts[head] <= j < firsts[head + 1]
        own = reference.cosine(states[0][i], states[2][j]) * reference.cosine(states[1][i], states[3][j])
        assert abs(own - float(expected[i])) < 2e-6


SHAPES = [
    ([33, 7], [17, 5], 16, 16),
    ([1], [1], 1, 1),
    ([7, 0, 9], [40, 3, 130], 5, 24),
    ([40], [1], 8, 8),
    ([3, 30, 2, 1], [2, 1, 64, 65], 64, 3),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("token_counts", "center_counts", "dim", "value_dim"), SHAPES)
def test_nearest_pair(dtype, token_counts, center_counts, dim, value_dim):
    states = pairs(token_counts, center_counts, dim, value_dim, dtype)
    require_nearest(nearest_pair(*states), states)


def test_keys_may_be_wider_than_values():
    """Unrotated keys are fp32 beside bf16 values."""
    keys, values, center_keys, center_values, *counts = pairs([9], [4], 8, 8)
    states = keys, values.bfloat16(), center_keys, center_values.bfloat16(), *counts
    require_nearest(nearest_pair(*states), states)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_of_equal_centers_the_first_is_taken(data):
    """Vectors along the axes, so that similarities are exactly -1, 0 or 1 and nearly every choice is a tie."""
    keys, centers = (axes(data, longest) for longest in (12, 150))
    arguments = keys, keys, centers, centers, [len(keys)], [len(centers)]
    similarity, index = nearest_pair(*arguments)
    expected, first = reference.nearest_pair(*arguments)
    assert torch.equal(similarity.double(), expected)
    assert torch.equal(index, first)


def axes(data, longest):
    rows = data.draw(st.lists(st.tuples(*[st.integers(-1, 1)] * 2), min_size=1, max_size=longest))
    states = torch.tensor(rows, dtype=torch.float32)
    return states * (states != 0).float().cumsum(1).eq(1)


def test_blocks_bound_the_memory_and_change_nothing():
    states = pairs([600], [4000], 4, 4)
    with LargestTensor() as largest:
        similarity, index = nearest_pair(*states)
    assert 0 < largest.numel <= eager._PAIRS_PER_BLOCK + 4000  # 2.4 Mi pairs
    whole = torch.cosine_similarity(states[0][:, None], states[2][None], dim=2)
    whole *= torch.cosine_similarity(states[1][:, None], states[3][None], dim=2)
    assert error(similarity, whole.amax(dim=1)) < 2e-6
    assert torch.allclose(whole.gather(1, index.unsqueeze(1)).squeeze(1), similarity, atol=2e-6)


def test_a_copy_has_similarity_one_whatever_its_length():
    keys, values, center_keys, center_values, *counts = pairs([5], [9], 16, 16)
    keys[:], values[:] = center_keys[[8, 0, 3, 3, 1]] * 7, center_values[[8, 0, 3, 3, 1]] * 0.01
    similarity, index = nearest_pair(keys, values, center_keys, center_values, *counts)
    assert index.tolist() == [8, 0, 3, 3, 1]
    assert torch.allclose(similarity, torch.ones(5), atol=1e-6)


def test_a_vector_of_zeros_resembles_nothing():
    keys, *others = pairs([3], [4], 8, 8)
    keys[1] = 0
    similarity, index = nearest_pair(keys, *others)
    assert (float(similarity[1]), int(index[1])) == (0.0, 0)


def test_what_is_not_a_number_never_looks_like_a_similarity():
    keys, values, center_keys, *others = pairs([3, 2], [4, 2], 8, 8)
    center_keys[2, 5] = torch.nan
    values[4, 0] = torch.nan
    similarity, index = nearest_pair(keys, values, center_keys, *others)
    assert similarity.isnan().tolist() == [True] * 3 + [False, True]
    assert index.tolist()[:3] == [2] * 3


def test_without_centers_or_tokens():
    similarity, index = nearest_pair(*pairs([3, 1], [0, 2], 8, 8))
    assert similarity.isinf().tolist() == [True] * 3 + [False]
    assert index.tolist()[:3] == [-1] * 3
    assert 0 <= int(index[3]) < 2
    for none in (pairs([0, 0], [3, 0], 8, 8), pairs([], [], 8, 8)):
        similarity, index = nearest_pair(*none)
        assert similarity.shape == index.shape == (0,)


@pytest.mark.parametrize("change", [{0: random(3, 9)}, {1: random(2, 8)}, {4: [2]}, {5: [2, 3]}, {2: random(8, 4).T}])
def test_nearest_pair_refuses_what_does_not_fit(change):
    arguments = dict(enumerate(pairs([3], [4], 8, 8))) | change
    with pytest.raises(InvalidTensor, match=r"nearest_pair: .*given "):
        nearest_pair(*arguments.values())


def members(data, num_classes, dtype, most=30):
    """The arguments of `merge_weighted`."""
    classes = torch.tensor(data.draw(st.lists(st.integers(0, num_classes - 1), max_size=most)), dtype=torch.int64)
    weights = torch.rand(len(classes), generator=torch.Generator().manual_seed(3)) * 100 + 1e-3
    states = random(len(classes), 7, dtype=dtype), random(len(classes), 12, dtype=dtype, seed=1)
    return *states, weights, classes, num_classes


def require_means(ours, expected):
    for own, theirs in zip(ours, expected, strict=True):
        assert own.dtype == torch.float32
        assert torch.allclose(own.double(), theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_merge_weighted(dtype, data):
    arguments = members(data, data.draw(st.integers(1, 8)), dtype)
    require_means(merge_weighted(*arguments), reference.merge_weighted(*arguments))


def test_a_mean_of_equals_is_that_and_an_empty_class_is_zero():
    states = random(1, 6).expand(5, -1)
    weights = torch.tensor([1e-30, 2e-30, 5.0, 1e4, 3.0])
    directions, means = merge_weighted(states * 40, states, weights, torch.tensor([0, 0, 2, 2, 2]), 4)
    assert torch.allclose(means[[0, 2]], states[:2], rtol=1e-6)
    assert torch.allclose(directions[[0, 2]], states[:2] / states[0].norm(), rtol=1e-6)
    for result in (directions, means):
        assert torch.equal(result[[1, 3]], torch.zeros(2, 6))


def test_a_key_of_zeros_has_no_direction():
    keys = torch.tensor([[0.0, 0.0], [0.0, 5.0]])
    directions, _ = merge_weighted(keys, keys, torch.ones(2), torch.tensor([0, 0]), 1)
    assert torch.equal(directions, torch.tensor([[0.0, 0.5]]))


def test_bf16_states_are_summed_in_fp32():
    """4000 equal addends: a bf16 sum stops growing at 256 of them."""
    states = torch.full((4000, 1), 3.0, dtype=torch.bfloat16)
    directions, means = merge_weighted(states, states, torch.ones(4000), torch.zeros(4000, dtype=torch.int64), 1)
    assert (float(directions), float(means)) == (1.0, 3.0)


def test_merge_weighted_without_classes():
    none = torch.zeros(0, dtype=torch.int64)
    directions, means = merge_weighted(random(0, 3), random(0, 5), random(0), none, 0)
    assert (directions.shape, means.shape) == ((0, 3), (0, 5))


@pytest.mark.parametrize(
    "change",
    [{0: random(3, 9).T}, {1: random(2, 8)}, {2: random(4)}, {2: random(3).double()}, {3: torch.zeros(3)}, {4: -1}],
)
def test_merge_weighted_refuses_what_does_not_fit(change):
    arguments = {0: random(3, 8), 1: random(3, 8), 2: random(3), 3: torch.zeros(3, dtype=torch.int64), 4: 2} | change
    with pytest.raises(InvalidTensor, match=r"merge_weighted: .*given "):
        merge_weighted(*arguments.values())
