"""Which cases of a test `make test` leaves to `make test-slow`."""

from __future__ import annotations

from dataclasses import dataclass

from tests.conftest import MOST_CASES, beyond


@dataclass(frozen=True)
class Case:
    """What `beyond` asks of an item of pytest."""

    nodeid: str
    slow: bool = False

    def get_closest_marker(self, name: str) -> object:
        return self if name == "slow" and self.slow else None


def test_cases_are_drawn_by_their_names_and_slow_ones_do_not_count() -> None:
    cases = [Case(f"tests/a.py::test_x[{number}]") for number in range(9)]
    others = [Case("tests/a.py::test_y"), *(Case(f"tests/a.py::test_z[{number}]", slow=True) for number in range(9))]
    left = {*beyond([*cases, *others])}  # type: ignore[list-item]
    assert len(left) == 9 - MOST_CASES
    assert left < {*cases}
    assert left != {*cases[MOST_CASES:]}
    assert left == {*beyond([*others, *reversed(cases)])}  # type: ignore[list-item]
