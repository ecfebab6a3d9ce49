"""Needles for `kvshelf calibrate`: documents with one sentence to find, of every kind of haystack."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvshelf.bench.quality.tasks import (
    HAYSTACKS,
    SHORT_VALUE_DIGITS,
    CountTokens,
    haystack_pieces,
    make_facts,
    spread,
)
from kvshelf.workers.engine.head_search import Needle

CALIBRATION_SEED = "calibration"
"""Apart from all evaluation seeds, which are numbers: what heads are chosen by is never what they are judged on."""


def needles(documents: int, num_tokens: int, count_tokens: CountTokens) -> Iterator[Needle]:
    """As many needles, each in a document of at most `num_tokens` tokens, of the kinds of haystack in turn."""
    for index in range(documents):
        haystack = HAYSTACKS[index % len(HAYSTACKS)]
        rng = random.Random(f"{CALIBRATION_SEED}/{haystack}/{num_tokens}/{index}")
        [fact] = make_facts(rng, [rng.randint(*SHORT_VALUE_DIGITS)])
        sentence = fact.sentence(rng)
        text = spread(rng, [sentence], haystack_pieces(rng, haystack, [fact.thing]), num_tokens, count_tokens)
        start = text.index(sentence)
        yield Needle(haystack, text, start, start + len(sentence), fact.question(rng).text)
