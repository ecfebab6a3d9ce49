"""Rules of ladders: which are taken, which refused and by what words, and what is due under them."""

from __future__ import annotations

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.store.ladder.rule import Ladder, Rung

DAY = 86400.0


@pytest.mark.parametrize(
    ("text", "rungs"),
    [
        ("none:1d,int8:7d,klt", [("none", 0), ("int8", DAY), ("klt", 7 * DAY)]),
        ("none:90s, lossless", [("none", 0), ("lossless", 90)]),
        ("lossless:5m,int4:group=64,residual=128:12h,klt:step=2,heads=each",
         [("lossless", 0), ("int4:group=64,residual=128", 300), ("klt:step=2,heads=each", DAY / 2)]),
        ("int8:group=32:1h,int2", [("int8", 0), ("int2", 3600)]),
    ],
)  # fmt: skip
def test_a_rule_is_read(text: str, rungs: list[tuple[str, float]]) -> None:
    assert Ladder.parse(text).rungs == tuple(Rung(*rung) for rung in rungs)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("none:1d,int9", "unknown codec 'int9'"),
        ("none:1d,int8:group=7:2d,klt", "group must be"),
        ("none:2d,int8:1d,klt", "the age of 'int8:1d' is not above"),
        ("none:0d,int8", "the age of 'none:0d' is not above"),
        ("int8:1d,none", "codec none is not smaller than int8"),
        ("klt:1d,int2", "codec int2 is not smaller than klt"),
        ("int8:1d,int8:group=64", "codec int8 is not smaller than int8"),
        ("int8:1d,lossless", "lossless gives back nothing that int8 has rounded away"),
        ("none:1d,mixed", "chooses by an importance"),
        ("none:1d,klt:classes=1.5/4,shares=25/25", "chooses by an importance"),
        ("none,int8", "'none' has no age"),
        ("none:1d,int8:7d", "'int8:7d' has an age"),
        ("none", "two rungs at least"),
        ("none:1d", "two rungs at least"),
        ("none:1week,int8", "codec none has no parameter '1week'"),
        ("", "two rungs at least"),
    ],
)
def test_what_is_no_rule_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match="a ladder is written as") as refusal:
        Ladder.parse(text)
    assert why in refusal.value.message
    assert refusal.value.param == "ladder"


def test_a_cache_goes_down_alone_and_to_the_furthest_rung_that_is_due() -> None:
    ladder = Ladder.parse("none:1d,int8:7d,klt")
    assert ladder.below("none", DAY) == []
    assert ladder.below("none", DAY + 1) == ["int8"]
    assert ladder.below("none", 8 * DAY) == ["klt", "int8"]
    assert ladder.below("int8", 6 * DAY) == []
    assert ladder.below("int8", 8 * DAY) == ["klt"]
    assert ladder.below("klt", 900 * DAY) == []
    for other in ("int4", "lossless", "int8:group=64", "mixed"):
        assert ladder.below(other, 900 * DAY) == []
