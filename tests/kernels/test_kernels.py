"""Each operation in use against its naive reference: odd sizes, GQA groups, dtypes, poisoned uninitialised memory."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.kernels.select import eager as select_eager
from kvshelf.kernels.select import reference as select_reference
from tests.kernels.tensors import random


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
