"""Observation windows against one naive softmax per row."""

from __future__ import annotations

import pytest
import torch

from kvshelf.kernels.window_scores import eager
from tests.kernels.references import window_scores as reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("group", "tokens", "rows"), [(2, 100, 8), (7, 63, 63), (1, 9, 1)])
def test_rows_of_the_document(dtype, group, tokens, rows):
    queries, keys = random(group, rows, 24, dtype=dtype), random(tokens, 24, dtype=dtype, seed=1)
    ours = eager.window_attention(queries, keys, 0.2)
    assert ours.shape == (group, rows, tokens)
    assert ours.dtype == torch.float32
    assert (ours - reference.window_attention(queries, keys, 0.2)).abs().max() < TOLERANCE[dtype]
    assert torch.allclose(ours.sum(dim=-1), torch.ones(group, rows), atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("group", "tokens", "rows", "own"), [(2, 100, 8, 8), (3, 63, 5, 40), (1, 9, 1, 1)])
def test_rows_of_a_probe_pass(dtype, group, tokens, rows, own):
    queries, keys = random(group, rows, 24, dtype=dtype), random(tokens, 24, dtype=dtype, seed=1)
    own_keys = random(own, 24, dtype=dtype, seed=2)
    ours = eager.window_attention(queries, keys, 0.2, own_keys)
    assert ours.shape == (group, rows, tokens)
    assert (ours - reference.window_attention(queries, keys, 0.2, own_keys)).abs().max() < TOLERANCE[dtype]
    # A row of the pass spends some of its attention on the pass itself.
    assert bool((ours.sum(dim=-1) < 1).all())
