"""Peak memory of compressing one long document under each policy, beside a plain prefill, and of answering from it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.errors import KvshelfError
from kvshelf.methods.policies import build
from kvshelf.samples.suite import make_case
from kvshelf_bench.engines import EngineOptions, endless_answers, require_room
from kvshelf_bench.measure import with_peak
from kvshelf_bench.quality.grid import BASELINE, PLAIN, Row
from kvshelf_bench.quality.retrieval import EVALUATION_SEED, counter

_WARM_UP_TOKENS = 512
_QUESTION = "What does the document say?"


@dataclass(frozen=True)
class Peak:
    """One compression, and perhaps answers from it, in a process of its own.

    phase: when the policy acts, on which the peak depends: "during" the prefill, in "cascade" or "after" it.
    peak_bytes: the most that was allocated (GPU) or resident (CPU) beyond the loaded, warm model. cache_bytes: the size
    of the compressed cache. refused: why there is no result.
    """

    policy: str
    phase: str
    removed: float
    budget: int | None = None
    tokens: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    prefill_s: float = 0.0
    compress_s: float = 0.0
    answering: tuple[Answering, ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Answers:
    """What is asked of each cache: so many questions at once, with answers of so many tokens."""

    questions: int
    tokens: int


@dataclass(frozen=True)
class Answering(Answers):
    """tokens: counted in the answers. peak_bytes: by which answering raised the memory at most. token_s: wall seconds
    between tokens of the answers; 0 where they have one."""

    peak_bytes: int
    token_s: float


def peaks(options: EngineOptions, tokens: int, rows: Sequence[Row], answers: Sequence[Answers]) -> Iterator[Peak]:
    """The baseline, then every row, each in a fresh process, as the allocator keeps the memory of earlier ones.

    `tokens` counts the chat template too.
    """
    for row in dict.fromkeys((PLAIN, *rows)):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            try:
                yield alone.submit(compression_peak, options, tokens, row, answers).result()
            except BrokenProcessPool:
                killed = "the process was killed: there was not enough memory"
                yield replace(_named(row), tokens=tokens, refused=killed)


def compression_peak(options: EngineOptions, tokens: int, row: Row, answers: Sequence[Answers] = ()) -> Peak:
    engine = options.load()
    try:
        warm = _compress(engine, min(tokens, _WARM_UP_TOKENS), row).cache
        if answers:
            question_tokens = len(engine.encode_query(warm, _QUESTION))
            require_room(engine, tokens, question_tokens, max(one.tokens for one in answers))
        compression, peak_bytes = with_peak(engine.model.device, lambda: _compress(engine, tokens, row))
        with endless_answers(engine):
            answering = tuple(_answered(engine, compression.cache, one) for one in answers)
    except KvshelfError as error:
        return replace(_named(row), tokens=tokens, refused=error.message)
    cache = compression.cache
    return replace(
        _named(row),
        tokens=cache.num_tokens,
        peak_bytes=peak_bytes,
        cache_bytes=cache.nbytes,
        prefill_s=compression.prefill_s,
        compress_s=compression.compress_s,
        answering=answering,
    )


def _named(row: Row) -> Peak:
    phase = build(row.variant.policy, dict(row.variant.params)).phase
    return Peak(row.variant.label, phase, row.removed, row.budget)


def _answered(engine: Engine, cache: CompressedCache, answers: Answers) -> Answering:
    asks = [(cache, _QUESTION)] * answers.questions

    def ask(tokens: int) -> tuple[float, int]:
        started = time.perf_counter()
        replies = engine.answer_all(asks, max_new_tokens=tokens)
        return time.perf_counter() - started, min(len(one.token_ids) for one in replies)

    ask(1)  # what is made once, for the first answer of a process, is no time of a token
    first_s, _ = min(ask(1) for _ in range(3))  # what else the machine did in it would be taken off the tokens
    (whole_s, tokens), peak_bytes = with_peak(engine.model.device, lambda: ask(answers.tokens))
    token_s = (whole_s - first_s) / (tokens - 1) if tokens > 1 else 0.0
    return Answering(answers.questions, tokens, peak_bytes, token_s)


def _compress(engine: Engine, tokens: int, row: Row) -> Any:
    template = engine.prepare("x", policy=BASELINE).num_tokens - 1
    text = make_case("multikey", "prose", tokens - template, EVALUATION_SEED, counter(engine)).text
    return engine.run(engine.prepare(text, **row.sizes))
