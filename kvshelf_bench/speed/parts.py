"""The parts of `kvshelf bench speed`: what measures each, and the tables that show it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.progress import Progress
from rich.table import Table

from kvshelf.methods.suffixes.registry import SUFFIX_POLICIES
from kvshelf.store.base import Store
from kvshelf.store.url import open_store
from kvshelf_bench.options import split
from kvshelf_bench.quality.grid import Row
from kvshelf_bench.speed import tables as show
from kvshelf_bench.speed.codecs import CodecCosts, codec_costs
from kvshelf_bench.speed.cold import Cold, colds
from kvshelf_bench.speed.compression import ONE_PASS, CompressionCosts, compression_costs
from kvshelf_bench.speed.decode import DEFAULT, DOCUMENT_TOKENS, Decodings, decodings
from kvshelf_bench.speed.first_token import FirstTokens, first_tokens
from kvshelf_bench.speed.options import SpeedOptions
from kvshelf_bench.speed.ranks import Sharing, sharings
from kvshelf_bench.speed.selecting import SELECTORS, Selecting, selectings
from kvshelf_bench.speed.serving import LENGTHS, Serving, serving
from kvshelf_bench.speed.subject import Subject, fitting
from kvshelf_bench.speed.suffixes import BoundedAnswer, bounded_answers
from kvshelf_bench.speed.ways import open_kvpress

_COMPRESSION_LENGTHS = (2048, 4096, 8192)
_CODECS_LENGTHS = (8192,)
_SELECT_LENGTHS = (32768,)
_SELECT_ROWS = (1, 16)
_SHELF_LENGTHS = (2048, 4096, 8192, 16320)  # the last leaves room for the question in a model of 16,384 positions


@dataclass(frozen=True)
class Run:
    """A run of the bench. given: the lengths of `options`; None: those of each part. threads: of torch.

    report: parts may add more to it than what they return. missing: what was not measured, and why; parts add to it.
    """

    subject: Subject
    options: SpeedOptions
    given: Sequence[int] | None
    threads: int
    progress: Progress
    report: dict[str, Any]
    missing: list[str] = field(default_factory=list)

    def lengths(self, usual: Sequence[int], part: str) -> list[int]:
        return fitting(self.subject, self.given, usual, part, self.missing)

    def tracked(self, usual: Sequence[int], part: str) -> Iterable[int]:
        return self.progress.track(self.lengths(usual, part), description=part)

    def bar(self, title: str, total: int) -> Callable[[], None]:
        """What is called after each of `total` steps."""
        return partial(self.progress.advance, self.progress.add_task(title, total=total))


def _compression(run: Run) -> list[CompressionCosts]:
    names, removed, rounds = run.options.policies, run.options.removed, run.options.rounds
    compared = [name.strip() for name in names.split(",")] if names else list(ONE_PASS)
    with open_kvpress(run.options.kvpress_python, run.subject, run.threads) as peer:
        steps = run.tracked(_COMPRESSION_LENGTHS, "compression")
        costs = [compression_costs(run.subject, peer, tokens, rounds, compared, removed) for tokens in steps]
        run.report["kvpress"] = peer.versions if peer is not None else None
    return costs


def _codecs(run: Run) -> list[CodecCosts]:
    with _opened([]) as homes:
        steps = run.tracked(_CODECS_LENGTHS, "codecs")
        return [codec_costs(run.subject, homes["disk"], tokens, run.options.rounds) for tokens in steps]


def _first_token(run: Run) -> list[FirstTokens]:
    with _opened(run.options.stores or []) as homes:
        steps = run.tracked(_SHELF_LENGTHS, "first token")
        return [first_tokens(run.subject, homes, tokens, run.options.rounds) for tokens in steps]


def _decode(run: Run) -> Decodings:
    lengths, asked = run.lengths((DOCUMENT_TOKENS,), "decode"), run.options.asked()
    rows = [Row.parse(way) for way in split(run.options.ways)] or [DEFAULT]
    step = run.bar("decoding", len(asked) * len(lengths) * len(rows))
    return decodings(
        run.subject, asked, run.options.rounds, step,
        rows=rows, lengths=lengths, new_tokens=run.options.answer_tokens,
    )  # fmt: skip


def _select(run: Run) -> list[Selecting]:
    lengths = run.lengths(_SELECT_LENGTHS, "select")
    step = run.bar("selecting", len(lengths) * len(SELECTORS) * len(_SELECT_ROWS))
    return selectings(run.subject, lengths, _SELECT_ROWS, run.options.rounds, step)


def _cold(run: Run) -> list[Cold]:
    with _opened(run.options.stores or []) as homes:
        lengths = run.lengths(_SELECT_LENGTHS, "cold")
        step = run.bar("reading", len(lengths) * (len(homes) + 1))
        return colds(run.subject, homes, lengths, run.options.rounds, step)


def _suffix(run: Run) -> list[BoundedAnswer]:
    return bounded_answers(run.subject, progress=run.bar("answering", 1 + len(SUFFIX_POLICIES)))


def _serving(run: Run) -> Serving:
    lengths = run.lengths(LENGTHS, "serving")
    bar = run.progress.add_task("serving", total=None)
    served = serving(
        run.subject, lengths, run.options.rounds, run.options.budget, run.options.interpreters(), run.threads,
        tell=lambda row: run.progress.console.print(show.serving_line(row), soft_wrap=True, highlight=False),
        turn=lambda said: run.progress.update(bar, description=said),
    )  # fmt: skip
    run.progress.remove_task(bar)
    run.missing.extend(served.missing)
    return served


def _ranks(run: Run) -> list[Sharing]:
    lengths = run.lengths(_COMPRESSION_LENGTHS, "ranks")
    return sharings(run.subject, run.options.ranks, run.threads, lengths, run.options.rounds)


@dataclass(frozen=True)
class Part:
    """A part. measure: what the report holds of it; tables: of that."""

    measure: Callable[[Run], Any]
    tables: Callable[[Any], Iterable[Table]]


def _each(table: Callable[[Any], Table]) -> Callable[[Any], Iterable[Table]]:
    """A table for each of several results."""
    return partial(map, table)


def _one(table: Callable[[Any], Table]) -> Callable[[Any], Iterable[Table]]:
    """A table of a result."""
    return lambda result: [table(result)]


PARTS = {
    "compression": Part(_compression, _each(show.compression_table)),
    "codecs": Part(_codecs, _each(show.codecs_table)),
    "first-token": Part(_first_token, _each(show.first_token_table)),
    "decode": Part(_decode, _one(show.decode_table)),
    "select": Part(_select, _one(show.selecting_table)),
    "cold": Part(_cold, _one(show.cold_table)),
    "suffix": Part(_suffix, _one(show.suffix_table)),
    "serving": Part(_serving, _one(show.serving_table)),
    "ranks": Part(_ranks, _one(show.sharing_table)),
}
"""In the order in which they are measured."""


@contextmanager
def _opened(urls: list[str]) -> Iterator[dict[str, Store]]:
    """A disk store in a temporary folder, and each of `urls` by its kind: `redis`, the next one `redis-2`, `objects`.

    Never under its URL, which may have a password in it.
    """
    with tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder, ExitStack() as open_stores:
        homes: dict[str, Store] = {}
        named = Counter[str]()
        for url in (f"disk://{folder}/shelf", *urls):
            kind = "objects" if "blobs=" in url else url.partition(":")[0]
            named[kind] += 1
            name = kind if named[kind] == 1 else f"{kind}-{named[kind]}"
            homes[name] = open_stores.enter_context(open_store(url))
        yield homes
