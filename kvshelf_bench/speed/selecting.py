"""A decode step of answers that read a part of their documents, beside one that reads all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.selection import LastChoice, Selection
from kvshelf.kernels.rates import cost
from kvshelf_bench.engines import endless_answers
from kvshelf_bench.measure import Spread, interleaved, ratios
from kvshelf_bench.quality.grid import Reading
from kvshelf_bench.speed.subject import QUESTION_TOKENS, Subject

SELECTORS = ("quest", "mpcache", "mpcache:share=2")
"""Those that choose at each token and need no calibration."""

_CODEC = "int4"
_STEPS = 16
_WARM_UP = 2
_MOST_STEPS = 512
_SHARE = 16


@dataclass(frozen=True)
class Selecting:
    """Steps of `rows` answers on as many documents of `document_tokens` under int4, of which a token reads 1 / 16.

    dense_s, selected_s: seconds of a step; ratio: the second over the first within a round. choice_s: what a step takes
    beyond one that reads the same entries without choosing them, and choice_share its part of the step. read_tokens:
    entries of a KV head that were read.
    """

    selector: str
    rows: int
    document_tokens: int
    read_tokens: int
    dense_s: Spread
    selected_s: Spread
    ratio: Spread
    choice_s: Spread
    choice_share: Spread


def selectings(subject: Subject, lengths: Sequence[int], rows: Sequence[int], rounds: int) -> Iterator[Selecting]:
    engine = subject.engine
    for tokens in lengths:
        cache = engine.encoded(engine.compress(subject.tokens(tokens, seed=10), policy="full"), _CODEC)
        blob = cache.to_bytes()
        # Equal documents in memory of their own: nothing is in the processor's caches for another row.
        caches = [cache, *(CompressedCache.from_bytes(blob) for _ in range(max(rows) - 1))]
        for selector, count in product(SELECTORS, rows):
            yield selecting(subject, caches[:count], selector, rounds)


def selecting(subject: Subject, caches: Sequence[CompressedCache], selector: str, rounds: int) -> Selecting:
    """One selector, and an answer for each of these caches of equally long documents."""
    tokens = caches[0].num_tokens
    selections: list[Selection] = []

    def selected() -> float:
        selections[:] = [selection_of(subject, cache, selector, tokens // _SHARE) for cache in caches]
        return _step_s(subject, caches, selections)

    def fixed() -> float:
        engine, layers = subject.engine, len(subject.engine.passes.layer_shapes)
        pairs = zip(caches, selections, strict=True)
        return _step_s(subject, caches, [LastChoice(engine.attach(cache), chosen, layers) for cache, chosen in pairs])

    dense = [None] * len(caches)
    ways = {"dense": lambda: _step_s(subject, caches, dense), "selected": selected, "fixed": fixed}
    runs = interleaved(ways, rounds)
    choices = [of_both - reading for of_both, reading in zip(runs["selected"], runs["fixed"], strict=True)]
    return Selecting(
        selector=selector,
        rows=len(caches),
        document_tokens=tokens,
        read_tokens=selections[0].read_tokens,
        dense_s=Spread.of(runs["dense"]),
        selected_s=Spread.of(runs["selected"]),
        ratio=ratios(runs["selected"], runs["dense"]),
        choice_s=Spread.of(choices),
        choice_share=ratios(choices, runs["selected"]),
    )


def selection_of(subject: Subject, cache: CompressedCache, selector: str, budget: int) -> Selection:
    engine = subject.engine
    reading = Reading.parse(selector, 1 / _SHARE)
    chosen = engine.select(
        engine.attach(cache),
        reading.method,
        question_tokens=QUESTION_TOKENS,
        tokens=budget,
        params=dict(reading.params),
    )
    assert chosen is not None, "the budget is a part of the document"
    return chosen


def _step_s(subject: Subject, caches: Sequence[CompressedCache], selections: Sequence[Selection | None]) -> float:
    with stepping(subject, caches, selections) as step:

        def steps() -> None:
            for _ in range(_STEPS):
                step()

        return cost(steps, subject.device).seconds / _STEPS


@contextmanager
def stepping(
    subject: Subject,
    caches: Sequence[CompressedCache],
    selections: Sequence[Selection | None] | None = None,
    batch: DecodeBatch | None = None,
) -> Iterator[Callable[[], None]]:
    """Inside the block, a call is one decode step of an answer for each cache, behind its question and first tokens.
    selections: what each reads of its document; None: all. batch: one without answers; None: the engine's."""
    engine, batch = subject.engine, batch or subject.engine.batch()
    question, sampling = subject.tokens(QUESTION_TOKENS, seed=1000), Sampling(_MOST_STEPS)
    with endless_answers(engine), kvshelf_attention(engine.model):
        answers = [
            engine.start(engine.attach(cache), question, sampling, selection)
            for cache, selection in zip(caches, selections or [None] * len(caches), strict=True)
        ]

        def step() -> None:
            for output in batch.step(answers):
                if isinstance(output, Exception):
                    raise output

        while any(len(answer.token_ids) < _WARM_UP for answer in answers):
            step()
        yield step
