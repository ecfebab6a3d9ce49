"""Each operation in use against its naive reference: odd sizes, GQA groups, dtypes, poisoned uninitialised memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.kernels.lag_scores import eager as lag_eager
from kvshelf.kernels.lag_scores import reference as lag_reference
from kvshelf.kernels.select import eager as select_eager
from kvshelf.kernels.select import reference as select_reference
from tests.kernels.tensors import error, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "partitions", "lag", "dim"), [(2, 5, 16, 24), (1, 2, 2, 3), (3, 3, 127, 8)])
def test_lag_scores(dtype, heads, partitions, lag, dim):
    states = random(heads, partitions, lag, dim, dtype=dtype)
    before = states.clone()
    for scale in (states.roll(-1, dims=1), states):  # the next partition's, its own
        ours = lag_eager.lag_scores(states, scale)
        assert error(ours, lag_reference.lag_scores(states, scale)) < 1e-5
    assert torch.equal(states, before)


def test_lag_scores_of_a_constant_channel_are_finite():
    states = random(1, 3, 8, 4)
    states[..., 2] = 1.5
    ours = lag_eager.lag_scores(states[:, :-1], states[:, 1:])
    assert error(ours, lag_reference.lag_scores(states[:, :-1], states[:, 1:])) < 1e-5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_select_and_gather(data):
    """Small integer scores, so that nearly every choice is a tie."""
    rows, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    values = st.lists(st.integers(-2, 2), min_size=tokens, max_size=tokens)
    scores = torch.tensor([data.draw(values) for _ in range(rows)], dtype=torch.float32)
    protected = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    counts = [data.draw(st.integers(int(protected.sum()), tokens)) for _ in range(rows)]
    mask = select_eager.select(scores, protected, counts)
    assert torch.equal(mask, select_reference.select(scores, protected, counts))
    assert mask.sum(dim=1).tolist() == counts
    if sum(counts):
        states = random(tokens, rows, 3).transpose(0, 1)  # token-major memory, as models give it
        assert torch.equal(select_eager.gather(states, mask), select_reference.gather(states, mask))
