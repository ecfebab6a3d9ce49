"""LagKV's scores: the eager form against the fp64 reference, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.lag_scores import eager, lag_scores
from tests.kernels.references import lag_scores as reference
from tests.kernels.tensors import error, random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states(heads, tokens, dim, dtype=torch.float32, seed=0):
    """`[heads, tokens, dim]` in token-major memory, as models give it."""
    return random(tokens, heads, dim, dtype=dtype, seed=seed).transpose(0, 1)


@pytest.mark.parametrize(("own_scale", "value_weight"), [(False, 1.0), (True, 1.0), (False, 0.0), (True, 2.5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "partitions", "lag", "dim", "value_dim"),
    [(2, 5, 16, 24, 24), (1, 2, 2, 3, 2), (3, 3, 127, 8, 9), (2, 9, 300, 64, 32)],
)
def test_equals_the_reference(dtype, own_scale, value_weight, heads, partitions, lag, dim, value_dim):
    keys = states(heads, partitions * lag, dim, dtype)
    values = states(heads, partitions * lag, value_dim, dtype, seed=1)
    before = keys.clone()
    ours = lag_scores(keys, values, lag, own_scale=own_scale, value_weight=value_weight)
    assert (ours.dtype, ours.shape) == (torch.float32, (heads, partitions - 1, lag))
    assert error(ours, reference.lag_scores(keys, values, lag, own_scale, value_weight)) < 1e-5
    assert torch.equal(keys, before)


def test_a_partition_is_judged_alike_alone_and_in_a_document_of_many_blocks():
    keys, values = states(2, 64 * 128, 64), states(2, 64 * 128, 64, seed=1)
    assert keys.numel() > 4 * eager._BLOCK
    ours = lag_scores(keys, values, 128)
    for partition in (0, 7, 8, 30, 62):
        two = slice(partition * 128, (partition + 2) * 128)
        assert torch.equal(ours[:, partition : partition + 1], lag_scores(keys[:, two], values[:, two], 128))


def test_a_channel_that_is_constant_over_the_scale_is_finite():
    keys, values = states(1, 24, 4), states(1, 24, 4, seed=1)
    keys[..., 2] = 1.5
    values[:, 8:16, 1] = -3.0
    for own_scale in (False, True):
        ours = lag_scores(keys, values, 8, own_scale=own_scale)
        assert error(ours, reference.lag_scores(keys, values, 8, own_scale, 1.0)) < 1e-5


def test_what_is_not_a_number_never_looks_like_a_score():
    """In the values of the middle partition of three: its own scores, and those of the one it is the scale of."""
    keys, values = states(2, 24, 4), states(2, 24, 4, seed=1)
    values[1, 9, 3] = torch.nan
    assert lag_scores(keys, values, 8).isnan().all(dim=2).tolist() == [[False, False], [True, True]]
    assert lag_scores(keys, values, 8, own_scale=True).isnan().all(dim=2).tolist() == [[False, False], [False, True]]


def test_one_partition_has_nothing_to_judge():
    assert lag_scores(states(2, 8, 4), states(2, 8, 4), 8).shape == (2, 0, 8)


@pytest.mark.parametrize(
    ("keys", "values", "lag"),
    [
        (random(2, 24, 4), random(2, 24, 4), 7),
        (random(2, 24, 4), random(2, 24, 4), 1),
        (random(2, 24, 4), random(2, 24, 4), 48),
        (random(2, 24, 4), random(2, 16, 4), 8),
        (random(2, 24, 4), random(2, 24, 1), 8),
        (random(2, 24, 4), random(2, 24, 4, dtype=torch.bfloat16), 8),
        (random(2, 24, 4).int(), random(2, 24, 4).int(), 8),
        (random(24, 4), random(24, 4), 8),
        (random(2, 4, 24).transpose(1, 2), random(2, 24, 4), 8),
    ],
)
def test_refuses_what_does_not_fit(keys, values, lag):
    with pytest.raises(InvalidTensor, match=r"lag_scores: .*given keys \["):
        lag_scores(keys, values, lag)
