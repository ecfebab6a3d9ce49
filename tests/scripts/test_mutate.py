"""Mutations: which tokens change, and that a copy of the checkout says whether its tests notice."""

from __future__ import annotations

import ast

import pytest

from scripts.mutate import GROUPS, ROOT, drawn, mutations, results
from tests.amounts import amount

SOURCE = '''"""A module of -1 line."""

LIMIT: int = 3


def least(rows: list[int], most: int | None = None) -> int:
    """The least of rows that is not above 7."""
    if most is not None and not rows:
        raise ValueError(f"no rows of {most + 1}, {1 + 1}")
    return min(row - 1 for row in rows if -row <= LIMIT)
'''


def test_what_is_computed_changes_and_no_text_or_type() -> None:
    source = SOURCE.encode()
    changed = sorted((source[start:end].decode(), new) for start, end, new in mutations(source))
    assert changed == sorted(
        [
            ("3", "4"),
            ("is not", "is"),
            ("and", "or"),
            ("not", ""),
            ("min", "max"),
            ("-", "+"),
            ("1", "2"),
            ("-", ""),
            ("<=", "<"),
        ]
    )


def test_every_mutation_is_a_program_and_every_group_has_some() -> None:
    places = drawn(10**6, 0)
    assert {place.group for place in places} == set(GROUPS)
    for place in places[:300]:
        source = (ROOT / place.file).read_bytes()
        ast.parse(source[: place.start] + place.new.encode() + source[place.end :])
    assert drawn(5, 1) == drawn(5, 1) != drawn(5, 2)
    for _, tests in GROUPS.values():
        assert all((ROOT / "tests" / test).exists() for test in tests)


@pytest.mark.slow
def test_a_copy_notices_a_wrong_score_and_is_as_it_was_afterwards() -> None:
    """The same place twice: the second time it is found where the first left it."""
    place = next(place for place in drawn(10**6, 0) if place.file.endswith("streaming_llm.py"))
    assert [noticed for _, noticed in results([place, place], jobs=1)] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_most_mutations_of_a_sample_are_noticed() -> None:
    """docs/internals/testing.md has the rate of 300. A sample this small may have one that changes no outcome."""
    sample = drawn(amount(4, 30), 1)
    noticed = sum(noticed for _, noticed in results(sample, jobs=1))
    assert noticed > len(sample) * 0.6, f"{noticed} of {len(sample)}"
