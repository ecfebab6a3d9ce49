"""LagKV's kernel: under the interpreter against the reference, and compiled for GPUs that are not there."""

from __future__ import annotations

import pytest
import torch

from kvshelf.kernels.lag_scores import lag_scores
from tests.amounts import pairwise
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import lag_scores as reference
from tests.kernels.tensors import error
from tests.kernels.test_lag_scores import DTYPES, states

MODULE = "kvshelf.kernels.lag_scores.triton"
SHAPES = [(2, 3, 16, 24, 24), (1, 2, 2, 3, 2), (2, 3, 127, 8, 9), (1, 2, 300, 24, 17), (2, 2, 130, 2, 72)]


@pytest.mark.usefixtures("forced_triton")
@pairwise(
    {
        "own_scale": [False, True],
        "value_weight": [1.0, 0.0, 2.5],
        "dtype": DTYPES,
        "heads, partitions, lag, dim, value_dim": SHAPES,
    }
)
def test_equals_the_reference(dtype, own_scale, value_weight, heads, partitions, lag, dim, value_dim):
    tokens = partitions * lag
    keys = states(heads, tokens + 3, dim, dtype)[:, 3:]
    values = states(heads, tokens + 3, value_dim, dtype, seed=1)[:, 3:]
    how = {"own_scale": own_scale, "value_weight": value_weight}
    ours = lag_scores(keys, values, lag, **how)
    assert error(ours, reference.lag_scores(keys, values, lag, **how)) < 1e-5
    assert torch.equal(ours, lag_scores(keys.contiguous(), values.contiguous(), lag, **how))


@pytest.mark.usefixtures("forced_triton")
def test_long_partitions_put_their_channels_together():
    """A tile of 8 channels of 1100 tokens: 13 parts, the last of one channel."""
    keys, values = states(1, 2200, 97), states(1, 2200, 97, seed=1) * 100 + 1000
    assert error(lag_scores(keys, values, 1100), reference.lag_scores(keys, values, 1100, False, 1.0)) < 1e-5


@pytest.mark.usefixtures("forced_triton")
def test_a_channel_that_is_constant_over_the_scale_is_finite():
    keys, values = states(1, 24, 4), states(1, 24, 4, seed=1)
    keys[..., 2] = 1.5
    values[:, 8:16, 1] = -3.0
    for own_scale in (False, True):
        ours = lag_scores(keys, values, 8, own_scale=own_scale)
        assert error(ours, reference.lag_scores(keys, values, 8, own_scale, 1.0)) < 1e-5


@pytest.mark.usefixtures("forced_triton")
def test_what_is_not_a_number_never_looks_like_a_score():
    """In a scale alone too: the last partition is not judged."""
    keys, values = states(2, 24, 4), states(2, 24, 4, seed=1)
    values[1, 19, 3] = torch.nan
    assert lag_scores(keys, values, 8).isnan().all(dim=2).tolist() == [[False, False], [False, True]]
    keys[0, 9, 0] = torch.nan
    assert lag_scores(keys, values, 8, own_scale=True).isnan().all(dim=2).tolist() == [[False, True], [False, False]]


@pytest.mark.usefixtures("forced_triton")
def test_one_partition_has_nothing_to_judge():
    assert lag_scores(states(2, 8, 4), states(2, 8, 4), 8).shape == (2, 0, 8)


def variant(dtype, lag, dim, *, own_scale=False):
    """The launch of `lag_scores` for states of that dtype."""
    block_lag = 1 << (lag - 1).bit_length()
    channels = max(8, 4096 // block_lag)
    pointers = dict.fromkeys(("keys", "values"), f"*{dtype}") | {"scores": "*fp32"}
    strides = dict.fromkeys(("key_head_stride", "key_stride", "value_head_stride", "value_stride"), "i32")
    strides |= {"value_weight": "fp32"}
    constants = {"LAG": lag, "BLOCK_LAG": block_lag, "OWN_SCALE": own_scale, "DIM": dim, "VALUE_DIM": dim}
    constants |= dict.fromkeys(("BLOCK_DIM", "BLOCK_VALUE_DIM"), min(channels, 1 << (dim - 1).bit_length()))
    return Variant("_lag_scores", pointers | strides, constants, num_warps=min(16, block_lag * channels // 512))


def test_compiles_without_spills(compile_all):
    """Without hints of alignment, so with more registers than a launch takes."""
    pytest.importorskip("triton")
    usual = [variant("bf16", 128, 128), variant("fp16", 128, 64), variant("fp32", 128, 128)]
    odd = [variant("bf16", 500, 96), variant("bf16", 128, 128, own_scale=True)]
    require_fits(compile_all(MODULE, [*usual, *odd]))
