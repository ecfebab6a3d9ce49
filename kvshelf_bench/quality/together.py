"""One question about several documents, beside the one that knows, one prefill of all, and routes among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

from kvshelf.api.answers import Answer
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.kernels.rates import cost
from kvshelf.samples.tasks import MULTIKEY_FACTS, SHORT_VALUE_DIGITS, make_facts, write_document
from kvshelf_bench.measure import Spread, ratios, wilson
from kvshelf_bench.quality.dataset.documents import Document, read_documents
from kvshelf_bench.quality.dataset.measuring import score_of
from kvshelf_bench.quality.dataset.rows import Question
from kvshelf_bench.quality.options import Sets
from kvshelf_bench.quality.retrieval import counter

ROUTES: tuple[Literal["likelihood", "attention"], ...] = ("likelihood", "attention")

_TIMED = 5
"""Questions of each number of documents whose first tokens are timed."""

_LONGEST_ANSWER = 32
"""Tokens of an answer of which a dataset says nothing."""

_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Routed:
    """exact: right answers by this route. right_first: questions of which the right document was read, and had the
    largest share. first_token: the time to the first token over the time that it takes to prefill all documents."""

    route: str
    exact: int
    right_first: int
    first_token: Spread


@dataclass(frozen=True)
class Together:
    """`questions` about `documents` documents together, of `tokens` tokens each on average.

    exact: right answers of all documents together; alone: of the one that has the fact; joined: of one prefill of all
    texts, None where that is too long for the model; selected: together, where a token reads a quarter of one
    document's entries over all documents, None without a selector. first_source: answers whose first source is the
    right document. low, high: bounds of the share of `exact` (95 %). first_token: the time to the first token of all
    together over the sum of the times of each alone."""

    documents: int
    tokens: int
    questions: int
    exact: int
    low: float
    high: float
    alone: int
    joined: int | None
    selected: int | None
    first_source: int
    first_token: Spread
    routed: tuple[Routed, ...]


@dataclass(frozen=True)
class _Set:
    """Documents that are asked together. whole: one prefill of all, None where it is too long."""

    caches: Sequence[CompressedCache]
    whole: CompressedCache | None
    prefill_s: float

    @property
    def tokens(self) -> float:
        """Of a document, on average."""
        return sum(cache.num_tokens for cache in self.caches) / len(self.caches)


@dataclass(frozen=True)
class _Case:
    """A question about a set, and the place of the document that has the answer."""

    question: Question
    place: int
    of: _Set

    def answer(self, engine: Engine, caches: Sequence[CompressedCache], **options: Any) -> Answer:
        longest = self.question.max_new_tokens or _LONGEST_ANSWER
        return engine.answer(caches, self.question.text, max_new_tokens=longest, **options)

    def right(self, answer: Answer) -> bool:
        return score_of(self.question, answer.text) == 1

    def right_first(self, answer: Answer) -> bool:
        return max(range(len(answer.sources)), key=lambda at: answer.sources[at]) == self.place


def measure_together(
    engine: Engine,
    documents: int,
    sets: Sets,
    progress: Callable[[], None] = lambda: None,
) -> Together:
    """Sets of so many documents each, and questions about each set."""
    cases: list[_Case] = []
    for number in range(sets.sets):
        cases += _cases(engine, documents, sets, number)
        progress()
    together = [case.answer(engine, case.of.caches) for case in cases]
    hits = _count(_Case.right, cases, together)
    low, high = wilson(hits, len(cases))
    wholes = [case.of.whole for case in cases]
    joined = [case.right(case.answer(engine, [whole])) for case, whole in zip(cases, wholes, strict=True) if whole]
    timed = cases[:: max(1, len(cases) // _TIMED)][:_TIMED]
    first_s = [_first_token_s(engine, case, case.of.caches) for case in timed]
    alone_s = [sum(_first_token_s(engine, case, [cache]) for cache in case.of.caches) for case in timed]
    return Together(
        documents=documents,
        tokens=round(sum(case.of.tokens for case in cases) / len(cases)),
        questions=len(cases),
        exact=hits,
        low=low,
        high=high,
        alone=sum(case.right(case.answer(engine, [case.of.caches[case.place]])) for case in cases),
        joined=None if None in wholes else sum(joined),
        selected=_selected(engine, cases, sets.select) if sets.select else None,
        first_source=_count(_Case.right_first, cases, together),
        first_token=ratios(first_s, alone_s),
        routed=tuple(_routed(engine, route, cases, timed) for route in ROUTES),
    )


def _selected(engine: Engine, cases: Sequence[_Case], selector: str) -> int:
    """Right answers, where a token reads as many entries as a quarter of a document has, of all documents."""
    answers = [
        case.answer(engine, case.of.caches, select=selector, select_tokens=max(round(case.of.tokens / 4), 64))
        for case in cases
    ]
    return _count(_Case.right, cases, answers)


def _count(holds: Callable[[_Case, Answer], bool], cases: Sequence[_Case], answers: Sequence[Answer]) -> int:
    return sum(map(holds, cases, answers))


def _routed(engine: Engine, route: str, cases: Sequence[_Case], timed: Sequence[_Case]) -> Routed:
    answers = [case.answer(engine, case.of.caches, route=route) for case in cases]
    first_tokens = [_first_token_s(engine, case, case.of.caches, route=route) for case in timed]
    return Routed(
        route,
        exact=_count(_Case.right, cases, answers),
        right_first=_count(_Case.right_first, cases, answers),
        first_token=ratios(first_tokens, [case.of.prefill_s for case in timed]),
    )


def _cases(engine: Engine, count: int, sets: Sets, number: int) -> list[_Case]:
    if sets.dataset is None:
        documents = _make_documents(engine, count, sets.tokens, f"together/{count}/{sets.tokens}/{sets.seed}/{number}")
    else:
        documents = _draw_documents(read_documents(sets.dataset), count, f"{sets.seed}/{number}")
    prefills = [partial(engine.compress, document.context, policy="full") for document in documents]
    prefill_s = sum(cost(prefill, engine.passes.devices.inputs).seconds for prefill in prefills)
    caches = [_compressed(engine, document.context, sets) for document in documents]
    text = _SEPARATOR.join(document.context for document in documents)
    fits = counter(engine)(text) + sets.tokens <= engine.max_tokens
    documents_set = _Set(caches, _compressed(engine, text, sets) if fits else None, prefill_s)
    askable = [(place, question) for place, document in enumerate(documents) for question in document.questions]
    chosen = random.Random(f"{sets.seed}/{number}").sample(askable, min(sets.questions, len(askable)))
    return [_Case(question, place, documents_set) for place, question in chosen]


def _draw_documents(documents: Sequence[Document], count: int, seed: str) -> list[Document]:
    """So many documents of a dataset. Raises `InvalidRequest` where it has fewer."""
    if len(documents) < count:
        raise InvalidRequest(
            f"--documents is {count}, and the dataset has {len(documents)}; ask fewer together", param="documents"
        )
    return random.Random(seed).sample(list(documents), count)


def _make_documents(engine: Engine, count: int, tokens: int, seed: str) -> list[Document]:
    """Documents of which no two have a fact about one thing."""
    rng, tokens_of = random.Random(seed), counter(engine)
    digits = [rng.randint(*SHORT_VALUE_DIGITS) for _ in range(count * MULTIKEY_FACTS)]
    facts = make_facts(rng, digits)
    documents = []
    for first in range(0, len(facts), MULTIKEY_FACTS):
        document = write_document(rng, facts[first : first + MULTIKEY_FACTS], "prose", tokens, tokens_of)
        questions = (
            Question(one.text, (one.answer,), scorer="exact", max_new_tokens=len(one.answer) + 8)
            for one in document.questions
        )
        documents.append(Document(f"{first}", document.text, tuple(questions)))
    return documents


def _compressed(engine: Engine, text: str, sets: Sets) -> CompressedCache:
    return engine.encoded(engine.compress(text, policy=sets.policy), sets.codec)


def _first_token_s(engine: Engine, case: _Case, caches: Sequence[CompressedCache], **options: Any) -> float:
    """Seconds to the first token, the median of three."""
    run = partial(engine.answer, caches, case.question.text, max_new_tokens=1, **options)
    return median(cost(run, engine.passes.devices.inputs).seconds for _ in range(3))
