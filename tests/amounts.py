"""How much of a test runs: every pair of parameter values and some of the examples, or all under TESTS_SOAK=1."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    return _parametrize(choices, _covering, options)


def in_turn(choices: Mapping[str, Sequence[Any]], **options: Any) -> pytest.MarkDecorator:
    """As `pairwise`, by as many combinations as the longest parameter has values: each of these once, while the values
    of the others take turns. Where the others' values matter little to what one value is about."""
    return _parametrize(choices, _turning, options)


def few(count: int, values: Iterable[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which so many run in `make test`, spread over all, and the others are
    `slow`. A tuple has a value for each of several parameters."""
    every = [*values]
    assert count < len(every), "or all of them run"
    return [
        value if index * count // len(every) != (index - 1) * count // len(every) else _slow(value)
        for index, value in enumerate(every)
    ]


def _slow(value: Any) -> Any:
    if hasattr(value, "marks"):  # a `pytest.param`
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.slow])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


_Combinations = list[tuple[int, ...]]


def _parametrize(
    choices: Mapping[str, Sequence[Any]], reduce: Callable[[_Combinations], _Combinations], options: dict[str, Any]
) -> pytest.MarkDecorator:
    values = [[*of_one] if "," in key else [(one,) for one in of_one] for key, of_one in choices.items()]
    every = [*product(*(range(len(of_one)) for of_one in values))]
    cases = [
        [part for of_one, place in zip(values, places, strict=True) for part in of_one[place]]
        for places in (every if SOAK else reduce(every))
    ]
    return pytest.mark.parametrize(
        ", ".join(choices), cases, ids=["-".join(map(str, case)) for case in cases], **options
    )


def _turning(every: _Combinations) -> _Combinations:
    """The last combination has the last value of each parameter."""
    counts = [last + 1 for last in every[-1]]
    return [tuple(turn % count for count in counts) for turn in range(max(counts))]


def _covering(every: _Combinations) -> _Combinations:
    """Combinations of which each takes in the most pairs that are left, until none is; every one without a third
    parameter."""
    bits: defaultdict[Any, int] = defaultdict(lambda: 1 << len(bits))
    pairs = {case: sum(bits[pair] for pair in combinations(enumerate(case), 2)) for case in every}
    left = (1 << len(bits)) - 1
    chosen = []
    while left:
        best = max(every, key=lambda case: (pairs[case] & left).bit_count())
        left &= ~pairs[best]
        chosen.append(best)
    return chosen
