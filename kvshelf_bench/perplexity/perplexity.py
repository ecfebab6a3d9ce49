"""Perplexity of a text behind a compressed beginning, after the streams of PG19 that EMS and SAGE measure.

A window of the text is a beginning, which is compressed, and a continuation: the model gives the likelihood of each of
its tokens before it reads the token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean, stdev
from typing import Any

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.methods.suffixes.registry import build as build_suffix
from kvshelf_bench.quality.grid import Row, named_params, shown_params
from kvshelf_bench.quality.outcome import selecting

_BITS = 32


@dataclass(frozen=True)
class Stream:
    """A way to read a text: how its beginning is kept, and the suffix policy with its parameters and the entries that
    it leaves of the continuation (None: all stay)."""

    row: Row
    suffix: str = ""
    budget: int | None = None
    params: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def bounded(cls, row: Row, text: str, budget: int) -> Stream:
        """text: `window` or `window:every=1`. Raises `InvalidRequest` for an unknown suffix policy or parameter."""
        name, _, values = text.partition(":")
        params = named_params(text, values, "suffixes")
        build_suffix(name, params)
        return cls(row, name, budget, tuple(params.items()))

    @property
    def label(self) -> str:
        return self.row.label + (f" + {self.suffix}{shown_params(self.params)}@{self.budget}" if self.suffix else "")

    def entries(self, tokens: int) -> int:
        """That a token reads at most of so many that were added: with a budget, those before the first reduction, which
        comes where an interval ends and there are more, or the budget and those between two reductions."""
        if self.budget is None:
            return tokens
        interval = build_suffix(self.suffix, dict(self.params)).interval
        first = -(-self.budget // interval) * interval
        return min(tokens, max(1 + first, self.budget + min(interval, tokens - 1 - first)))


@dataclass(frozen=True)
class Perplexity:
    """A stream over all windows. perplexity: e to the mean negative log likelihood of a token. over_full: its ratio to
    that of the full cache, with `low` and `high` of its 95 % interval over windows. bytes: of a stored beginning, the
    mean. entries: that a token reads at most of what was added. refused: why there is no result."""

    way: str
    windows: int = 0
    tokens: int = 0
    perplexity: float = 0.0
    over_full: float = 1.0
    low: float = 1.0
    high: float = 1.0
    bytes: float = 0.0
    entries: int = 0
    refused: str | None = None


class Dictated:
    """A constraint of an answer that allows the next token of a given text alone."""

    def __init__(self, token_ids: Sequence[int], vocabulary: int) -> None:
        self._left = list(token_ids)
        self.vocabulary = vocabulary

    def fill(self, address: int, nbytes: int) -> None:
        """See `engine.decode.guide.Constraint`."""
        ctypes.memset(address, 0, nbytes)
        word, bit = divmod(self._left[0], _BITS)
        ctypes.c_uint32.from_address(address + word * 4).value = 1 << bit

    def take(self, token: int) -> bool:
        """See `engine.decode.guide.Constraint`."""
        assert token == self._left[0]
        self._left.pop(0)
        return not self._left


def windows_of(token_ids: Sequence[int], context: int, tokens: int, most: int) -> list[tuple[list[int], list[int]]]:
    """The first `most` windows of a text, without overlap: beginnings of `context` tokens, and `tokens` that follow.
    Raises `InvalidRequest` for a text that is shorter than one."""
    size = context + tokens
    windows = [
        (list(token_ids[first : first + context]), list(token_ids[first + context : first + size]))
        for first in range(0, len(token_ids) - size + 1, size)
    ][:most]
    if not windows:
        raise InvalidRequest(f"the text has {len(token_ids)} tokens, and a window {size}; take a longer text")
    return windows


def perplexities(
    engine: Engine,
    windows: Sequence[tuple[list[int], list[int]]],
    streams: Sequence[Stream],
    progress: Callable[[], None] = lambda: None,
) -> list[Perplexity]:
    """Every stream over every window, the full cache first."""
    full: list[float] = []
    results = []
    for stream in streams:
        try:
            measured = []
            for beginning, continuation in windows:
                measured.append(_window(engine, stream, beginning, continuation))
                progress()
        except KvshelfError as error:
            results.append(Perplexity(stream.label, refused=error.message))
            continue
        losses = [loss for loss, _ in measured]
        full = full or losses
        differences = [one - other for one, other in zip(losses, full, strict=True)]
        half = 1.96 * stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        tokens = len(windows[0][1])
        low, mean, high = (exp(fmean(differences) + side * half) for side in (-1, 0, 1))
        results.append(
            Perplexity(
                way=stream.label,
                windows=len(windows),
                tokens=tokens,
                perplexity=exp(fmean(losses)),
                over_full=mean,
                low=low,
                high=high,
                bytes=fmean(size for _, size in measured),
                entries=stream.entries(tokens),
            )
        )
    return results


def likelihoods(
    engine: Engine, cache: CompressedCache, token_ids: Sequence[int], stream: Stream | None = None
) -> list[float]:
    """The logarithm of what the model gives each token but the first, read behind the cache."""
    first, rest = list(token_ids[:1]), list(token_ids[1:])
    select = selecting(cache, None if stream is None else stream.row.select)
    selection = reducer = None
    document = engine.attach(cache)
    if select:
        method, tokens, params = select["select"], select["select_tokens"], select["select_params"]
        selection = engine.select(document, method, question_tokens=1, tokens=tokens, params=params)
    if stream is not None and stream.suffix:
        reducer = engine.bound(stream.suffix, question_tokens=1, budget=stream.budget, params=dict(stream.params))
    generation = engine.start(document, first, Sampling(len(rest), logprobs=0), selection, reducer=reducer)
    forced: Any = Dictated(rest, engine.model.config.vocab_size)
    generation.constraint = forced
    batch = engine.batch()
    while not generation.finished:
        for step in batch.step([generation]):
            if isinstance(step, Exception):
                raise step
    logprobs = generation.answer().logprobs or ()
    return [one.logprob for one in logprobs]


def _window(engine: Engine, stream: Stream, beginning: list[int], continuation: list[int]) -> tuple[float, int]:
    """The mean negative log likelihood of the continuation, and the bytes of the stored beginning. The beginning's last
    token is read with the continuation, so that every token of this one is foretold."""
    job = engine.prepare(beginning[:-1], **stream.row.sizes)
    cache = engine.encoded(engine.run(job).cache, stream.row.codec)
    logprobs = likelihoods(engine, cache, [beginning[-1], *continuation], stream)
    if len(logprobs) != len(continuation):
        raise InvalidRequest("the text holds a token that ends an answer; take another")
    return -fmean(logprobs), len(cache.to_bytes())
