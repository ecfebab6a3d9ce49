"""One question about several documents, beside the same question about the one that knows, and one prefill of all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.kernels.rates import cost
from kvshelf.samples.tasks import MULTIKEY_FACTS, SHORT_VALUE_DIGITS, Question, make_facts, write_document
from kvshelf_bench.measure import Spread, ratios, wilson
from kvshelf_bench.quality.options import Sets
from kvshelf_bench.quality.retrieval import counter

_TIMED = 5
"""Questions of each number of documents whose first tokens are timed."""

_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Together:
    """`questions` about `documents` documents together, of facts that no two documents share.

    exact: right answers of all documents together; alone: of the one that has the fact; joined: of one prefill of all
    texts, None where that is too long for the model; selected: together, where a token reads `select_tokens` entries
    over all documents by `selector`. first_source: answers whose first source is the right document. low, high: bounds
    of the share of `exact` (95 %). first_token: the time to the first token of all together over the sum of the times
    of each alone."""

    documents: int
    tokens: int
    questions: int
    exact: int
    low: float
    high: float
    alone: int
    joined: int | None
    selector: str
    select_tokens: int
    selected: int
    first_source: int
    first_token: Spread


@dataclass(frozen=True)
class _Asked:
    """A question, the place of the document that has the answer, and the caches of all."""

    question: Question
    place: int
    caches: Sequence[CompressedCache]


def measure_together(
    engine: Engine,
    documents: int,
    sets: Sets,
    progress: Callable[[], None] = lambda: None,
) -> Together:
    """Sets of so many documents each, and questions about each set."""
    tokens = sets.tokens
    asked: list[_Asked] = []
    joined: list[CompressedCache | None] = []
    for number in range(sets.sets):
        texts, known = _documents(engine, documents, tokens, f"together/{documents}/{tokens}/{sets.seed}/{number}")
        caches = [_compressed(engine, text, sets) for text in texts]
        whole = _SEPARATOR.join(texts)
        fits = counter(engine)(whole) + tokens <= engine.max_tokens
        joined += [_compressed(engine, whole, sets) if fits else None] * sets.questions
        chosen = random.Random(f"{sets.seed}/{number}").sample(known, sets.questions)
        asked += [_Asked(question, place, caches) for place, question in chosen]
        progress()
    together = [_answer(engine, each.caches, each.question) for each in asked]
    hits = sum(right for right, _ in together)
    low, high = wilson(hits, len(asked))
    select_tokens = max(tokens // 4, 64)
    of_one = [each and _answer(engine, [each], ask.question)[0] for each, ask in zip(joined, asked, strict=True)]
    return Together(
        documents=documents,
        tokens=tokens,
        questions=len(asked),
        exact=hits,
        low=low,
        high=high,
        alone=sum(_answer(engine, [each.caches[each.place]], each.question)[0] for each in asked),
        joined=sum(map(bool, of_one)) if None not in joined else None,
        selector=sets.select,
        select_tokens=select_tokens,
        selected=sum(_answer(engine, each.caches, each.question, sets.select, select_tokens)[0] for each in asked),
        first_source=sum(first == each.place for (_, first), each in zip(together, asked, strict=True)),
        first_token=_first_tokens(engine, asked[:: max(1, len(asked) // _TIMED)][:_TIMED]),
    )


def _documents(engine: Engine, documents: int, tokens: int, seed: str) -> tuple[list[str], list[tuple[int, Question]]]:
    """The texts, and each question with the place of its document. No two documents have a fact about one thing."""
    rng, count = random.Random(seed), counter(engine)
    digits = [rng.randint(*SHORT_VALUE_DIGITS) for _ in range(documents * MULTIKEY_FACTS)]
    facts = make_facts(rng, digits)
    made = [
        write_document(rng, facts[first : first + MULTIKEY_FACTS], "prose", tokens, count)
        for first in range(0, len(facts), MULTIKEY_FACTS)
    ]
    known = [(place, question) for place, document in enumerate(made) for question in document.questions]
    return [document.text for document in made], known


def _compressed(engine: Engine, text: str, sets: Sets) -> CompressedCache:
    return engine.encoded(engine.compress(text, policy=sets.policy), sets.codec)


def _answer(
    engine: Engine,
    caches: Sequence[CompressedCache],
    question: Question,
    select: str | None = None,
    select_tokens: int | None = None,
) -> tuple[bool, int]:
    """Whether the answer is right, and the place of its first source."""
    longest = len(question.answer) + 8
    answer = engine.answer(caches, question.text, max_new_tokens=longest, select=select, select_tokens=select_tokens)
    first = max(range(len(caches)), key=lambda place: answer.sources[place])
    return answer.text.strip() == question.answer, first


def _first_tokens(engine: Engine, asked: Sequence[_Asked]) -> Spread:
    def seconds(caches: Sequence[CompressedCache], question: str) -> float:
        run = partial(engine.answer, caches, question, max_new_tokens=1)
        return median(cost(run, engine.passes.devices.inputs).seconds for _ in range(3))

    both = [
        (seconds(each.caches, each.question.text), sum(seconds([one], each.question.text) for one in each.caches))
        for each in asked
    ]
    return ratios([together for together, _ in both], [alone for _, alone in both])
