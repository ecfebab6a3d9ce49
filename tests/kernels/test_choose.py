"""The choice of units by their scores, and attention over what is chosen, against naive forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.choose import Choice, Chosen, Units, choose, eager
from kvshelf.kernels.choose import native as native_form
from kvshelf.kernels.native import library
from kvshelf.kernels.prefix_attention import BatchLayout, LogitRules, PackedPrefix, SelectedPrefix, SuffixRows
from kvshelf.kernels.prefix_attention import eager as eager_attention
from kvshelf.kernels.prefix_attention import native as native_attention
from kvshelf.kernels.quantize.rows import QuantizedRows
from tests.amounts import amount
from tests.kernels.references import choose as reference
from tests.kernels.references import prefix_attention as reference_attention
from tests.kernels.tensors import TOLERANCE, error, random

CPU = torch.device("cpu")

FORMS = {"eager": eager.choose} | ({"native": native_form.choose} if library() is not None else {})


def units(lengths, size, width, *, dtype=torch.float32, span=True, by_column=False, seed=0, forced=True):
    """Units of `size` rows of heads of these lengths, the first and the last of each head forced."""
    ends, counts, first_and_last = [], [], []
    for length in lengths:
        own = [*range(size, length, size), length] if length else []
        ends += own
        counts.append(len(own))
        first_and_last += [forced and (end == own[0] or end == own[-1]) for end in own]
    shape = (width, sum(counts)) if by_column else (sum(counts), width)
    return Units(
        random(*shape, dtype=dtype, seed=seed),
        random(*shape, dtype=dtype, seed=seed + 1).abs() if span else None,
        torch.tensor(ends, dtype=torch.int32),
        torch.tensor(first_and_last),
        tuple(counts),
        scale=0.7,
        by_column=by_column,
    )


def choice_of(parts, budget, **fields):
    rooms = tuple(Chosen.room(_lengths(part), budget, CPU) for part in parts)
    return Choice(tuple(parts), rooms, budget, **{"linear": 0.3, "relu": 1.0, **fields})


def _lengths(units):
    return [int(head.sum()) for head in torch.split(units.sizes, list(units.counts))]


def rows(choice):
    """What was chosen: for each prefix and head its rows."""
    return [
        [own[:count].tolist() for own, count in zip(chosen.rows, chosen.counts.tolist(), strict=True)]
        for chosen in choice.chosen
    ]


def chosen_by(form, queries, choice):
    fresh = replace(choice, chosen=tuple(Chosen(c.rows.clone(), c.counts.clone()) for c in choice.chosen))
    form(queries, fresh)
    return rows(fresh)


@settings(max_examples=amount(60, 2000), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    size=st.sampled_from([1, 3, 16, 32]),
    width=st.sampled_from([5, 16, 48]),
    group=st.sampled_from([1, 2, 3, 8, 9]),
    budget=st.integers(64, 200),
    bf16=st.booleans(),
    span=st.booleans(),
    by_column=st.booleans(),
    joined=st.sampled_from(["max", "mean"]),
    cut=st.booleans(),
    two=st.booleans(),
    parents=st.booleans(),
    force=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_form_chooses_as_the_naive_one(
    lengths, size, width, group, budget, bf16, span, by_column, joined, cut, two, parents, force, seed
):
    kind = {"dtype": torch.bfloat16 if bf16 else torch.float32, "span": span, "by_column": by_column}
    parts = [units(lengths, size, width, seed=seed, **kind)]
    if parents:
        coarser = units(lengths, 2 * size, width, seed=seed + 20, **kind)
        parts = [replace(parts[0], parents=coarser, children=2)]
    if two:  # another prefix, with units of another kind
        parts.append(units([40] * len(lengths), 4, width, seed=seed + 7, span=not span, by_column=not by_column))
    choice = choice_of(
        parts, max(budget, sum(max(part.forced_rows) for part in parts)), group=joined, cut=cut, force=force
    )
    queries = random(group * len(lengths), width, seed=seed + 3)
    expected = chosen_by(reference.choose, queries, choice)
    for name, form in FORMS.items():
        assert chosen_by(form, queries, choice) == expected, name
    read = [sum(map(len, heads)) for heads in zip(*expected, strict=True)]
    assert max(read) <= choice.budget
    everything = [sum(of) for of in zip(*map(_lengths, parts), strict=True)]
    if cut and not parents:
        assert read == [min(choice.budget, whole) for whole in everything]


@settings(max_examples=amount(40, 1000), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3).filter(any),
    width=st.sampled_from([1, 5, 19]),
    group=st.sampled_from([1, 2, 7, 9]),
    budget=st.integers(1, 100),
    alpha=st.sampled_from([0.0, 2.0, 12.0, 1e39, torch.inf]),
    bf16=st.booleans(),
    bf16_queries=st.booleans(),
    two=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_form_takes_what_is_critical_by_a_guess(
    lengths, width, group, budget, alpha, bf16, bf16_queries, two, seed
):
    kind = {"dtype": torch.bfloat16 if bf16 else torch.float32, "span": False, "by_column": True, "forced": False}
    of_all = [lengths, [40] * len(lengths)] if two else [lengths]
    parts = [units(own, 1, group * width, seed=seed + at, **kind) for at, own in enumerate(of_all)]
    basis = random(len(lengths), group, 16, width, seed=seed + 5)
    choice = choice_of(parts, budget, basis=basis, alpha=alpha, force=False)
    dtype = torch.bfloat16 if bf16_queries else torch.float32
    queries = random(group * len(lengths), 16, seed=seed + 3, dtype=dtype)
    expected = chosen_by(reference.choose, queries, choice)
    for name, form in FORMS.items():
        assert chosen_by(form, queries, choice) == expected, name
    assert native_form.takes(choice, dtype)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_guess_that_is_no_number_ranks_first_and_changes_no_other(form):
    part = units([40, 40], 1, 2 * 5, span=False, by_column=True, forced=False)
    choice = choice_of([part], 12, basis=random(2, 2, 16, 5, seed=5), force=False)
    queries = random(4, 16, seed=3)
    (before,) = chosen_by(form, queries, choice)
    last = max(set(range(40)) - set(before[0]))
    part.low[0, last] = torch.nan
    ((first, second),) = chosen_by(form, queries, choice)
    assert last in first
    assert set(first) - {last} < set(before[0])
    assert second == before[1]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_columns_name_the_channels_of_a_query(form):
    part = units([64, 64], 8, 4, span=False)
    columns = torch.tensor([[3, 1, 0, 7], [6, 2, 5, 4]])
    choice = choice_of([part], 24, columns=columns)
    queries = random(4, 8, seed=5)
    assert chosen_by(form, queries, choice) == chosen_by(reference.choose, queries, choice)
    only_named = queries.clone()
    only_named[:2, [2, 4, 5, 6]] = 9.0  # channels that the first head does not name
    only_named[2:, [0, 1, 3, 7]] = 9.0
    assert chosen_by(form, only_named, choice) == chosen_by(form, queries, choice)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_equal_units_are_taken_in_order(form):
    part = replace(units([80], 8, 16, span=False, forced=False), low=torch.ones(10, 16))
    choice = choice_of([part, part], 40)
    assert chosen_by(form, random(2, 16), choice) == [[list(range(40))], [[]]]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_score_that_is_no_number_ranks_first(form, bad):
    part = units([80], 8, 16, span=False, forced=False)
    part.low[6] = bad
    choice = choice_of([part], 16)
    (rows_of_heads,), best = chosen_by(form, random(1, 16).abs(), choice), set(range(48, 56))
    assert best <= set(rows_of_heads[0])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_larger_budget_chooses_a_superset(form):
    part, queries = units([200, 130], 8, 32), random(8, 32)
    choices = [chosen_by(form, queries, choice_of([part], budget))[0] for budget in range(16, 200, 8)]
    for smaller, larger in pairwise(choices):
        assert all(set(a) <= set(b) for a, b in zip(smaller, larger, strict=True))


def test_queries_of_other_heads_are_refused():
    with pytest.raises(InvalidTensor, match=r"q_heads, D\] of 2 KV heads"):
        choose(random(3, 16), choice_of([units([40, 40], 8, 16)], 32))


def prefix(lengths, dim, dtype, bits):
    keys, values = (random(sum(lengths), dim, dtype=dtype, seed=seed) for seed in (1, 2))
    if bits is None:
        return PackedPrefix(keys, values, tuple(lengths))
    return PackedPrefix(
        QuantizedRows.quantize(keys, lengths, bits=bits, group=8, axis="tokens"),
        QuantizedRows.quantize(values, lengths, bits=bits, group=16, axis="channels"),
        tuple(lengths),
    )


ATTENTIONS = {"eager": eager_attention} | ({"native": native_attention} if library() is not None else {})


@pytest.mark.parametrize("form", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize(
    ("dtype", "bits", "size"),
    list(product((torch.float32, torch.bfloat16), (None, 4, 8), (1, 3, 8))),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_selected_attention_is_that_over_the_chosen_rows(form, dtype, bits, size):
    """Two rows with choices of their own, one of them over two prefixes together, and a third row that sees all of a
    prefix."""
    lengths, queries = (150, 90), random(3, 4, 32, dtype=dtype)
    first, second = prefix(lengths, 32, dtype, bits), prefix((40, 40), 32, dtype, None)
    suffixes = [(random(3, 2, 12, 32, dtype=dtype, seed=8), random(3, 2, 12, 32, dtype=dtype, seed=9))]
    layout = BatchLayout((1, 1, 1), (SuffixRows((4, 12, 7), (0, 1, 2)),), CPU)

    def attended(by):
        alone = choice_of([units(lengths, size, 32, seed=11)], 48)
        both = choice_of([units(lengths, size, 32, seed=11), units((40, 40), 4, 32, seed=12)], 70)
        seen = [
            [SelectedPrefix(first, alone.chosen[0], alone)],
            [SelectedPrefix(first, both.chosen[0], both), SelectedPrefix(second, both.chosen[1], both)],
            [first],
        ]
        return by.prefix_attention(queries, seen, suffixes, layout, LogitRules(0.17)), rows(alone), rows(both)

    expected, *chosen = attended(reference_attention)
    out, *rows_read = attended(form)
    assert rows_read == chosen
    assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", ATTENTIONS.values(), ids=ATTENTIONS)
def test_rows_that_are_given_need_no_choice(form):
    """As where a policy has chosen; one head reads nothing of the prefix."""
    base, queries = prefix((60, 60), 16, torch.float32, 4), random(2, 4, 16)
    table = torch.zeros(2, 5, dtype=torch.int32)
    table[0] = torch.tensor([0, 1, 2, 30, 59])
    selected = SelectedPrefix(base, Chosen(table, torch.tensor([5, 0], dtype=torch.int32)))
    suffixes = [(random(2, 2, 6, 16, seed=1), random(2, 2, 6, 16, seed=2))]
    layout = BatchLayout((2,), (SuffixRows((6, 6), (0, 1)),), CPU)
    arguments = (queries, [[selected]], suffixes, layout, LogitRules(0.25))
    assert error(form.prefix_attention(*arguments), reference_attention.prefix_attention(*arguments)) < 2e-6
