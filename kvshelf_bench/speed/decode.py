"""New tokens per second of many questions at once, compared with one question after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.decode.generation import Sampling
from kvshelf.kernels.rates import Cost, read_bandwidth
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits
from kvshelf_bench.engines import require_room, scheduled
from kvshelf_bench.measure import Spread, interleaved, ratios, timed
from kvshelf_bench.quality.grid import PLAIN, Row
from kvshelf_bench.speed.subject import QUESTION_TOKENS, Subject

DOCUMENT_TOKENS = 2048
NEW_TOKENS = 64

_ALONE = 8
"""Most questions answered one at a time for the comparison; their rate does not depend on their number."""


@dataclass(frozen=True)
class Decoding:
    """`questions` asked at once about `documents` different documents of `document_tokens` tokens, kept in a `way`.

    new_tokens: of each answer. held_bytes: of the keys and values of these documents in memory. together, alone: new
    tokens per second through the scheduler, and one question at a time through the engine; both include the prefill of
    the questions. gain: their ratio within a round. step_s: seconds of one decode step of all questions, from the
    difference between whole answers and those of one token. step_bytes: what such a step must read: weights once, each
    document's cache once, suffixes at their mean length. share: step_bytes / step_s over `Decodings.read_bandwidth`.
    Tokens are counted in the answers.
    """

    way: str
    document_tokens: int
    questions: int
    documents: int
    new_tokens: int
    held_bytes: int
    together: Spread
    alone: Spread
    gain: Spread
    gain_wall: Spread
    step_s: Spread
    step_bytes: int
    share: Spread


@dataclass(frozen=True)
class Decodings:
    """All rows. read_bandwidth: bytes per second, measured before the rows with the same threads."""

    question_tokens: int
    read_bandwidth: float
    rows: list[Decoding]


def decodings(
    subject: Subject,
    questions: Sequence[int],
    rounds: int,
    progress: Callable[[], None] = lambda: None,
    *,
    rows: Sequence[Row] = (PLAIN,),
    lengths: Sequence[int] = (DOCUMENT_TOKENS,),
    answers: Sequence[int] = (NEW_TOKENS,),
) -> Decodings:
    """Every row, length and number in `questions`: that many questions on a document each, and on one shared document.
    answers: tokens of each, from 2. Raises `InvalidRequest` for answers that the model has no room for."""
    require_room(subject.engine, max(lengths), QUESTION_TOKENS, max(answers))
    bandwidth = read_bandwidth(subject.device)
    engine = subject.engine
    measured = []
    for length, row in product(lengths, rows):
        documents = [subject.tokens(length, seed=10 + i) for i in range(max(questions))]
        jobs = (engine.prepare(document, **row.sizes) for document in documents)
        caches = [engine.encoded(engine.run(job).cache, row.codec) for job in jobs]
        for count, new_tokens in product(questions, answers):
            for attached in dict.fromkeys((count, 1)):
                asked_caches = [caches[i % attached] for i in range(count)]
                decoding = _measure(subject, asked_caches, attached, rounds, bandwidth, new_tokens)
                measured.append(replace(decoding, way=row.label, document_tokens=length))
            progress()
    return Decodings(QUESTION_TOKENS, bandwidth, measured)


@dataclass(frozen=True)
class _Answered:
    cost: Cost
    tokens: int


def _measure(
    subject: Subject, caches: list[CompressedCache], documents: int, rounds: int, bandwidth: float, new_tokens: int
) -> Decoding:
    limits = SchedulerLimits(max_open=len(caches), max_waiting=len(caches))
    with scheduled(subject.engine, limits) as scheduler:
        ways = {
            "alone": lambda: one_at_a_time(subject, caches[:_ALONE], new_tokens),
            "together": lambda: _together(subject, scheduler, caches, new_tokens),
            "first": lambda: _together(subject, scheduler, caches, 1),
        }
        runs = interleaved(ways, rounds)
    together, alone = ([run.tokens / run.cost.seconds for run in runs[way]] for way in ("together", "alone"))
    walls = ([run.tokens / run.cost.wall_s for run in runs[way]] for way in ("together", "alone"))
    pairs = zip(runs["together"], runs["first"], strict=True)
    steps = [(run.cost.seconds - first.cost.seconds) / (new_tokens - 1) for run, first in pairs]
    needed = step_bytes(subject, caches[:documents], len(caches), new_tokens)
    return Decoding(
        way="",
        document_tokens=0,
        held_bytes=sum(subject.engine.attach(cache).nbytes for cache in caches[:documents]),
        questions=len(caches),
        documents=documents,
        new_tokens=new_tokens,
        together=Spread.of(together),
        alone=Spread.of(alone),
        gain=ratios(together, alone),
        gain_wall=ratios(*walls),
        step_s=Spread.of(steps),
        step_bytes=needed,
        share=Spread.of([needed / step / bandwidth for step in steps]),
    )


def one_at_a_time(subject: Subject, caches: Sequence[CompressedCache], new_tokens: int) -> _Answered:
    def ask() -> list[int]:
        answers = (
            subject.engine.answer(cache, question(subject, i), max_new_tokens=new_tokens)
            for i, cache in enumerate(caches)
        )
        return [len(answer.token_ids) for answer in answers]

    return _answered(subject, ask)


def _together(subject: Subject, scheduler: Scheduler, caches: Sequence[CompressedCache], new_tokens: int) -> _Answered:
    def ask() -> list[int]:
        sampling = Sampling(max_tokens=new_tokens)
        tickets = [scheduler.generate(cache, question(subject, i), sampling) for i, cache in enumerate(caches)]
        return [len(ticket.future.result().token_ids) for ticket in tickets]

    return _answered(subject, ask)


def _answered(subject: Subject, ask: Callable[[], list[int]]) -> _Answered:
    """Time answers; `ask` returns the number of tokens of each."""
    counts, spent = timed(ask, subject.device)
    return _Answered(spent, sum(counts))


def question(subject: Subject, i: int) -> list[int]:
    return subject.tokens(QUESTION_TOKENS, seed=1000 + i)


def step_bytes(subject: Subject, documents: Sequence[CompressedCache], rows: int, new_tokens: int = NEW_TOKENS) -> int:
    """Bytes that a decode step of `rows` answers must read: weights, one cache per document, one suffix per row."""
    model = subject.engine.model
    # The embedding is read one row per token; a tied one is the head as well, and read in full.
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    weights = sum(int(parameter.nbytes) for parameter in model.parameters()) - (0 if tied else int(embedding.nbytes))
    suffix = rows * math.ceil(QUESTION_TOKENS + new_tokens / 2) * subject.engine.kv_bytes_per_token
    return int(weights + sum(cache.nbytes for cache in documents) + suffix)
