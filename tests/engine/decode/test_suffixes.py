"""Slabs of suffixes: what a row wrote is what it reads, wherever it was moved to."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine.decode.suffixes import SuffixPool, SuffixRow, capacity_for

LAYERS, HEADS, DIM = 2, 2, 3


def append(pool, row, tokens):
    slab = pool.reserve(row, row.stored + len(tokens))
    for layer in range(LAYERS):
        new = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1).expand(1, HEADS, -1, DIM) + 1000 * layer
        keys, values = slab.states(layer, new, -new)
        keys[row.slot, :, row.stored : row.stored + len(tokens)] = new[0]
        values[row.slot, :, row.stored : row.stored + len(tokens)] = -new[0]
    row.stored += len(tokens)


def held(row, layer):
    keys, values = row.slab.states(layer, torch.empty(1, HEADS, 1, DIM), torch.empty(1, HEADS, 1, DIM))
    assert torch.equal(keys, -values)
    beyond = keys[row.slot, :, row.stored :]
    assert torch.equal(beyond, torch.zeros_like(beyond))
    return (keys[row.slot, 0, : row.stored, 0] - 1000 * layer).tolist()


def test_capacities_are_powers_of_two_from_64():
    assert [capacity_for(n) for n in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 90)), max_size=60))
def test_rows_keep_what_they_wrote(actions):
    """(row, n): row appends n tokens, or leaves if n is 0. No row sees another's, however often they move."""
    pool, rows, expected, token = SuffixPool(LAYERS), {}, {}, 0
    for name, count in actions:
        if count == 0:
            if name in rows:
                pool.release(rows.pop(name))
                del expected[name]
            continue
        row = rows.setdefault(name, SuffixRow())
        tokens = list(range(token, token + count))
        token += count
        append(pool, row, tokens)
        expected.setdefault(name, []).extend(tokens)
        for other, kept in expected.items():
            assert all(held(rows[other], layer) == kept for layer in range(LAYERS))
        places = [(id(row.slab), row.slot) for row in rows.values()]
        assert len(set(places)) == len(places)
    assert (pool.nbytes == 0) == (not rows)
    longest = sum(2 * max(64, len(kept)) for kept in expected.values())
    assert pool.nbytes <= 2 * longest * LAYERS * HEADS * DIM * 4 * 2  # twice the length, twice the places


def test_a_slot_keeps_its_number_while_others_leave():
    pool, rows = SuffixPool(LAYERS), [SuffixRow() for _ in range(5)]
    for i, row in enumerate(rows):
        append(pool, row, [i])
    slots = [row.slot for row in rows]
    pool.release(rows[1])
    assert [row.slot for row in rows[2:]] == slots[2:]
    late = SuffixRow()
    append(pool, late, [9])
    assert late.slot == slots[1]
    assert held(late, 1) == [9]
