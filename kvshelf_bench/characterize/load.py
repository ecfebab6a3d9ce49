"""Questions that arrive at a rate, whether the ones before are answered or not: after the comparison of vLLM, InfiniGen
and H2O over request rate, model size and sparsity (arXiv 2604.05012)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, Final

from rich.table import Table

from kvshelf.api.answers import Answer
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.decode.generation import Sampling
from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.methods.policies import POLICIES
from kvshelf.model import calibration
from kvshelf.model.source import BUNDLED
from kvshelf.samples.suite import CaseAsk, make_case, score
from kvshelf.training.skew_search import find_skews
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits
from kvshelf.workers.replica.ticket import Ticket
from kvshelf_bench.engines import scheduled
from kvshelf_bench.measure import with_peak
from kvshelf_bench.quality.grid import Reading, Row, Variant
from kvshelf_bench.quality.outcome import selecting
from kvshelf_bench.quality.retrieval import EVALUATION_SEED, counter
from kvshelf_bench.speed.subject import QUESTION_TOKENS, Subject, random_layers

_READ: Final = "read:"
"""Before the name of a selector that is a policy's, too."""

_CODEC: Final = "int4"
_SPARE_TOKENS: Final = 8
"""Tokens of an answer beyond the characters of its reference."""


@dataclass(frozen=True)
class System:
    """A system, and the share of a document's entries that it keeps (a policy) or an answer token reads (a selector).

    system: a policy with its parameters, as `lagkv:lag=64`, or a selector, as `quest:page=8`, `policy:snapkv` or
    `read:infllm`. All caches are under one codec, so that what is kept or read alone differs.
    """

    system: str
    share: float = 1.0

    @property
    def selects(self) -> bool:
        return self.system.startswith(_READ) or self.system.partition(":")[0] not in POLICIES

    @property
    def kept(self) -> dict[str, Any]:
        """The arguments of `Engine.prepare`. Raises `InvalidRequest` for a system that is none."""
        return Row(Variant.parse("full" if self.selects else self.system), 1 - self.share).sizes

    def reading(self, cache: CompressedCache) -> dict[str, Any]:
        """The arguments of `Engine.answer` that select; none: an answer token reads what is stored. Raises
        `InvalidRequest` for a system that is none."""
        return selecting(cache, self.reads)

    @property
    def reads(self) -> Reading | None:
        """The selector. Raises `InvalidRequest` for a system that is none."""
        return Reading.parse(self.system.removeprefix(_READ), self.share) if self.selects else None


@dataclass(frozen=True)
class Offer:
    """The load: `requests` questions at each of `rates` a second, on `documents` documents of `tokens` tokens, each
    answered by `answer_tokens`. Gaps are drawn from an exponential distribution (Poisson arrivals)."""

    rates: Sequence[float]
    requests: int = 32
    documents: int = 3
    tokens: int = 2048
    answer_tokens: int = 32
    seed: int = 0

    def arrivals(self, rate: float) -> Iterator[tuple[float, int, int]]:
        """Seconds from the start, document and number of each question, the same for every way."""
        draw, due = random.Random(f"{self.seed}/{rate}"), 0.0
        for number in range(self.requests):
            due += draw.expovariate(rate)
            yield due, draw.randrange(self.documents), number


@dataclass(frozen=True)
class LoadCell:
    """One way at one rate. first_s, first_p95_s: median and 95th percentile of the time from a question's arrival to
    its first token. tokens_per_s: new tokens of all answers over the time from the first arrival to the last end.
    memory_bytes: of all documents in memory, and what answering added at most. equivalents: PTE of an answer, the mean.
    exact: share of right answers to the questions that documents of the bundled model come with; None for others."""

    model: str
    parameters: int
    rate: float
    system: str
    share: float
    first_s: float
    first_p95_s: float
    tokens_per_s: float
    memory_bytes: int
    equivalents: float | None
    exact: float | None


def characterized(subject: Subject, name: str, ways: Sequence[System], offer: Offer) -> Iterator[LoadCell]:
    """Every rate and way. All ways of a rate run after each other: a neighbour slows them alike."""
    engine = subject.engine
    documents, asks = _documents(subject, name, offer)
    if random_layers(name) is not None:  # nobody has calibrated it
        path = calibration.paths(engine.identity.weights, Path(subject.source)).skews
        path.parent.mkdir()
        calibration.save(find_skews(engine, subject.tokens(offer.tokens, seed=9)), path)
    caches = {
        way: [engine.encoded(engine.run(engine.prepare(document, **way.kept)).cache, _CODEC) for document in documents]
        for way in ways
    }
    exact = {way: _exact(subject, caches[way], asks, way) for way in ways}
    with scheduled(engine, SchedulerLimits(max_waiting=offer.requests)) as scheduler:
        answered_at(scheduler, subject, caches[ways[0]], ways[0], Offer([1e3], 4), 1e3)  # nothing is made twice
        for rate, way in product(offer.rates, ways):
            run = partial(answered_at, scheduler, subject, caches[way], way, offer, rate)
            served, added = with_peak(subject.device, run)
            documents_bytes = sum(engine.attach(cache).nbytes for cache in caches[way])
            yield _cell(subject, name, rate, way, served, documents_bytes + added, exact[way])


@dataclass(frozen=True)
class _Served:
    """first_s: of each question, from its arrival. ended_s: from the first arrival to the end of the last answer."""

    first_s: list[float]
    ended_s: float
    answers: list[Answer]


def answered_at(
    scheduler: Scheduler, subject: Subject, caches: Sequence[CompressedCache], way: System, offer: Offer, rate: float
) -> _Served:
    engine, sampling = subject.engine, Sampling(offer.answer_tokens)
    ended: list[float] = []
    tickets: list[tuple[float, Ticket[Answer]]] = []
    started = time.monotonic()
    arrivals = list(offer.arrivals(rate))
    for due, number, seed in arrivals:
        time.sleep(max(0.0, started + due - time.monotonic()))
        cache, selection = caches[number % len(caches)], None
        document = engine.attach(cache)
        if reading := way.reading(cache):
            named = {"tokens": reading["select_tokens"], "params": reading["select_params"]}
            selection = engine.select(document, reading["select"], question_tokens=QUESTION_TOKENS, **named)
        question = subject.tokens(QUESTION_TOKENS, seed=1000 + seed)
        ticket = scheduler.generate(document, question, sampling, selection)
        ticket.future.add_done_callback(lambda _: ended.append(time.monotonic()))
        tickets.append((started + due, ticket))
    answers = [ticket.future.result() for _, ticket in tickets]
    # From the arrival: a question that came late to the scheduler, because the one before held this thread, waited.
    firsts = [ticket.submitted + ticket.first_s - due for due, ticket in tickets]
    return _Served(firsts, max(ended) - started - arrivals[0][0], answers)


def _cell(
    subject: Subject, name: str, rate: float, way: System, served: _Served, memory_bytes: int, exact: float | None
) -> LoadCell:
    costs = [cost for answer in served.answers if (cost := answer.usage.prefill_token_equivalents) is not None]
    cuts = quantiles(served.first_s, n=20, method="inclusive")
    return LoadCell(
        model=name,
        parameters=subject.engine.equivalents.parameters,
        rate=rate,
        system=way.system,
        share=way.share,
        first_s=cuts[9],
        first_p95_s=cuts[18],
        tokens_per_s=sum(len(answer.token_ids) for answer in served.answers) / served.ended_s,
        memory_bytes=memory_bytes,
        equivalents=fmean(costs) if costs else None,
        exact=exact,
    )


def _documents(subject: Subject, name: str, offer: Offer) -> tuple[list[Any], list[Sequence[CaseAsk]]]:
    """Documents, and for the bundled model questions about each: other models were not trained to find numbers."""
    if name not in BUNDLED:
        return [subject.tokens(offer.tokens, seed=10 + number) for number in range(offer.documents)], []
    count, tokens = counter(subject.engine), offer.tokens - subject.engine.prepare("x", policy="full").num_tokens
    seeds = range(EVALUATION_SEED + offer.seed, EVALUATION_SEED + offer.seed + offer.documents)
    cases = [make_case("multikey", "prose", tokens, seed, count, questions=8) for seed in seeds]
    return [case.text for case in cases], [case.asks for case in cases]


def _exact(
    subject: Subject, caches: Sequence[CompressedCache], asks: Sequence[Sequence[CaseAsk]], way: System
) -> float | None:
    engine, hits = subject.engine, []
    for cache, questions in zip(caches, asks, strict=False):
        for ask in questions:
            longest = _SPARE_TOKENS + sum(map(len, ask.references))
            answer = engine.answer(cache, ask.text, max_new_tokens=longest, **way.reading(cache))
            hits.append(score(ask, answer.text).exact)
    return fmean(hits) if hits else None


_LEAST: Final = 128
"""Entries that a share must have room for: a selector always reads the first and the last pages."""


def require_known(systems: Sequence[str], shares: Sequence[float], tokens: int) -> list[System]:
    """The ways, `full` once. Raises `InvalidRequest` for an unknown system, and for a share too small for `tokens`."""
    if min(shares) * tokens < _LEAST:
        raise InvalidRequest(
            f"a share of {min(shares):g} of {tokens} tokens is less than {_LEAST} entries; give longer documents or "
            "larger shares",
            param="shares",
        )
    ways = []
    for system in systems:
        way = System(system)
        try:
            kept, reads = way.kept, way.reads
        except KvshelfError as error:
            raise InvalidRequest(f"--systems has {system!r}: {error.message}", param="systems") from error
        whole = reads is None and "compression_ratio" not in kept
        ways += [System(system, share) for share in ((1.0,) if whole else shares)]
    return ways


EVEN: Final = 0.05
"""Ways that differ from the best by no more than this share of it win with it."""


@dataclass(frozen=True)
class _Measure:
    title: str
    value: Callable[[LoadCell], float | None]
    shown: Callable[[float], str]
    most: bool = False

    def winners(self, cells: Sequence[LoadCell]) -> str:
        """The ways that are best, or even with it, the best one first with its value."""
        values = {cell.system: value for cell in cells if (value := self.value(cell)) is not None}
        if not values:
            return "-"
        ranked = sorted(values, key=values.__getitem__, reverse=self.most)
        best = values[ranked[0]]
        even = [name for name in ranked if abs(values[name] - best) <= EVEN * abs(best)]
        return f"{', '.join(even)}: {self.shown(best)}" if len(even) < len(values) else f"all: {self.shown(best)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


MEASURES: Final = (
    _Measure("first token", lambda cell: cell.first_s, _ms),
    _Measure("p95", lambda cell: cell.first_p95_s, _ms),
    _Measure("tokens/s", lambda cell: cell.tokens_per_s, lambda rate: f"{rate:,.0f}", most=True),
    _Measure("memory", lambda cell: cell.memory_bytes, lambda nbytes: f"{nbytes / 1e6:,.1f} MB"),
    _Measure("PTE", lambda cell: cell.equivalents, lambda cost: f"{cost:,.0f}"),
    _Measure("exact", lambda cell: cell.exact, lambda share: f"{share:.0%}", most=True),
)


def cells_table(cells: Sequence[LoadCell]) -> Table:
    table = Table("model", "rate", "system", "share", *(measure.title for measure in MEASURES))
    table.title = (
        "documents under int4; of the share, infinigen and quest read and h2o and kvzip keep; PTE of an answer"
    )
    for cell in cells:
        values = ((measure, measure.value(cell)) for measure in MEASURES)
        shown = ("-" if value is None else measure.shown(value) for measure, value in values)
        table.add_row(cell.model, f"{cell.rate:g}/s", cell.system, f"{cell.share:g}", *shown)
    return table


def winners_table(cells: Sequence[LoadCell]) -> Table:
    """Which wins where: a row for each model, rate and share. `full` has no share and is compared in each row."""
    table = Table("model", "rate", "share", *(measure.title for measure in MEASURES))
    table.title = f"which wins where: the best, and those within {EVEN:.0%} of it"
    shares = sorted({cell.share for cell in cells if cell.system != "full"}, reverse=True) or [1.0]
    for model, rate in dict.fromkeys((cell.model, cell.rate) for cell in cells):
        of_rate = [cell for cell in cells if (cell.model, cell.rate) == (model, rate)]
        for share in shares:
            compared = [cell for cell in of_rate if cell.system == "full" or cell.share == share]
            table.add_row(model, f"{rate:g}/s", f"{share:g}", *(measure.winners(compared) for measure in MEASURES))
    return table
