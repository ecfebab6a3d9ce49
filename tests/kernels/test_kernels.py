"""Each operation in use against its naive reference: odd sizes, GQA groups, dtypes, poisoned uninitialised memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.kernels.lag_scores import eager as lag_eager
from kvshelf.kernels.lag_scores import reference as lag_reference
from kvshelf.kernels.prefix_attention import eager as attention_eager
from kvshelf.kernels.prefix_attention import reference as attention_reference
from kvshelf.kernels.select import eager as select_eager
from kvshelf.kernels.select import reference as select_reference
from kvshelf.kernels.window_scores import eager as window_eager
from kvshelf.kernels.window_scores import reference as window_reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN: an operation that reads what it never wrote fails its comparison."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def error(ours, reference):
    assert not ours.isnan().any()
    return float((ours.double() - reference.double()).abs().max() / reference.double().abs().max())


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "queries", "suffix", "prefix", "dim", "value_dim"),
    [
        (1, 4, 2, 1, 1, [37, 37], 16, 16),
        (1, 4, 1, 5, 5, [63], 16, 16),
        (2, 6, 2, 3, 9, [17, 5], 24, 24),  # ragged heads, a question after an earlier turn
        (1, 8, 4, 1, 12, [9, 0, 3, 1], 8, 8),  # a head that keeps nothing
        (1, 2, 2, 4, 4, [0, 0], 16, 16),  # an empty prefix
        (2, 4, 2, 3, 3, [11, 29], 16, 40),  # values wider than keys: the generic path
        (1, 3, 1, 600, 640, [7], 5, 5),  # more queries than a block, odd head size
    ],
)
def test_prefix_attention(dtype, batch, q_heads, kv_heads, queries, suffix, prefix, dim, value_dim):
    q = random(batch, q_heads, queries, dim, dtype=dtype, seed=1)
    heads = [
        (random(n, dim, dtype=dtype, seed=h), random(n, value_dim, dtype=dtype, seed=h + 9))
        for h, n in enumerate(prefix)
    ]
    keys = random(batch, kv_heads, suffix, dim, dtype=dtype, seed=2)
    values = random(batch, kv_heads, suffix, value_dim, dtype=dtype, seed=3)
    ours = attention_eager.prefix_attention(q, heads, keys, values, 0.3)
    assert ours.dtype == dtype
    assert error(ours, attention_reference.prefix_attention(q, heads, keys, values, 0.3)) < TOLERANCE[dtype]


def test_prefix_attention_takes_strided_input():
    q, keys, values = (
        random(1, 5, 4, 16, seed=s).transpose(1, 2) for s in (1, 2, 3)
    )  # [1, 4, 5, 16], as models give them
    packed = random(2 * 33, 16), random(2 * 33, 16, seed=5)
    heads = list(zip(packed[0].view(2, 33, 16), packed[1].view(2, 33, 16), strict=True))
    ours = attention_eager.prefix_attention(q, heads, keys[:, :2], values[:, :2], 0.25)
    assert error(ours, attention_reference.prefix_attention(q, heads, keys[:, :2], values[:, :2], 0.25)) < 2e-6


def test_generic_attention_equals_the_cpu_operation():
    q, k, v = random(2, 130, 16), random(2, 77, 16, seed=1), random(2, 77, 16, seed=2)
    mask = torch.zeros(130, 77).masked_fill_(random(130, 77, seed=3) > 1, -torch.inf)
    out, lse = attention_eager._attend(q, k, v, 0.2, mask)
    blocks_out, blocks_lse = attention_eager._attend_in_blocks(q, k, v, 0.2, mask)
    assert error(blocks_out, out) < 2e-6
    assert error(blocks_lse, lse) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "tokens", "window"), [(4, 2, 100, 8), (7, 1, 63, 63), (2, 2, 9, 1)])
def test_window_scores(dtype, q_heads, kv_heads, tokens, window):
    queries, keys = random(q_heads, window, 24, dtype=dtype), random(kv_heads, tokens, 24, dtype=dtype, seed=1)
    ours = window_eager.window_scores(queries, keys, 0.2)
    expected = window_reference.window_scores(queries, keys, 0.2)
    assert ours.shape == (kv_heads, tokens - window)
    assert ours.dtype == torch.float32
    if tokens > window:
        assert error(ours, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "partitions", "lag", "dim"), [(2, 5, 16, 24), (1, 2, 2, 3), (3, 3, 127, 8)])
def test_lag_scores(dtype, heads, partitions, lag, dim):
    states = random(heads, partitions, lag, dim, dtype=dtype)
    before = states.clone()
    ours = lag_eager.lag_scores(states)
    assert error(ours, lag_reference.lag_scores(states)) < 1e-5
    assert torch.equal(states, before)


def test_lag_scores_of_a_constant_channel_are_finite():
    states = random(1, 3, 8, 4)
    states[..., 2] = 1.5
    ours = lag_eager.lag_scores(states)
    assert error(ours, lag_reference.lag_scores(states)) < 1e-5


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
