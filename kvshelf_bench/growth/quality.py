"""A document that grew by appends, beside the same text compressed as one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.samples.tasks import MULTIKEY_FACTS, SHORT_VALUE_DIGITS, Question, make_facts, write_document
from kvshelf_bench.growth.options import Documents
from kvshelf_bench.measure import wilson
from kvshelf_bench.quality.retrieval import counter


@dataclass(frozen=True)
class Grown:
    """`questions` about documents of `tokens` tokens under a policy that removes `removed`.

    grown, whole: right answers of caches that grew by `appends` appends, each reduced by itself, and of the same texts
    as one. low, high: bounds of the share of `grown` (95 %). grown_bytes, whole_bytes: of the last document's blobs.
    """

    policy: str
    removed: float
    codec: str
    tokens: int
    appends: int
    questions: int
    grown: int
    low: float
    high: float
    whole: int
    grown_bytes: int
    whole_bytes: int


def measure_grown(
    engine: Engine,
    policy: str,
    removed: float,
    codec: str,
    documents: Documents,
    progress: Callable[[], None] = lambda: None,
) -> Grown:
    """Every document, beside the same text compressed as one."""
    tokens, questions = documents.tokens, documents.questions
    level: dict[str, Any] = {"policy": policy} | ({"compression_ratio": removed} if removed else {})
    grown = whole = 0
    for number in range(documents.documents):
        text, asks = _document(engine, tokens, questions, f"growing/{tokens}/{documents.seed}/{number}")
        one = engine.encoded(engine.compress(text, **level), codec)
        first, *rest = _pieces(engine, text, documents.appends + 1)
        cache = engine.encoded(engine.compress(first, **level), codec)
        for piece in rest:
            cache = engine.extend(cache, piece)
        grown += sum(_right(engine, cache, question) for question in asks)
        whole += sum(_right(engine, one, question) for question in asks)
        progress()
    count = documents.documents * questions
    low, high = wilson(grown, count)
    sizes = len(cache.to_bytes()), len(one.to_bytes())
    return Grown(policy, removed, codec, tokens, documents.appends, count, grown, low, high, whole, *sizes)


def _document(engine: Engine, tokens: int, questions: int, seed: str) -> tuple[str, list[Question]]:
    rng = random.Random(seed)
    digits = [rng.randint(*SHORT_VALUE_DIGITS) for _ in range(MULTIKEY_FACTS)]
    document = write_document(rng, make_facts(rng, digits), "prose", tokens, counter(engine))
    return document.text, document.questions[:questions]


def _pieces(engine: Engine, text: str, count: int) -> list[str]:
    """The text in so many pieces of about as many tokens, cut before a space."""
    starts = engine.encoder.require_text("document").token_starts(text)
    cuts = [0, *(text.rfind(" ", 0, starts[len(starts) * number // count]) for number in range(1, count)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]


def _right(engine: Engine, cache: CompressedCache, question: Question) -> bool:
    answer = engine.answer(cache, question.text, max_new_tokens=len(question.answer) + 8)
    return answer.text.strip() == question.answer
