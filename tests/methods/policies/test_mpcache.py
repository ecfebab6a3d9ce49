"""MPCache's two halves against loops of their definitions: what the policy keeps, and what the selector reads of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvshelf.kernels.choose import Choice, Chosen, choose
from kvshelf.kernels.prefix_attention import PackedPrefix
from kvshelf.methods import policies, selectors
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.selectors.base import StoredLayer
from tests.views import best, random_layer


def scores_by_hand(layer, first):
    """Of each token the largest weight that a row from `first` on gives it, of the mean of all heads, fp64."""
    heads = len(layer.all_queries)
    largest = [0.0] * layer.num_tokens
    for row in range(first, layer.num_tokens):
        mean = torch.zeros(row + 1, dtype=torch.float64)
        for head in range(heads):
            keys = layer.keys[head * layer.kv_heads // heads, : row + 1].double()
            mean += torch.softmax(layer.scaling * keys @ layer.all_queries[head, row].double(), 0) / heads
        for token in range(row + 1):
            largest[token] = max(largest[token], float(mean[token]))
    return largest


@pytest.mark.parametrize(
    ("params", "tokens", "first"),
    [({}, 50, 40), ({}, 83, 66), ({"rows": 1.0}, 40, 0), ({"rows": 0.01}, 30, 29), ({"rows": 0.8}, 97, 19)],
)
def test_a_token_counts_by_the_row_of_the_last_fifth_that_needs_it_most(params, tokens, first):
    layer = random_layer(tokens, group=3, seed=tokens)
    scores = policies.build("mpcache", params).score(layer)
    expected = torch.tensor(scores_by_hand(layer, first), dtype=torch.float64)
    torch.testing.assert_close(scores.double(), expected.expand(layer.kv_heads, -1), rtol=1e-5, atol=1e-7)


def test_all_heads_keep_the_tokens_with_the_largest_scores():
    layer, budget = random_layer(60, group=2, protected=3, seed=5), 17
    kept = policies.build("mpcache", {}).reduce(layer, LayerBudget.uniform(layer.kv_heads, budget))
    expected = best(scores_by_hand(layer, 48), {0, 1, 2}, budget)
    positions = torch.split(kept.entries_at, [end - start for start, end in pairwise(kept.offsets)])
    assert [own.tolist() for own in positions] == [expected] * layer.kv_heads


def similarity(rows, query, weight):
    """Of a cluster of keys: a * q * max + (1 - a) * q * min, channel by channel."""
    return sum(
        float(q) * (weight * float(channel.max()) + (1 - weight) * float(channel.min()))
        for q, channel in zip(query, rows.T, strict=True)
    )


def read_by_hand(keys, queries, budget, weight, over):
    """The rows that a head reads: of the better half of clusters of 32 the best clusters of 16, as many as there is
    room for; the first and the last one always."""
    join = max if over == "max" else lambda values: sum(values) / len(values)

    def scored(size):
        starts = range(0, len(keys), size)
        return {at: join([similarity(keys[at : at + size], query, weight) for query in queries]) for at in starts}

    coarse, fine = scored(32), scored(16)
    kept = sorted(coarse, key=lambda at: -coarse[at])[: -(-len(coarse) // 2)]
    first, last = 0, max(fine)
    candidates = [at for at in fine if at - at % 32 in kept and at not in (first, last)]
    size = {at: min(16, len(keys) - at) for at in fine}
    chosen, left = {first, last}, budget - sum(size[at] for at in {first, last})
    for at in sorted(candidates, key=lambda at: -fine[at]):
        if size[at] > left:
            break
        chosen.add(at)
        left -= size[at]
    return sorted(row for at in chosen for row in range(at, at + size[at]))


@pytest.mark.parametrize("over", ["max", "mean"])
@pytest.mark.parametrize("weight", [0.6, 0.1])
@pytest.mark.parametrize("lengths", [(200, 200), (97, 312), (40, 17)])
def test_clusters_are_read_by_their_similarity_within_the_better_half_of_coarser_ones(lengths, weight, over):
    """Bounds are rounded to 8 bits of a cluster, far less than what clusters of these keys differ by."""
    group, dim, budget = 2, 8, 96
    generator = torch.Generator().manual_seed(sum(lengths))
    centers = 4 * torch.randn(sum(lengths) // 16 + 4, dim, generator=generator)
    keys = torch.cat([centers[at // 16] + torch.randn(1, dim, generator=generator) for at in range(sum(lengths))])
    prefix = PackedPrefix(keys, torch.zeros(len(keys), dim), lengths)
    queries = torch.randn(group * len(lengths), dim, generator=generator)
    selector = selectors.build("mpcache", {"similarity": weight, "over": over})
    units = tuple(selector.units(StoredLayer(0, (prefix,), (), len(keys), ())))
    room = (Chosen.room(lengths, budget, keys.device),)
    choose(queries, Choice(units, room, budget, selector.linear, selector.relu, selector.group))
    for head, own in enumerate(torch.split(keys, list(lengths))):
        count = int(room[0].counts[head])
        expected = read_by_hand(own, queries[group * head : group * (head + 1)], budget, weight, over)
        assert room[0].rows[head, :count].tolist() == expected


def test_a_fifth_of_the_entries_is_read_by_default():
    selector = selectors.build("mpcache", {})
    assert selector.default_tokens(2000) == 400
    assert selector.interval == 1
