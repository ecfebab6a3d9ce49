"""How often a search names the document that a question is about, by summaries of caches and by BM25 over the texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from kvshelf.engine.summary import Codes, score, unpacked
from kvshelf.samples.tasks import Haystack, Task, TaskDocument, make_document
from kvshelf_bench.quality.retrieval import EVALUATION_SEED, counter

if TYPE_CHECKING:
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.engine.engine import Engine

Ask = Callable[[str], Sequence[float]]
"""The score of each document for a question."""

CODEC: Final = "int4"


@dataclass(frozen=True)
class SearchRow:
    """A way to search, measured. at_1, at_5: the share of the questions whose document is the first, or among the first
    five. nbytes: of a document's summary, the mean; share: of the bytes of its whole cache under `CODEC`; both 0 where
    the texts themselves are searched. ms: of a question, the median."""

    name: str
    at_1: float
    at_5: float
    nbytes: float
    share: float
    ms: float


def documents(
    engine: Engine, tasks: Sequence[Task], haystacks: Sequence[Haystack], tokens: int, count: int, seed: int
) -> Iterator[TaskDocument]:
    """Documents of at most `tokens` tokens, of all tasks and haystacks in turn, from consecutive seeds. Two may have a
    fact about the same thing, so no search can be right every time."""
    kinds = islice(cycle(product(tasks, haystacks)), count)
    for number, (task, haystack) in enumerate(kinds):
        yield make_document(task, haystack, tokens, EVALUATION_SEED + seed + number, counter(engine))


def measure(
    engine: Engine, documents: Sequence[TaskDocument], progress: Callable[[], None] = lambda: None
) -> list[SearchRow]:
    """Search all documents for the first question about each: by summaries, by their first layer alone, and by BM25.

    Raises `PolicyUnsupported` for a model whose documents have no summaries.
    """
    engine.searcher.require()
    caches = []
    for document in documents:
        caches.append(engine.encoded(engine.compress(document.text, policy="full"), CODEC))
        progress()
    summaries = [unpacked(cache.summary) for cache in caches]
    first = [summary[:1] for summary in summaries]
    return [
        _way("summaries", _by_codes(engine, summaries), documents, caches, summaries),
        _way("summaries, first layer alone", _by_codes(engine, first), documents, caches, first),
        _way("BM25 over the texts", _by_bm25(documents), documents, caches, [[] for _ in documents]),
    ]


def _by_codes(engine: Engine, summaries: Sequence[Sequence[Codes]]) -> Ask:
    layers = len(summaries[0])

    def ask(question: str) -> Sequence[float]:
        return score(engine.searcher.codes(engine.searcher.encode(question))[:layers], summaries)

    return ask


def _by_bm25(documents: Sequence[TaskDocument]) -> Ask:
    import bm25s

    def words(texts: list[str]) -> list[list[str]]:
        tokens: list[list[str]] = bm25s.tokenize(texts, stopwords=None, return_ids=False, show_progress=False)
        return tokens

    index = bm25s.BM25()
    index.index(words([document.text for document in documents]), show_progress=False)

    def ask(question: str) -> Sequence[float]:
        scores: Sequence[float] = index.get_scores(words([question])[0]).tolist()
        return scores

    return ask


def _way(
    name: str,
    ask: Ask,
    documents: Sequence[TaskDocument],
    caches: Sequence[CompressedCache],
    summaries: Sequence[Sequence[Codes]],
) -> SearchRow:
    ranks, seconds = [], []
    for number, document in enumerate(documents):
        started = time.perf_counter()
        scores = ask(document.questions[0].text)
        seconds.append(time.perf_counter() - started)
        ranks.append(sum(other >= scores[number] for other in scores) - 1)  # equal ones count as before it
    nbytes = fmean(sum(codes.nbytes for codes in summary) for summary in summaries)
    at_1, at_5 = (fmean(rank < first for rank in ranks) for first in (1, 5))
    return SearchRow(name, at_1, at_5, nbytes, nbytes / fmean(cache.nbytes for cache in caches), 1000 * median(seconds))
