"""Documents prefilled and questions answered beside vLLM: same weights, token ids, dtype and threads, in wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvshelf.bench.measure import Spread, interleaved, ratios
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

Ask = Callable[[Sequence[int], Sequence[Sequence[int]], int], float]
"""Seconds of answers to questions on these documents, by number, all at once, of so many tokens each."""


@dataclass(frozen=True)
class ServingRow:
    """rates: of each way, seconds or new tokens a second, as `unit` says. beside_vllm: how many times as fast as vLLM
    in the same round."""

    work: str
    unit: str
    rates: dict[str, Spread]
    beside_vllm: dict[str, Spread]


@dataclass(frozen=True)
class Serving:
    """ways: "full", "keydiff" and, if it was given, "vllm"."""

    removed: float
    rows: list[ServingRow]


def servings(subject: Subject, vllm: Peer | None, rounds: int, removed: float) -> Serving:
    """Every way in turn, the same ids for all; new ids in every round, so that no cache has seen them.

    The documents of the questions are prefilled once, in one go: of that there is one measurement.
    """
    engine = subject.engine
    documents = [subject.tokens(DOCUMENT_TOKENS, seed=10 + i) for i in range(DOCUMENTS)]
    documents.append(subject.tokens(LONG_TOKENS, seed=9))
    engine.compress(subject.tokens(64, seed=1))  # nothing is made for the first time where it is measured
    scheduler = Scheduler(engine, SchedulerLimits(max_open=DOCUMENTS, max_waiting=DOCUMENTS))
    scheduler.start()
    try:
        with endless_answers(subject):
            caches: dict[str, list[CompressedCache]] = {}
            taken: dict[str, list[float]] = {}
            for way, options in _ways(removed).items():
                started = time.perf_counter()
                caches[way] = [engine.compress(ids, **options) for ids in documents[:-1]]
                taken[way] = [time.perf_counter() - started]
                caches[way].append(engine.compress(documents[-1], **options))
            asks: dict[str, Ask] = {way: _ours(scheduler, kept) for way, kept in caches.items()}
            if vllm is not None:
                taken["vllm"] = [vllm.ask(prompts=documents[:-1], new_tokens=1)["wall_s"]]
                vllm.ask(prompts=documents[-1:], new_tokens=1)
                asks["vllm"] = _theirs(vllm, documents)
            rows = [_row(f"{DOCUMENTS} documents of {DOCUMENT_TOKENS:,} tokens prefilled", taken, 0)]
            rows.append(_long_prefill(subject, vllm, rounds, removed))
            rows += [_answers(subject, asks, rounds, work) for work in _WORKS]
    finally:
        scheduler.stop()
    return Serving(removed, rows)


def _ways(removed: float) -> dict[str, dict[str, Any]]:
    return {"full": {"policy": "full"}, "keydiff": {"policy": "keydiff", "compression_ratio": removed}}


@dataclass(frozen=True)
class _Work:
    """Questions on documents, by number; `new_tokens` of each answer."""

    name: str
    documents: list[int]
    new_tokens: int


_WORKS = (
    _Work(f"first token of a question on {LONG_TOKENS:,} tokens", [DOCUMENTS], 1),
    _Work(f"{DOCUMENTS} questions on {DOCUMENTS} documents", list(range(DOCUMENTS)), NEW_TOKENS),
    _Work(f"{DOCUMENTS} questions on one document", [0] * DOCUMENTS, NEW_TOKENS),
    _Work("one question alone", [0], NEW_TOKENS),
)


def _long_prefill(subject: Subject, vllm: Peer | None, rounds: int, removed: float) -> ServingRow:
    turn = {"seed": 0}

    def fresh() -> list[int]:
        return subject.tokens(LONG_TOKENS, seed=100_000 + turn["seed"])

    def ours(options: dict[str, Any]) -> float:
        started = time.perf_counter()
        subject.engine.compress(fresh(), **options)
        return time.perf_counter() - started

    def theirs(peer: Peer) -> float:
        return float(peer.ask(prompts=[fresh()], new_tokens=1)["wall_s"])

    runs: dict[str, Callable[[], float | None]] = {"next": lambda: turn.update(seed=turn["seed"] + 1)}
    for way, options in _ways(removed).items():
        runs[way] = lambda options=options: ours(options)  # type: ignore[misc]
    if vllm is not None:
        runs["vllm"] = lambda: theirs(vllm)
    found = interleaved(runs, rounds)
    del found["next"]
    return _row(f"{LONG_TOKENS:,} tokens prefilled", found, 0)  # type: ignore[arg-type]


def _answers(subject: Subject, asks: dict[str, Ask], rounds: int, work: _Work) -> ServingRow:
    count, turn = len(work.documents), {"seed": 0}

    def run(ask: Ask) -> float:
        first = 1000 + turn["seed"] * count
        questions = [subject.tokens(QUESTION_TOKENS, seed=first + i) for i in range(count)]
        return ask(work.documents, questions, work.new_tokens)

    runs: dict[str, Callable[[], float | None]] = {"next": lambda: turn.update(seed=turn["seed"] + 1)}
    runs |= {way: lambda ask=ask: run(ask) for way, ask in asks.items()}  # type: ignore[misc]
    found = interleaved(runs, rounds)
    del found["next"]
    return _row(work.name, found, count * work.new_tokens if work.new_tokens > 1 else 0)  # type: ignore[arg-type]


def _row(work: str, seconds: dict[str, list[float]], tokens: int) -> ServingRow:
    rates = {way: Spread.of([tokens / s if tokens else s for s in taken]) for way, taken in seconds.items()}
    beside = {
        way: ratios(seconds["vllm"], taken) for way, taken in seconds.items() if way != "vllm" and "vllm" in seconds
    }
    return ServingRow(work, "tokens/s" if tokens else "s", rates, beside)


def _ours(scheduler: Scheduler, caches: Sequence[CompressedCache]) -> Ask:
    def ask(documents: Sequence[int], questions: Sequence[Sequence[int]], new_tokens: int) -> float:
        started = time.perf_counter()
        sampling = Sampling(max_tokens=new_tokens)
        asked = zip(documents, questions, strict=True)
        tickets = [scheduler.generate(caches[document], question, sampling) for document, question in asked]
        told = [len(ticket.future.result().token_ids) for ticket in tickets]
        assert told == [new_tokens] * len(questions), "no token ends an answer"
        return time.perf_counter() - started

    return ask


def _theirs(vllm: Peer, prefixes: Sequence[Sequence[int]]) -> Ask:
    def ask(documents: Sequence[int], questions: Sequence[Sequence[int]], new_tokens: int) -> float:
        asked = zip(documents, questions, strict=True)
        prompts = [[*prefixes[document], *question] for document, question in asked]
        found = vllm.ask(prompts=prompts, new_tokens=new_tokens)
        assert found["tokens"] == new_tokens * len(questions), "no token ends an answer"
        return float(found["wall_s"])

    return ask
