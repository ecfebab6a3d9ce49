"""What an answer is worth: RULER's share of references found, and digits right at their place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvshelf.bench.quality.suite import Ask


@dataclass(frozen=True)
class Score:
    """`partial` lies between 0 and 1; `exact` says that every reference was found."""

    exact: bool
    partial: float


def score(ask: Ask, answer: str) -> Score:
    """Count the references that stand in `answer`, whatever else it says and whatever its case (after RULER).

    Unlike RULER's, a reference counts only as a word of its own: values here have three to nine digits, and a short one
    would too easily be found inside a longer, wrong one. A single long number is scored in part by its digits.
    """
    found = sum(_holds(answer, reference) for reference in ask.references)
    share = found / len(ask.references)
    if ask.by_place:
        share = max(share, digits_at_place(ask.references[0], answer))
    return Score(found == len(ask.references), share)


def digits_at_place(reference: str, answer: str) -> float:
    """Share of the digits of `reference` that the longest number in `answer` has at the same place."""
    longest: str = max(re.findall(r"\d+", answer), key=len, default="")
    right: int = sum(a == b for a, b in zip(reference, longest, strict=False))
    return right / len(reference)


def _holds(answer: str, reference: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(reference)}(?!\w)", answer, re.IGNORECASE) is not None
