"""Nearest centers and weighted means against their fp64 references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.kernels.merge import merge_weighted, nearest_pair, reference
from tests.kernels.tensors import LargestTensor, error, random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pairs(num_tokens, num_centers, dim, value_dim, dtype=torch.float32):
    """keys, values, center_keys, center_values."""
    shapes = (num_tokens, dim), (num_tokens, value_dim), (num_centers, dim), (num_centers, value_dim)
    return tuple(random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_centers", "dim", "value_dim"),
    [(33, 17, 16, 16), (1, 1, 1, 1), (7, 40, 5, 24), (40, 1, 8, 8), (3, 2, 64, 3)],
)
def test_nearest_pair(dtype, num_tokens, num_centers, dim, value_dim):
    states = pairs(num_tokens, num_centers, dim, value_dim, dtype)
    similarity, index = nearest_pair(*states)
    expected = reference.similarities(*states)
    assert (similarity.dtype, index.dtype) == (torch.float32, torch.int64)
    assert error(similarity, expected.amax(dim=1)) < 2e-6
    chosen = expected.gather(1, index.unsqueeze(1)).squeeze(1)
    assert error(chosen, expected.amax(dim=1)) < 2e-6  # another one only where fp32 cannot tell them apart


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_of_equal_centers_the_first_is_taken(data):
    """Vectors along the axes, so that similarities are exactly -1, 0 or 1 and nearly every choice is a tie."""
    rows = st.lists(st.tuples(*[st.integers(-1, 1)] * 2), min_size=1, max_size=12)
    keys, centers = (torch.tensor(data.draw(rows), dtype=torch.float32) for _ in range(2))
    keys, centers = (states * (states != 0).float().cumsum(1).eq(1) for states in (keys, centers))
    similarity, index = nearest_pair(keys, keys, centers, centers)
    expected = reference.similarities(keys, keys, centers, centers)
    assert torch.equal(similarity.double(), expected.amax(dim=1))
    assert index.tolist() == [row.index(max(row)) for row in expected.tolist()]


def test_blocks_bound_the_memory_and_change_nothing():
    states = pairs(600, 4000, 4, 4)
    with LargestTensor() as largest:
        similarity, index = nearest_pair(*states)
    assert 0 < largest.numel <= 1 << 20  # 2.4 Mi pairs
    whole = torch.cosine_similarity(states[0][:, None], states[2][None], dim=2)
    whole *= torch.cosine_similarity(states[1][:, None], states[3][None], dim=2)
    assert error(similarity, whole.amax(dim=1)) < 2e-6
    assert torch.allclose(whole.gather(1, index.unsqueeze(1)).squeeze(1), similarity, atol=2e-6)


def test_a_copy_has_similarity_one_whatever_its_length():
    keys, values, center_keys, center_values = pairs(5, 9, 16, 16)
    keys[:], values[:] = center_keys[[8, 0, 3, 3, 1]] * 7, center_values[[8, 0, 3, 3, 1]] * 0.01
    similarity, index = nearest_pair(keys, values, center_keys, center_values)
    assert index.tolist() == [8, 0, 3, 3, 1]
    assert torch.allclose(similarity, torch.ones(5), atol=1e-6)


def test_a_vector_of_zeros_resembles_nothing():
    keys, values, center_keys, center_values = pairs(3, 4, 8, 8)
    keys[1] = 0
    similarity, index = nearest_pair(keys, values, center_keys, center_values)
    assert (float(similarity[1]), int(index[1])) == (0.0, 0)


def test_without_centers_or_tokens():
    similarity, index = nearest_pair(*pairs(3, 0, 8, 8))
    assert similarity.tolist() == [-torch.inf] * 3
    assert index.tolist() == [-1] * 3
    similarity, index = nearest_pair(*pairs(0, 3, 8, 8))
    assert similarity.shape == index.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_merge_weighted(dtype, data):
    num_classes = data.draw(st.integers(1, 8))
    classes = torch.tensor(data.draw(st.lists(st.integers(0, num_classes - 1), max_size=30)), dtype=torch.int64)
    weights = torch.rand(len(classes), generator=torch.Generator().manual_seed(3)) * 100 + 1e-3
    states = random(len(classes), 7, dtype=dtype)
    ours = merge_weighted(states, weights, classes, num_classes)
    assert ours.dtype == torch.float32
    expected = reference.merge_weighted(states, weights, classes, num_classes)
    assert torch.allclose(ours.double(), expected, rtol=1e-6, atol=2e-6)


def test_a_mean_of_equals_is_that_and_an_empty_class_is_zero():
    states = random(1, 6).expand(5, -1)
    ours = merge_weighted(states, torch.tensor([1e-30, 2e-30, 5.0, 1e4, 3.0]), torch.tensor([0, 0, 2, 2, 2]), 4)
    assert torch.allclose(ours[[0, 2]], states[:2], rtol=1e-6)
    assert torch.equal(ours[[1, 3]], torch.zeros(2, 6))


def test_bf16_states_are_summed_in_fp32():
    """4000 equal addends: a bf16 sum stops growing at 256 of them."""
    states = torch.full((4000, 2), 3.0, dtype=torch.bfloat16)
    ours = merge_weighted(states, torch.ones(4000), torch.zeros(4000, dtype=torch.int64), 1)
    assert torch.equal(ours, torch.full((1, 2), 3.0))
