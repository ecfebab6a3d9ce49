"""MPCache's two halves against loops of their definitions: what the policy keeps, and what the selector reads of it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from kvshelf.engine.decode.generation import Sampling
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.choose import Choice, Chosen, choose
from kvshelf.kernels.prefix_attention import PackedPrefix
from kvshelf.methods import policies, selectors
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.selectors.base import StoredLayer
from tests.by_hand import Prefix, frequencies, greedy
from tests.engine.test_selecting import in_bf16, read_positions
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
    """Of a cluster of keys, or of the bounds of some: a * q * max + (1 - a) * q * min, channel by channel."""
    return sum(
        float(q) * (weight * float(channel.max()) + (1 - weight) * float(channel.min()))
        for q, channel in zip(query, rows.T, strict=True)
    )


def read_by_hand(keys, queries, budget, weight, over, bounds=None):
    """The rows that a head reads: of the better half of clusters of 32 the best clusters of 16, as many as there is
    room for; the first and the last one always. bounds: of each cluster's keys, where these are rounded."""
    join = max if over == "max" else lambda values: sum(values) / len(values)

    def scored(size):
        starts = range(0, len(keys), size)
        of = {at: keys[at : at + size] if bounds is None else bounds[at, size] for at in starts}
        return {at: join([similarity(of[at], query, weight) for query in queries]) for at in starts}

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


def clusters_by_hand(question_tokens, budget, share):
    """What the selector shows each token of an answer: the first of `share` layers chooses for all of them. Bounds are
    those that 8 bits would have."""
    of_first = {}

    def bounded(rows):
        least = in_bf16(rows.amin(0), -1)
        return torch.stack([least, least + 255 * in_bf16((rows.amax(0) - least) / 255, 1)])

    def chosen(layer, queries, keys, _visible):
        if layer % share:
            return of_first[layer - layer % share]
        group = len(queries) // len(keys)
        shown = torch.ones(*queries.shape[:2], keys.shape[1], dtype=torch.bool)
        for head, own in enumerate(keys):
            bounds = {(at, size): bounded(own[at : at + size]) for size in (16, 32) for at in range(0, len(own), size)}
            for t in range(question_tokens, queries.shape[1]):
                query = queries[group * head : group * (head + 1), t]
                rows = read_by_hand(own, query, budget, 0.6, "max", bounds)
                shown[group * head : group * (head + 1), t] = torch.isin(torch.arange(len(own)), torch.tensor(rows))
        of_first[layer] = shown
        return shown

    return chosen


@pytest.mark.parametrize("share", [1, 2, 3])
def test_adjacent_layers_read_what_the_first_of_them_chose(llama, share):
    """One masked forward in fp64 over the clusters that loops choose."""
    cache, question = llama.engine.compress(llama.ids[:230], policy="full"), llama.ids[3:14]
    prefix, layers = Prefix.spelled_out(cache, frequencies(llama.model)), len(cache.layers)
    ask = partial(llama.engine.answer, cache, question, max_new_tokens=8, select="mpcache", select_tokens=80)
    ours = ask(select_params={"share": share})
    by_hand = clusters_by_hand(len(question), 80, share)
    right = greedy(llama.model, prefix, question, cache.next_position, 8, by_hand, guess=ours.token_ids)
    assert ours.token_ids[: len(right)] == right[: len(ours.token_ids)]
    assert len(right) > 4
    document = llama.engine.attach(cache)
    made = llama.engine.select(document, "mpcache", question_tokens=11, tokens=80, params={"share": share})
    generation = llama.engine.start(document, question, Sampling(3), made)
    for _ in range(3):
        llama.engine.batch().step([generation])
    read = [read_positions(made, document, layer, len(cache.layers[layer].positions)) for layer in range(layers)]
    assert all(read[layer] == read[layer - layer % share] for layer in range(layers))
    assert read[0] != read[-1] or share >= layers
    assert ask(select_params={"share": share}, select_tokens=230) == llama.engine.answer(
        cache, question, max_new_tokens=8
    )


def test_layers_that_hold_other_tokens_do_not_share(llama):
    cache = llama.engine.compress(llama.ids[:230], policy="keydiff", compression_ratio=0.25)
    ask = partial(llama.engine.answer, cache, llama.ids[3:14], max_new_tokens=2, select="mpcache", select_tokens=80)
    with pytest.raises(PolicyUnsupported, match="layers 0 and 1 hold different tokens") as refused:
        ask(select_params={"share": 2})
    assert refused.value.param == "select.params.share"
    assert ask().usage.read_tokens <= 80


def test_a_fifth_of_the_entries_is_read_by_default():
    selector = selectors.build("mpcache", {})
    assert selector.default_tokens(2000) == 400
    assert selector.interval == 1
