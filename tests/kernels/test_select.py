"""Selection and packing against their naive reference: ties, scores that are not finite, every layout of the states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.select import keep_best, pack, select
from tests.kernels.references import select as reference
from tests.kernels.tensors import random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEW = [-2.0, -1.0, -0.0, 0.0, 1e-40, 1.0, 3e38]
BAD = [math.nan, math.inf, -math.inf]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), values=st.sampled_from([FEW, FEW + BAD, BAD]))
def test_select_equals_the_reference(data, values):
    """Few different scores, so that nearly every choice is a tie."""
    rows, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    row = st.lists(st.sampled_from(values), min_size=tokens, max_size=tokens)
    scores = torch.tensor([data.draw(row) for _ in range(rows)])
    protected = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    counts = [data.draw(st.integers(int(protected.sum()), tokens)) for _ in range(rows)]
    before = scores.clone()
    mask = select(scores, protected, counts)
    assert torch.equal(mask, reference.select(scores, protected, counts))
    assert mask.sum(dim=1).tolist() == counts
    assert torch.equal(scores.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("bad", BAD)
def test_a_score_that_is_not_finite_is_kept_before_any_other(bad):
    scores = torch.tensor([[5.0, 3e38, bad, 4.0], [5.0, 3e38, 2.0, 4.0]])
    protected = torch.tensor([True, False, False, False])
    assert select(scores, protected, [2, 2]).tolist() == [[True, False, True, False], [True, True, False, False]]


def test_long_rows_with_many_ties():
    scores = random(3, 5000).mul(8).round()
    protected = torch.arange(5000) < 7
    counts = [7, 1200, 5000]
    mask = select(scores, protected, counts)
    expected = reference.select(scores, protected, counts)
    assert torch.equal(mask, expected)


def test_nothing_to_choose_from():
    nothing = torch.zeros(0, dtype=torch.bool)
    assert select(torch.zeros(2, 0), nothing, [0, 0]).shape == (2, 0)
    assert select(torch.zeros(0, 3), torch.zeros(3, dtype=torch.bool), []).shape == (0, 3)
    assert not select(torch.zeros(2, 3), torch.zeros(3, dtype=torch.bool), [0, 0]).any()


def layouts(heads, tokens, dim, dtype):
    """The same states as models lay them out, and as no model does."""
    states = random(heads, tokens, dim, dtype=dtype)
    token_major = states.transpose(0, 1).contiguous().transpose(0, 1)
    fused = torch.full(
        (tokens + 2, 3 * heads * dim), torch.nan, dtype=dtype
    )  # one projection for all, and a longer run
    fused[1 : tokens + 1, heads * dim : 2 * heads * dim] = states.transpose(0, 1).flatten(1)
    of_fused = fused.view(tokens + 2, 3 * heads, dim)[1 : tokens + 1, heads : 2 * heads].transpose(0, 1)
    padded = torch.full((heads, tokens, dim + 3), torch.nan, dtype=dtype)
    padded[:, :, 1 : dim + 1] = states
    return {"head-major": states, "token-major": token_major, "fused": of_fused, "odd": padded[:, :, 1 : dim + 1]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "tokens", "dim", "value_dim"), [(1, 1, 1, 1), (3, 37, 24, 7), (2, 130, 64, 128)])
def test_pack_equals_the_reference_in_every_layout(dtype, heads, tokens, dim, value_dim):
    mask = random(heads, tokens, seed=1) > 0.3
    mask[-1] = tokens == 1  # a head that keeps nothing, beside others
    counts = mask.sum(dim=1).tolist()
    keys, values = layouts(heads, tokens, dim, dtype), layouts(heads, tokens, value_dim, dtype)
    expected = reference.pack(keys["head-major"], values["head-major"], mask, counts)
    for layout, states in keys.items():
        for known in (None, counts):
            *packed, lengths = pack(states, values[layout], mask, known)
            assert lengths == counts
            for ours, theirs in zip(packed, expected, strict=True):
                assert ours.dtype == theirs.dtype
                assert ours.is_contiguous()
                assert torch.equal(ours, theirs), layout


@pytest.mark.parametrize("values", [None, FEW, FEW + BAD], ids=["all different", "ties", "ties and not finite"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "tokens", "dim", "value_dim"), [(1, 1, 1, 1), (3, 37, 24, 7), (2, 130, 64, 128)])
def test_keep_best_equals_selecting_and_packing_by_the_reference(dtype, heads, tokens, dim, value_dim, values):
    drawn = torch.randint(len(values or [0]), (heads, tokens), generator=torch.Generator().manual_seed(2))
    scores = random(heads, tokens, seed=2) if values is None else torch.tensor(values)[drawn]
    protected = random(tokens, seed=1) > 1
    num_protected = int(protected.sum())
    counts = [(num_protected + tokens) // 2, num_protected, tokens][:heads]
    mask = reference.select(scores, protected, counts)
    keys, values_of = layouts(heads, tokens, dim, dtype), layouts(heads, tokens, value_dim, dtype)
    *expected, positions = reference.pack(keys["head-major"], values_of["head-major"], mask, counts)
    marked = torch.where(scores.isfinite(), scores, torch.nan).masked_fill(protected, torch.inf)
    before = scores.clone()
    for layout, states in keys.items():
        *packed, at, importance = keep_best(states, values_of[layout], scores, protected, counts)
        for ours, theirs in zip((*packed, at), (*expected, positions), strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.is_contiguous()
            assert torch.equal(ours, theirs), layout
        assert importance.dtype == torch.float32
        torch.testing.assert_close(importance, marked[mask], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)


def test_keep_best_reads_any_strides():
    scores, protected = random(50, 2).T, torch.zeros(1, dtype=torch.bool).expand(50)
    states = random(2, 50, 8)
    _, _, positions, importance = keep_best(states, states, scores, protected, [20, 3])
    mask = reference.select(scores, protected, [20, 3])
    assert torch.equal(positions.long(), mask.nonzero()[:, 1])
    assert torch.equal(importance, scores[mask])


def test_keep_best_of_nothing():
    nothing, none = torch.zeros(2, 5), torch.zeros(5, dtype=torch.bool)
    keys, values, positions, importance = keep_best(random(2, 5, 4), random(2, 5, 3), nothing, none, [0, 0])
    assert (keys.shape, values.shape, positions.shape, importance.shape) == ((0, 4), (0, 3), (0,), (0,))
    keys, _, _, importance = keep_best(random(2, 0, 4), random(2, 0, 3), nothing[:, :0], none[:0], [0, 0])
    assert (keys.shape, importance.shape) == ((0, 4), (0,))


def test_what_keep_best_refuses():
    states, scores, protected = random(2, 5, 4), random(2, 5), torch.zeros(5, dtype=torch.bool)
    for counts in ([3, 1], [1, 3]):
        with pytest.raises(InvalidTensor, match="counts are"):
            keep_best(states, states, scores, torch.ones(5, dtype=torch.bool), counts)
    with pytest.raises(InvalidTensor, match="given 2 from 1 to 6"):
        keep_best(states, states, scores, protected, [1, 6])
    with pytest.raises(InvalidTensor, match=r"\[2, 5\] float64"):
        keep_best(states, states, scores.double(), protected, [1, 1])
    with pytest.raises(InvalidTensor, match=r"\[2, 4, 4\]"):
        keep_best(states[:, :4], states[:, :4], scores, protected, [1, 1])
    with pytest.raises(InvalidTensor, match="contiguous"):
        keep_best(random(2, 4, 5).transpose(1, 2), states, scores, protected, [1, 1])


def test_pack_of_nothing():
    keys, values, positions, counts = pack(random(2, 5, 4), random(2, 5, 3), torch.zeros(2, 5, dtype=torch.bool))
    assert (keys.shape, values.shape, positions.shape, counts) == ((0, 4), (0, 3), (0,), [0, 0])
    assert positions.dtype == torch.int32
    keys, *_ = pack(random(2, 0, 4), random(2, 0, 3), torch.zeros(2, 0, dtype=torch.bool), [0, 0])
    assert keys.shape == (0, 4)


def test_bits_are_copied():
    """Negative zeros, NaN and infinity arrive as they are: a copy is no arithmetic."""
    keys = torch.tensor([[[-0.0, math.nan], [math.inf, 1e-45]]])
    packed, *_ = pack(keys, keys, torch.ones(1, 2, dtype=torch.bool))
    assert torch.equal(packed.view(torch.int32), keys[0].view(torch.int32))


def test_what_is_refused():
    states, mask = random(2, 5, 4), torch.zeros(2, 5, dtype=torch.bool)
    protected = torch.zeros(5, dtype=torch.bool)
    with pytest.raises(InvalidTensor, match=r"counts are \[1, 0\], and \[0, 0\]"):
        pack(states, states, mask, [1, 0])
    with pytest.raises(InvalidTensor, match=r"mask \[2, 4\] bool"):
        pack(states, states, mask[:, :4])
    with pytest.raises(InvalidTensor, match="contiguous"):
        pack(states.transpose(1, 2), states, mask)
    with pytest.raises(InvalidTensor, match=r"scores \[2, 5\] float64"):
        select(random(2, 5).double(), protected, [1, 1])
    with pytest.raises(InvalidTensor, match="given 2 from 1 to 6"):
        select(random(2, 5), protected, [1, 6])
    with pytest.raises(InvalidTensor, match=r"protected \[4\] bool"):
        select(random(2, 5), protected[:4], [1, 1])
