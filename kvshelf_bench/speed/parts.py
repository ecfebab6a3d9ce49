"""The parts of `kvshelf bench speed`: the tables that show what each measures, and what measures it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.progress import Progress
from rich.table import Column, Table

from kvshelf.methods.suffixes.registry import untrained
from kvshelf.store.base import Store
from kvshelf.store.url import open_store
from kvshelf_bench.measure import ResultT, Spread
from kvshelf_bench.options import milliseconds, ratio, split
from kvshelf_bench.quality.grid import PLAIN, Row
from kvshelf_bench.speed.codecs import CodecCosts, codec_costs
from kvshelf_bench.speed.cold import Cold, colds
from kvshelf_bench.speed.compression import ONE_PASS, CompressionCosts, compression_costs
from kvshelf_bench.speed.decode import DOCUMENT_TOKENS, Decodings, decodings
from kvshelf_bench.speed.first_token import FirstTokens, first_tokens
from kvshelf_bench.speed.options import SpeedOptions
from kvshelf_bench.speed.ranks import Sharing, sharings
from kvshelf_bench.speed.selecting import SELECTORS, Selecting, selectings
from kvshelf_bench.speed.serving import LENGTHS, Serving, ServingPace, ServingRow, serving
from kvshelf_bench.speed.subject import Subject, fitting
from kvshelf_bench.speed.suffixes import BoundedAnswer, bounded_answers
from kvshelf_bench.speed.ways import open_kvpress


def compression_table(costs: CompressionCosts) -> Table:
    """One length: our hook and kvpress's, as shares of the prefill around them, and the whole over a plain prefill."""
    table = Table("policy", "compression", "of prefill", "kvpress", "of prefill", "ours / kvpress", "whole / plain")
    row = costs.rows[0]
    table.title = (
        f"compressing {costs.tokens} tokens, {row.removed:.1%} removed; plain prefill {milliseconds(row.plain_s)}, "
        f"over itself {ratio(costs.same)}"
    )
    for row in costs.rows:
        peer = ("", "", "")
        if row.peer_s is not None and row.peer_share is not None and row.beside_peer is not None:
            peer = (milliseconds(row.peer_s), f"{row.peer_share.median:.2%}", ratio(row.beside_peer))
        table.add_row(row.policy, milliseconds(row.hook_s), f"{row.share.median:.2%}", *peer, ratio(row.whole))
    return table


def codecs_table(costs: CodecCosts) -> Table:
    table = Table("codec", "bytes a token", "of 16 bits", "threads", "encode", "of prefill", "decode")
    for name in ("first token", "over int4", "decoding"):
        table.add_column(name)
    table.title = (
        f"the full cache of {costs.tokens} tokens ({costs.document}), in MB of 16 bits a second; "
        f"plain prefill {milliseconds(costs.prefill_s)}"
    )
    if not any(row.codec == "klt" for row in costs.rows):
        table.caption = "klt: not measured; make transforms with kvshelf calibrate"
    for row in costs.rows:
        table.add_row(
            row.codec,
            f"{row.bytes_per_token:,.0f}",
            f"1/{row.smaller:.2f}",
            str(row.threads),
            f"{row.encode_mb_s.median:,.0f}" if row.encode_mb_s else "",
            f"{row.of_prefill.median:.2%}" if row.of_prefill else "",
            f"{row.decode_mb_s.median:,.0f}" if row.decode_mb_s else "",
            milliseconds(row.first_s) if row.first_s else "",
            f"{row.over_int4.median:.2f}" if row.over_int4 else "",
            f"{row.decoding.median:.0%}" if row.decoding else "",
        )
    return table


def first_token_table(firsts: FirstTokens) -> Table:
    """One length: a column per place that the cache comes from."""
    tiers = list(firsts.rows[0].tiers)
    table = Table("policy", "entries", "run", *(name for tier in tiers for name in (tier, "of again")))
    table.title = (
        f"first token after {firsts.tokens} tokens; prefilling again {milliseconds(firsts.again_s)}, "
        f"over itself {ratio(firsts.same)}; the question alone {milliseconds(firsts.alone.first_s)}, "
        f"1/{firsts.alone.speedup.median:.0f}"
    )
    if not any(tier.startswith("redis") for tier in tiers):
        table.caption = "redis: not measured; give its URL as --store"
    for row in firsts.rows:
        cells = [cell for tier in row.tiers.values() for cell in (milliseconds(tier.first_s), _inverse(tier.speedup))]
        label = f"{row.policy}, {row.removed:.1%} removed" if row.removed else row.policy
        table.add_row(label, f"{row.entry_bytes / 1e6:.2f} MB", f"{row.prefill_tokens}", *cells)
    return table


def decode_table(costs: Decodings) -> Table:
    table = Table(Column("way", no_wrap=True), "tokens", "questions", "documents", "answers", "held")
    for name in ("one by one", "together", "gain", "step", "read"):
        table.add_column(name)
    table.title = (
        f"new tokens per second, behind documents and {costs.question_tokens} tokens of a question; a step, what it "
        f"reads, and its share of the {costs.read_bandwidth / 1e9:.1f} GB/s that memory gives"
    )
    for row in costs.rows:
        rates = (f"{row.alone.median:,.0f}/s", f"{row.together.median:,.0f}/s", ratio(row.gain))
        read = f"{row.step_bytes / 1e6:,.1f} MB, {row.share.median:.0%}"
        about = (row.way, f"{row.document_tokens:,}", f"{row.questions}", f"{row.documents}", f"{row.new_tokens}")
        table.add_row(*about, f"{row.held_bytes / 1e6:,.1f} MB", *rates, milliseconds(row.step_s), read)
    return table


def selecting_table(rows: Sequence[Selecting]) -> Table:
    """One row for each length, selector and number of answers: a step that reads all, and one that reads a part."""
    table = Table("tokens", "read", "answers", "selector", "all", "a part", "of all's", "choice", "of the step")
    table.title = "processor time of a decode step, each answer on a document of its own under int4"
    for row in rows:
        cells = (f"{row.document_tokens:,}", f"{row.read_tokens:,}", str(row.rows), row.selector)
        times = (milliseconds(row.dense_s), milliseconds(row.selected_s), ratio(row.ratio))
        table.add_row(*cells, *times, milliseconds(row.choice_s), f"{row.choice_share.median:.0%}")
    return table


def cold_table(rows: Sequence[Cold]) -> Table:
    """One row for each length and place: a question that reads all, and one that reads what it selects."""
    table = Table("tokens", "from", "all", "read", "a part", "read", "of all's")
    table.title = "wall time to the first token over a document under int4 that is not in memory; selector infllm"
    for row in rows:
        all_read, part_read = (f"{nbytes / 1e6:,.1f} MB" for nbytes in (row.all_bytes, row.part_bytes))
        times = (milliseconds(row.all_s), all_read, milliseconds(row.part_s), part_read)
        table.add_row(f"{row.tokens:,}", row.place, *times, ratio(row.ratio))
    return table


def suffix_table(rows: Sequence[BoundedAnswer]) -> Table:
    table = Table("policy", "stored", "memory", "a token", "same choice", "same answer")
    table.title = f"greedy answers of {rows[0].tokens:,} tokens, and what each holds beside its document"
    for row in rows:
        cells = (
            row.policy or "(none)",
            f"{row.stored:,}",
            f"{row.bytes / 2**20:,.2f} MiB",
            f"{1e3 * row.token_s:.2f} ms",
        )
        table.add_row(*cells, f"{row.behind:.1%}", f"{row.equal:.1%}")
    return table


def serving_table(serving: Serving) -> Table:
    table = Table("", *serving.ways, "rounds")
    table.title = "wall time; in brackets how many times as fast the replica was"
    for row in serving.rows:
        table.add_row(row.work, *(_cell(row, way) for way in serving.ways), str(row.rounds))
    return table


def serving_line(row: ServingRow) -> str:
    return f"{row.work}: " + ", ".join(f"{way} {_cell(row, way)}" for way in row.seconds)


def _cell(row: ServingRow, way: str) -> str:
    if way not in row.seconds:
        return ""
    seconds, beside = row.seconds[way].median, row.beside.get(way)
    return f"{seconds:.3g} s" + (f" ({beside.median:.2f})" if beside else "")


def sharing_table(rows: Sequence[Sharing]) -> Table:
    """One row for each length: one process, and several that share the model."""
    table = Table("tokens", "work", "one process", f"{rows[0].ranks} processes", "times as fast", "memory of each")
    table.title = "wall time; the processes have as many threads together as the one"
    for row in rows:
        shared = ", ".join(f"{nbytes / 1e6:,.0f} MB" for nbytes in row.held_bytes["shared"])
        of_one = f"{row.held_bytes['one'][0] / 1e6:,.0f} MB, and {shared}"
        works = (("prefill", row.prefill_s, row.prefill, of_one), ("8 answers", row.answers_s, row.answers, ""))
        for work, seconds, faster, memory in works:
            table.add_row(
                f"{row.tokens:,}",
                work,
                milliseconds(seconds["one"]),
                milliseconds(seconds["shared"]),
                ratio(faster),
                memory,
            )
    return table


def _inverse(spread: Spread) -> str:
    return f"1/{spread.median:.0f} ({spread.low:.0f} - {spread.high:.0f})"


_COMPRESSION_LENGTHS = (2048, 4096, 8192)
_CODECS_LENGTHS = (8192,)
_SELECT_LENGTHS = (32768,)
_SELECT_ROWS = (1, 16)
_SHELF_LENGTHS = (2048, 4096, 8192, 16320)  # the last leaves room for the question in a model of 16,384 positions


@dataclass(frozen=True)
class Run:
    """A run of the bench. document_tokens: of `options`; None: those of each part. threads: of torch.

    report: parts may add more to it than what they return. missing: what was not measured, and why; parts add to it.
    """

    subject: Subject
    options: SpeedOptions
    document_tokens: Sequence[int] | None
    threads: int
    progress: Progress
    report: dict[str, Any]
    missing: list[str] = field(default_factory=list)

    def lengths(self, usual: Sequence[int], part: str) -> list[int]:
        return fitting(self.subject, self.document_tokens, usual, part, self.missing)

    def tracked(self, usual: Sequence[int], part: str) -> Iterable[int]:
        return self.progress.track(self.lengths(usual, part), description=part)

    def all_of(self, results: Iterable[ResultT], total: int, title: str) -> list[ResultT]:
        """The `total` results, with a bar as they come."""
        return [*self.progress.track(results, total, description=title)]


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
    options, lengths = run.options, run.lengths((DOCUMENT_TOKENS,), "decode")
    counts, answers = options.question_counts(), options.new_tokens()
    rows = [Row.parse(way) for way in split(options.ways)] or [PLAIN]
    bar = run.progress.add_task("decoding", total=len(counts) * len(lengths) * len(rows) * len(answers))
    step = partial(run.progress.advance, bar)
    return decodings(run.subject, counts, options.rounds, step, rows=rows, lengths=lengths, answers=answers)


def _select(run: Run) -> list[Selecting]:
    lengths = run.lengths(_SELECT_LENGTHS, "select")
    rows = selectings(run.subject, lengths, _SELECT_ROWS, run.options.rounds)
    return run.all_of(rows, len(lengths) * len(SELECTORS) * len(_SELECT_ROWS), "selecting")


def _cold(run: Run) -> list[Cold]:
    with _opened(run.options.stores or []) as homes:
        lengths = run.lengths(_SELECT_LENGTHS, "cold")
        rows = colds(run.subject, homes, lengths, run.options.rounds)
        return run.all_of(rows, len(lengths) * (len(homes) + 1), "reading")


def _suffix(run: Run) -> list[BoundedAnswer]:
    return run.all_of(bounded_answers(run.subject), 1 + len(untrained()), "answering")


def _serving(run: Run) -> Serving:
    lengths = run.lengths(LENGTHS, "serving")
    bar = run.progress.add_task("serving", total=None)
    pace = ServingPace(run.options.rounds, run.options.budget)
    interpreters = {"vLLM": run.options.vllm_python, "llama.cpp": run.options.llama_python}
    served = serving(
        run.subject, lengths, pace, interpreters, run.threads,
        tell=lambda row: run.progress.console.print(serving_line(row), soft_wrap=True, highlight=False),
        turn=lambda work: run.progress.update(bar, description=work),
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


def _tables(table: Callable[[Any], Table]) -> Callable[[Any], Iterable[Table]]:
    return partial(map, table)


def _table(table: Callable[[Any], Table]) -> Callable[[Any], Iterable[Table]]:
    return lambda result: [table(result)]


PARTS = {
    "compression": Part(_compression, _tables(compression_table)),
    "codecs": Part(_codecs, _tables(codecs_table)),
    "first-token": Part(_first_token, _tables(first_token_table)),
    "decode": Part(_decode, _table(decode_table)),
    "select": Part(_select, _table(selecting_table)),
    "cold": Part(_cold, _table(cold_table)),
    "suffix": Part(_suffix, _table(suffix_table)),
    "serving": Part(_serving, _table(serving_table)),
    "ranks": Part(_ranks, _table(sharing_table)),
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
