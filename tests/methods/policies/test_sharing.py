"""Sharing: who gets how much of a budget, and that a share only ever shrinks."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.sharing import (
    GlobalSharing,
    LayerStats,
    ProportionalSharing,
    fill,
    flat_counts,
    flat_shares,
    largest_remainders,
    least,
)

# Few different scores, so that most decisions are ties.
SCORES = st.lists(st.integers(0, 4).map(float), min_size=1, max_size=12)
WEIGHTS = st.lists(
    st.one_of(st.floats(0, 10), st.floats(0, 1e-300), st.floats(0, 1e300), st.sampled_from([0.0, 1.0, 1 / 3, 2.0])),
    min_size=1,
    max_size=9,
)


def naive_flat_counts(heads, total, floors):
    """Forced ones first, then one winner at a time."""
    counts = [min(floor, len(head)) for floor, head in zip(floors, heads, strict=True)]
    left = [sorted(head, reverse=True)[count:] for head, count in zip(heads, counts, strict=True)]
    while sum(counts) < total and any(left):
        winner = max((i for i in range(len(left)) if left[i]), key=lambda i: (left[i][0], -i))
        left[winner].pop(0)
        counts[winner] += 1
    return counts


@settings(deadline=None, max_examples=300)
@given(heads=st.lists(SCORES, min_size=1, max_size=5), total=st.integers(0, 70), data=st.data())
def test_flat_counts_give_each_entry_to_the_best_head(heads, total, data):
    floors = [data.draw(st.integers(0, 14)) for _ in heads]
    assert flat_counts([torch.tensor(head) for head in heads], total, floors) == naive_flat_counts(heads, total, floors)


def test_flat_counts_let_a_head_win_what_another_cannot_use():
    heads = [torch.tensor([9.0, 8.0, 7.0]), torch.tensor([6.0, 1.0, 0.0])]
    assert flat_counts(heads, 4, [0, 0]) == [3, 1]
    assert flat_counts(heads, 3, [0, 2]) == [1, 2]
    assert flat_counts(heads, 99, [0, 0]) == [3, 3]


def test_what_is_no_number_wins_nothing_that_is_protected_elsewhere():
    """Else a card would pack more entries than there is room for, before anybody has looked at the scores."""
    importance = torch.tensor([[math.inf, math.nan, math.nan, math.nan], [math.inf, 1, 2, 3]])
    assert flat_shares(importance, 4) == [3, 1]


@pytest.mark.parametrize(
    ("floor", "tokens", "protected", "expected"), [(0.2, 52, 3, 10), (0.2, 52, 11, 11), (0.1, 5, 0, 1), (0.0, 5, 0, 0)]
)
def test_the_least_a_head_keeps(floor, tokens, protected, expected):
    assert least(floor, tokens, protected) == expected


def test_a_global_plan_reserves_the_floors_of_layers_to_come():
    """Two layers of one head, 3 entries each on average, at least 2: the first may take 4 of the 6, not all."""
    first = LayerStats([torch.tensor([9.0, 9.0, 9.0, 9.0, 9.0, 9.0])])
    second = LayerStats([torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])])
    sharing = GlobalSharing(floor=2 / 3)
    budget = Budget(3, 0.5)
    assert sharing.counts([first], budget, 2) == [(4,)]
    assert sharing.counts([first, second], budget, 2) == [(4,), (2,)]
    assert GlobalSharing().counts([first, second], budget, 2) == [(6,), (0,)]


def level_by_bisection(weights, total, cap):
    """Shares of the level at which they meet the total, found without sorting."""
    low, high = Fraction(0), Fraction(cap) / min(w for w in weights if w > 0)
    for _ in range(200):
        level = (low + high) / 2
        low, high = (low, level) if sum(min(cap, level * w) for w in weights) > total else (level, high)
    return [float(min(cap, high * w)) for w in weights]


@settings(deadline=None, max_examples=100)
@given(
    weights=st.lists(st.fractions(Fraction(1, 50), 50), min_size=1, max_size=7), cap=st.integers(1, 40), data=st.data()
)
def test_water_stands_at_one_level_in_all_layers(weights, cap, data):
    total = data.draw(st.integers(0, cap * len(weights)))
    weights = [float(w) for w in weights]
    shares = fill(weights, total, cap)
    assert sum(shares) == total
    expected = level_by_bisection([Fraction(w) for w in weights], total, cap)
    assert [float(share) for share in shares] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_what_a_layer_cannot_hold_goes_to_the_others_in_proportion():
    assert fill([90.0, 2.0, 1.0], 16, 10) == [10, 4, 2]
    assert fill([1.0, 1.0], 30, 10) == [10, 10]
    assert fill([0.0, 0.0], 10, 10) == [5, 5], "without any preference, alike"
    assert fill([1.0, 0.0], 15, 10) == [10, 5], "and what is preferred cannot hold everything"


@settings(deadline=None, max_examples=300)
@given(parts=st.lists(st.integers(0, 10**6), min_size=1, max_size=9), total=st.integers(0, 500))
def test_largest_remainders_round_by_less_than_one_to_the_exact_total(parts, total):
    shares = [Fraction(total * part, max(1, sum(parts))) for part in parts]
    counts = largest_remainders(shares)
    assert sum(counts) == sum(shares)
    assert all(math.floor(share) <= count <= math.ceil(share) for share, count in zip(shares, counts, strict=True))
    raised = [share % 1 for share, count in zip(shares, counts, strict=True) if count > share]
    lowered = [share % 1 for share, count in zip(shares, counts, strict=True) if count < share]
    assert not raised or not lowered or min(raised) >= max(lowered)


@settings(deadline=None, max_examples=500)
@given(weights=WEIGHTS, tokens=st.integers(2, 60), data=st.data())
@example(weights=[1 / 3] * 3 + [1e-17], tokens=30, data=None)
def test_a_proportional_share_only_shrinks_and_the_total_is_exact(weights, tokens, data):
    """The last layer's counts are what waiting for all of them gives: every one of them came down from above."""
    kept = data.draw(st.integers(0, tokens - 1)) if data else 0
    budget = data.draw(st.integers(kept, tokens)) if data else 10
    importance = torch.zeros(tokens)
    importance[:kept] = torch.inf
    layers = [LayerStats([importance, importance], weight) for weight in weights]
    before = [tokens] * len(layers)
    for seen in range(1, len(layers) + 1):
        counts = [heads[0] for heads in ProportionalSharing().counts(layers[:seen], Budget(budget, 0.5), len(layers))]
        assert all(kept <= count <= earlier for count, earlier in zip(counts, before[:seen], strict=True))
        assert sum(counts) < budget * len(layers) + seen, "rounded up, no more"
        before[:seen] = counts
    assert sum(counts) == budget * len(layers)


def spread_evenly(weights, total, cap):
    """CAKE's code: what exceeds the cap goes to the others in equal parts."""
    shares = [total * weight / sum(weights) for weight in weights]
    excess = sum(max(0, share - cap) for share in shares)
    room = [share < cap for share in shares]
    return [min(cap, share) + (excess / sum(room) if free else 0) for share, free in zip(shares, room, strict=True)]


def test_spreading_the_excess_evenly_would_let_a_share_grow():
    """Why the sharing does not do what the authors' code does: the last of three layers grows when a fourth joins."""
    assert spread_evenly([5.0, 5.0, 0.01], 10, 6)[2] < 0.1
    assert spread_evenly([5.0, 5.0, 0.01, 90.0], 10, 6)[2] > 0.9
    assert fill([5.0, 5.0, 0.01, 90.0], 10, 6)[2] < fill([5.0, 5.0, 0.01], 10, 6)[2]
