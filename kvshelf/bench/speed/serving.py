"""Documents prefilled and questions answered beside vLLM: same weights, token ids, dtype and threads, in wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvshelf.bench.measure import Cost, Spread, cost, interleaved, ratios
from kvshelf.bench.speed.decode import DOCUMENT_TOKENS, NEW_TOKENS, endless_answers
from kvshelf.bench.speed.peer import Peer
from kvshelf.bench.speed.subject import QUESTION_TOKENS, Subject
from kvshelf.store.artifact.cache import CompressedCache
from kvshelf.workers.engine.decode.generation import Sampling
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits

DOCUMENTS = 32
LONG_TOKENS = 8192
LONGEST = LONG_TOKENS + QUESTION_TOKENS + NEW_TOKENS
"""Tokens of the longest sequence, for which vLLM has to be set up."""

_REST_S = 0.5
"""Before each turn: threads of the engine before it may still look for work, on the cores of whoever is next."""

Ask = Callable[[Sequence[int], Sequence[Sequence[int]], int], Cost]
"""The cost of answers to questions on these documents, by number, all at once, of so many tokens each."""


@dataclass(frozen=True)
class ServingRow:
    """rates: of each way, wall seconds or new tokens a second, as `unit` says. beside_vllm: how many times as fast as
    vLLM in the same round, in wall time; processor_beside_vllm: in processor time, which neighbours disturb less.
    equivalents, saved: of each of our ways, prefill token equivalents of one answer, and how many more it would cost
    without the shelf; empty for prefills, and on a device whose intensity is unknown."""

    work: str
    unit: str
    rates: dict[str, Spread]
    beside_vllm: dict[str, Spread]
    processor_beside_vllm: dict[str, Spread]
    equivalents: dict[str, float] = field(default_factory=dict)
    saved: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Serving:
    """ways: "full", "keydiff" and, if it was given, "vllm"."""

    removed: float
    rows: list[ServingRow]


def servings(subject: Subject, vllm: Peer | None, rounds: int, removed: float) -> Serving:
    """Every way in turn, the same ids for all; new ids in every round, so that no cache has seen them.

    The documents of the questions are prefilled once, so of that there is one measurement: vLLM takes them in one go,
    and kvshelf each in turn under every policy.
    """
    engine = subject.engine
    documents = [subject.tokens(DOCUMENT_TOKENS, seed=10 + i) for i in range(DOCUMENTS)]
    documents.append(subject.tokens(LONG_TOKENS, seed=9))
    engine.compress(subject.tokens(DOCUMENT_TOKENS, seed=1))  # nothing is made for the first time where it is measured
    most = max(len(work.documents) for work in WORKS)
    scheduler = Scheduler(engine, SchedulerLimits(max_open=most, max_waiting=most))
    scheduler.start()
    try:
        with endless_answers(subject):
            caches, prefills = _prefilled(subject, documents, removed)
            taken = {way: [_together(each[:-1])] for way, each in prefills.items()}
            asks: dict[str, Ask] = {way: _ours(scheduler, kept) for way, kept in caches.items()}
            if vllm is not None:
                taken["vllm"] = [_asked(vllm, documents[:-1], 1)]
                _asked(vllm, documents[-1:], 1)
                asks["vllm"] = _theirs(vllm, documents)
            rows = [_row(f"{DOCUMENTS} documents of {DOCUMENT_TOKENS:,} tokens prefilled", taken, 0)]
            rows.append(_long_prefill(subject, vllm, rounds, removed))
            rows += [_costed(subject, caches, work, _answers(subject, asks, rounds, work)) for work in WORKS]
    finally:
        scheduler.stop()
    return Serving(removed, rows)


def _prefilled(
    subject: Subject, documents: Sequence[Sequence[int]], removed: float
) -> tuple[dict[str, list[CompressedCache]], dict[str, list[Cost]]]:
    """The documents' caches under each policy, and what each took."""
    caches: dict[str, list[CompressedCache]] = {}
    taken: dict[str, list[Cost]] = {}
    for ids in documents:
        for way, options in _ways(removed).items():
            kept = caches.setdefault(way, [])
            once = cost(lambda: kept.append(subject.engine.compress(ids, **options)))  # noqa: B023
            taken.setdefault(way, []).append(once)
    return caches, taken


def _together(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(each.seconds for each in costs), sum(each.wall_s for each in costs))


def _ways(removed: float) -> dict[str, dict[str, Any]]:
    return {"full": {"policy": "full"}, "keydiff": {"policy": "keydiff", "compression_ratio": removed}}


@dataclass(frozen=True)
class Work:
    """Questions on documents, by number; `new_tokens` of each answer."""

    name: str
    documents: list[int]
    new_tokens: int


WORKS = (
    Work(f"first token of a question on {LONG_TOKENS:,} tokens", [DOCUMENTS], 1),
    Work(f"{DOCUMENTS} questions on {DOCUMENTS} documents", list(range(DOCUMENTS)), NEW_TOKENS),
    Work(f"{DOCUMENTS} questions on one document", [0] * DOCUMENTS, NEW_TOKENS),
    Work("one question alone", [0], NEW_TOKENS),
)


def _long_prefill(subject: Subject, vllm: Peer | None, rounds: int, removed: float) -> ServingRow:
    turn = {"seed": 0}

    def fresh() -> list[int]:
        time.sleep(_REST_S)
        return subject.tokens(LONG_TOKENS, seed=100_000 + turn["seed"])

    def compressed(options: dict[str, Any]) -> Cost:
        ids = fresh()
        return cost(lambda: subject.engine.compress(ids, **options))

    runs: dict[str, Callable[[], Cost | None]] = {"next": lambda: turn.update(seed=turn["seed"] + 1)}
    runs |= {way: lambda options=options: compressed(options) for way, options in _ways(removed).items()}  # type: ignore[misc]
    if vllm is not None:
        runs["vllm"] = lambda: _asked(vllm, [fresh()], 1)
    found = interleaved(runs, rounds)
    del found["next"]
    return _row(f"{LONG_TOKENS:,} tokens prefilled", found, 0)  # type: ignore[arg-type]


def _answers(subject: Subject, asks: dict[str, Ask], rounds: int, work: Work) -> ServingRow:
    count, turn = len(work.documents), {"seed": 0}

    def run(ask: Ask) -> Cost:
        time.sleep(_REST_S)
        first = 1000 + turn["seed"] * count
        questions = [subject.tokens(QUESTION_TOKENS, seed=first + i) for i in range(count)]
        return ask(work.documents, questions, work.new_tokens)

    runs: dict[str, Callable[[], Cost | None]] = {"next": lambda: turn.update(seed=turn["seed"] + 1)}
    runs |= {way: lambda ask=ask: run(ask) for way, ask in asks.items()}  # type: ignore[misc]
    found = interleaved(runs, rounds)
    del found["next"]
    return _row(work.name, found, count * work.new_tokens if work.new_tokens > 1 else 0)  # type: ignore[arg-type]


def _costed(subject: Subject, caches: dict[str, list[CompressedCache]], work: Work, row: ServingRow) -> ServingRow:
    engine, document = subject.engine, work.documents[0]
    found = {
        way: engine.equivalents.answered(engine.attach(kept[document]), 1.0, QUESTION_TOKENS, work.new_tokens)
        for way, kept in caches.items()
    }
    costs, saved = ({way: each[place] for way, each in found.items() if each[place] is not None} for place in range(2))
    return replace(row, equivalents=costs, saved=saved)  # type: ignore[arg-type]


def _row(work: str, costs: dict[str, list[Cost]], tokens: int) -> ServingRow:
    walls = {way: [cost.wall_s for cost in taken] for way, taken in costs.items()}
    seconds = {way: [cost.seconds for cost in taken] for way, taken in costs.items()}
    rates = {way: Spread.of([tokens / wall if tokens else wall for wall in taken]) for way, taken in walls.items()}
    return ServingRow(work, "tokens/s" if tokens else "s", rates, _beside(walls), _beside(seconds))


def _beside(taken: dict[str, list[float]]) -> dict[str, Spread]:
    """How many times as fast as vLLM each other way is, within a round."""
    return {way: ratios(taken["vllm"], own) for way, own in taken.items() if way != "vllm" and "vllm" in taken}


def _ours(scheduler: Scheduler, caches: Sequence[CompressedCache]) -> Ask:
    def ask(documents: Sequence[int], questions: Sequence[Sequence[int]], new_tokens: int) -> Cost:
        def answer() -> None:
            sampling = Sampling(max_tokens=new_tokens)
            asked = zip(documents, questions, strict=True)
            tickets = [scheduler.generate(caches[document], question, sampling) for document, question in asked]
            told = [len(ticket.future.result().token_ids) for ticket in tickets]
            assert told == [new_tokens] * len(questions), "no token ends an answer"

        return cost(answer)

    return ask


def _theirs(vllm: Peer, prefixes: Sequence[Sequence[int]]) -> Ask:
    def ask(documents: Sequence[int], questions: Sequence[Sequence[int]], new_tokens: int) -> Cost:
        asked = zip(documents, questions, strict=True)
        return _asked(vllm, [[*prefixes[document], *question] for document, question in asked], new_tokens)

    return ask


def _asked(vllm: Peer, prompts: Sequence[Sequence[int]], new_tokens: int) -> Cost:
    found = vllm.ask(prompts=prompts, new_tokens=new_tokens)
    assert found["tokens"] == new_tokens * len(prompts), "no token ends an answer"
    return Cost(found["seconds"], found["wall_s"])
