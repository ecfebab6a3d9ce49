"""How much of a test runs: every pair of parameter values and some of the examples, or all under TESTS_SOAK=1."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

SOAK = os.environ.get("TESTS_SOAK") == "1"
"""Not KVSHELF_SOAK: commands that a test starts refuse settings that they do not know."""


def amount(reduced: int, full: int) -> int:
    """A number of examples, or of repetitions."""
    return full if SOAK else reduced


def pairwise(choices: Mapping[str, Sequence[Any]], **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test by combinations in which every value of a parameter meets every value of every other one; in
    a soak by all combinations.

    choices: values by the name of a parameter; for several names in one key, "dim, group", the values are tuples.
    options: of `pytest.mark.parametrize`.
    """
    values = [[*of_one] if "," in key else [(one,) for one in of_one] for key, of_one in choices.items()]
    every = [*product(*(range(len(of_one)) for of_one in values))]
    cases = [
        [part for of_one, place in zip(values, places, strict=True) for part in of_one[place]]
        for places in (every if SOAK else _covering(every))
    ]
    return pytest.mark.parametrize(
        ", ".join(choices), cases, ids=["-".join(map(str, case)) for case in cases], **options
    )


def _covering(every: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Combinations of which each takes in the most pairs that are left, until none is; every one without a third
    parameter."""
    pairs = {case: {*combinations(enumerate(case), 2)} for case in every}
    left = set().union(*pairs.values())
    found = []
    while left:
        best = max(every, key=lambda case: len(pairs[case] & left))
        left -= pairs[best]
        found.append(best)
    return found
