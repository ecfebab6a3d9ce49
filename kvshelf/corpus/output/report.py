"""The report of a batch, one HTML page with pictures: work done, cost, savings, and failed rows with their errors."""

from __future__ import annotations

import html
import json
import math
import time
import unicodedata
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import zip_longest
from typing import Any, Final

from kvshelf.corpus.input.defaults import require_defaults
from kvshelf.corpus.places import Place, require_place, written
from kvshelf.corpus.row import Row
from kvshelf.corpus.run.progress import Summary

_PAGE: Final = files(__package__).joinpath("report.html").read_text("utf-8")
_WORKERS: Final = 20
_EXAMPLES: Final = 3
"""Failed rows shown for each error code."""
_FLOOR: Final = 0.9
"""An agreement; the report counts the documents below it."""
_EXTREMES: Final = 10
"""Documents shown as the slowest, and as the lowest in quality."""
_LONGEST: Final = 200
"""Characters shown of a text that came with the corpus."""
_LABEL_WIDTH: Final = 72
_BAR_STEP: Final = 22
"""Pixels before the bars of a picture, and from one bar to the next."""
_BAR_SHARE: Final = 60
"""Width of the longest bar, in per cent of the picture. The rest is for labels and counts."""
_FINE: Final = 16
"""Bins per bar of a picture. Quantiles are read from the bins."""


def require_report(where: Place) -> None:
    """Raises `InvalidRequest` unless the name ends in .html or .htm, and the folder of a local file exists."""
    what = "a report is an HTML page; end its name in .html"
    require_place(where, (".html", ".htm"), what=what, param="--report")


@dataclass(frozen=True)
class BatchOptions:
    """The input, the models and the defaults of a batch. fields: of `CreateCache`, for all rows."""

    input: str
    models: Sequence[str]
    fields: Mapping[str, Any]


def write_report(where: Place, options: BatchOptions, summary: Summary, results: Iterable[Row]) -> None:
    """Write the report. `results` are read once, in any order; memory does not grow with their number. The page runs no
    script, loads nothing, and tells the browser to allow neither. Raises as `require_report` does, and `StorageFull` if
    the file cannot be written."""
    require_report(where)
    sums = _Findings()
    for result in results:
        sums.add(result)
    title = f"Batch {summary.state}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        *_options(options, sums),
        *_totals(summary),
        *_failures(sums),
        *_throughput(summary),
        *_distribution("Lengths", sums.tokens, _whole, "tokens of a document"),
        *_distribution("Compression", sums.stored, _share, "stored bytes of those of a 16-bit cache"),
        *_quality(sums),
        *_saved(summary, sums),
        *_slowest(sums),
    ]
    with written(where) as target:
        target.write(_PAGE.replace("{title}", _text(title)).replace("{body}", "\n".join(parts)).encode())


class Histogram:
    """Counts numbers in bins, so that memory does not grow with them. Made by `doublings` or `shares`."""

    def __init__(self, bin_of: Callable[[float], int], edge: Callable[[int], float]) -> None:
        """bin_of: the bin of a number, ascending. edge: the least number of a bin; the inverse of `bin_of`."""
        self._bin_of = bin_of
        self._edge = edge
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.low = math.inf
        self.high = -math.inf

    @classmethod
    def doublings(cls) -> Histogram:
        """For positive numbers of any size: each bar ends at twice its start; quantiles are within 4.5 %."""
        return cls(lambda x: math.floor(_FINE * math.log2(max(x, 1e-9))), lambda b: 2 ** (b / _FINE))

    @classmethod
    def shares(cls, bars: int = 20) -> Histogram:
        """For numbers from 0 to 1; the last bar includes 1."""
        fine = bars * _FINE
        return cls(lambda x: min(fine - 1, max(0, math.floor(x * fine))), lambda b: b / fine)

    def add(self, number: float) -> None:
        self._counts[self._bin_of(number)] += 1
        self.count += 1
        self.total += number
        self.low = min(self.low, number)
        self.high = max(self.high, number)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The number at or below which this share lies: the middle of its bin, clamped to the extremes."""
        below = 0
        for number in sorted(self._counts):
            below += self._counts[number]
            if below >= share * self.count:
                middle = (self._edge(number) + self._edge(number + 1)) / 2
                return min(max(middle, self.low), self.high)
        return 0.0

    def bars(self) -> list[tuple[float, int]]:
        """(start, count) from the lowest to the highest number, including empty bars between them."""
        coarse: Counter[int] = Counter()
        for number, count in self._counts.items():
            coarse[number // _FINE] += count
        return [(self._edge(n * _FINE), coarse[n]) for n in range(min(coarse, default=1), max(coarse, default=0) + 1)]


@dataclass
class _Findings:
    """Sums over the results. `seconds`, `slowest` and `repeated` cover documents compressed in this batch only. stored:
    what was stored, as a share of 16 bits. examples: (message, result) by code. repeated: documents that took more than
    one attempt. below: measured documents under `_FLOOR`, which took `quality_s`. slowest and worst: (rank, result),
    lowest rank first."""

    tokens: Histogram = field(default_factory=Histogram.doublings)
    seconds: Histogram = field(default_factory=Histogram.doublings)
    stored: Histogram = field(default_factory=Histogram.shares)
    agreement: Histogram = field(default_factory=Histogram.shares)
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, Row]]] = field(default_factory=lambda: defaultdict(list))
    slowest: list[tuple[float, Row]] = field(default_factory=list)
    worst: list[tuple[float, Row]] = field(default_factory=list)
    policies: Counter[str] = field(default_factory=Counter)
    below: int = 0
    quality_s: float = 0.0
    kept: int = 0
    reused_tokens: int = 0
    repeated: int = 0

    def add(self, result: Row) -> None:
        if result.error is not None:
            self.failures[result.error.code] += 1
            if len(examples := self.examples[result.error.code]) < _EXAMPLES:
                examples.append((result.error.message, result))
            return
        self.tokens.add(result.tokens)
        self.kept += result.kept
        self.policies[result.policy] += 1
        if result.bytes_full_16bit:
            self.stored.add(result.bytes_stored / result.bytes_full_16bit)
        if result.quality is not None and result.quality["agreement"] is not None:
            self.agreement.add(result.quality["agreement"])
            self.below += result.quality["agreement"] < _FLOOR
            self.quality_s += result.quality.get("probe_s", 0.0)
            _keep(self.worst, result.quality["agreement"], result)
        if result.reused:
            self.reused_tokens += result.tokens
            return
        self.seconds.add(result.seconds)
        _keep(self.slowest, -result.seconds, result)
        self.repeated += result.attempts > 1


def _keep(extremes: list[tuple[float, Row]], rank: float, result: Row) -> None:
    """Keep the results of the lowest ranks; among equals the earlier ones."""
    insort(extremes, (rank, result), key=lambda item: item[0])
    del extremes[_EXTREMES:]


def _options(options: BatchOptions, sums: _Findings) -> list[str]:
    """The options of the batch, with the defaults of a creation."""
    spec = require_defaults(options.fields)
    ratio = "the policy's default" if spec.compression_ratio is None else f"{spec.compression_ratio:g}"
    if sums.tokens.total:
        ratio += f"; {_share(1 - sums.kept / sums.tokens.total)} of the entries were removed"
    rows = [
        ("input", options.input),
        ("model", ", ".join(options.models)),
        ("policy", spec.policy),
        ("compression ratio", ratio),
        ("codec", spec.codec),
    ]
    named = {"model", "policy", "compression_ratio", "codec"}
    for name, value in options.fields.items():
        if name not in named:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((name.replace("_", " "), text))
    others = {policy: count for policy, count in sums.policies.items() if policy not in ("", spec.policy)}
    policies = ", ".join(f"{policy} ({count:,})" for policy, count in sorted(others.items()))
    about = "Chosen for the documents" if spec.policy == "auto" else "Some rows have a policy of their own"
    sentences = [f"{about}: {policies}."] if policies else []
    return [*_section("Made with", sentences), _table(("", ""), rows, texts=2)]


def _totals(summary: Summary) -> list[str]:
    rows = [
        ("documents in the input", "unknown" if summary.total is None else _whole(summary.total)),
        ("on the shelf", _whole(summary.done)),
        ("of those, there before", _whole(summary.reused)),
        ("failed", _whole(summary.failed)),
        ("tokens", _whole(summary.tokens)),
        ("bytes of their KV uncompressed, in 16 bits", _bytes(summary.bytes_full_16bit)),
        ("bytes stored", _bytes(summary.bytes_stored)),
        ("time at work", _duration(summary.elapsed_s)),
        ("replicas' time", f"{summary.gpu_hours:,.2f} hours"),
    ]
    for name, at in sorted(summary.times.items(), key=lambda item: item[1]):
        rows.append((f"{name} since", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))))
    missing = 0 if summary.total is None else summary.total - summary.done - summary.failed
    sentences = [f"It ended because: {summary.reason}."] if summary.reason else []
    if missing:
        sentences.append(f"{missing:,} documents were not reached; run the same command again to continue.")
    return [*_section("In short", sentences), _table(("", ""), rows)]


def _failures(sums: _Findings) -> list[str]:
    if not sums.failures:
        return []
    rows = []
    for code, count in sorted(sums.failures.items(), key=lambda item: (-item[1], item[0])):
        for number, (message, result) in enumerate(sums.examples[code]):
            name, counted = ("", "") if number else (code, _whole(count))
            rows.append((name, *_which(result), message, str(result.attempts), counted))
    headings = ("code", "for example at", "custom id", "message", "attempts", "documents")
    return [*_section("Failures", ["The output has a line for each of them."]), _table(headings, rows, texts=4)]


def _throughput(summary: Summary) -> list[str]:
    new = summary.done - summary.reused
    if not new or not summary.elapsed_s:
        return []
    sentences = [
        f"{summary.tokens_per_s:,.0f} tokens a second and {3600 * new / summary.elapsed_s:,.0f} documents an hour were "
        "compressed, by the clock, while the batch was at work."
    ]
    busiest = sorted(summary.workers.items(), key=lambda item: (-item[1].tokens, item[0]))
    if len(busiest) > _WORKERS:
        sentences.append(f"{len(busiest) - _WORKERS:,} more workers did less than these.")
    rows = []
    for name, work in busiest[:_WORKERS]:
        rate = work.tokens / work.seconds if work.seconds else 0.0
        rows.append((name, _whole(work.done), _whole(work.tokens), _duration(work.seconds), _whole(rate)))
    headings = ("worker", "documents", "tokens", "time", "tokens a second")
    return [*_section("Throughput", sentences), *([_table(headings, rows)] if rows else [])]


def _quality(sums: _Findings) -> list[str]:
    if not sums.agreement.count:
        return []
    from kvshelf.engine.quality import bounds  # torch, which a report without figures does without

    count = sums.agreement.count
    low, high = bounds(sums.below, count)
    about = (
        f"Measured on {count:,} of {sums.tokens.count:,} documents, in {sums.quality_s:,.1f} s: {sums.below:,} are "
        f"below {_FLOOR}, so of all {_share(low)} to {_share(high)} are, if these are a sample of them (bounds at 95 "
        "%). --quality full or fast measures every document."
    )
    rows = []
    for agreement, result in sums.worst:
        assert result.quality is not None
        low, high = (result.quality[bound] for bound in ("low", "high"))
        rows.append((*_which(result), _share(agreement), "-" if low is None else f"{_share(low)} to {_share(high)}"))
    section = _distribution("Quality", sums.agreement, _share, "agreement with the full cache", about)
    return [*section, _table(("lowest at", "custom id", "agreement", "95 % bounds"), rows, texts=2)]


def _saved(summary: Summary, sums: _Findings) -> list[str]:
    if not summary.done:
        return []
    sentences = [
        f"The shelf takes {summary.bytes.describe(_bytes)}.",
        f"A question on one of these documents reads {sums.tokens.mean:,.0f} tokens from the shelf, on average, "
        "instead of prefilling them.",
    ]
    if sums.seconds.count:
        sentences.append(
            f"One took {sums.seconds.mean:,.2f} s of a replica, on average. That is prefill, compression, probe and "
            "storing together; what a question saves is the prefill in it."
        )
    if sums.reused_tokens:
        sentences.append(f"{sums.reused_tokens:,} tokens were not prefilled because their caches were there before.")
    return _section("Saved", sentences)


def _slowest(sums: _Findings) -> list[str]:
    if not sums.seconds.count:
        return []
    repeated = f"Documents that took more than one attempt: {sums.repeated:,}." if sums.repeated else ""
    slow = [row for _, row in sums.slowest]
    rows = [(*_which(row), _whole(row.tokens), str(row.attempts), f"{row.seconds:,.2f}") for row in slow]
    title, what = f"Seconds, and the {_EXTREMES} slowest", "seconds of a replica"
    headings = ("slowest at", "custom id", "tokens", "attempts", "seconds")
    return [*_distribution(title, sums.seconds, _short, what, repeated), _table(headings, rows, texts=2)]


def _distribution(
    title: str, numbers: Histogram, show: Callable[[float], str], what: str, about: str = ""
) -> list[str]:
    if not numbers.count:
        return []
    half, most = numbers.quantile(0.5), numbers.quantile(0.95)
    sentence = (
        f"{what.capitalize()}: from {show(numbers.low)} to {show(numbers.high)}, mean {show(numbers.mean)}, half at or "
        f"below about {show(half)}, 95 % at or below about {show(most)}."
    )
    bars = [(show(start), count) for start, count in numbers.bars()]
    return [*_section(title, filter(None, (about, sentence))), _svg(f"{what}, from", bars)]


def _section(title: str, sentences: Iterable[str]) -> list[str]:
    return [f"<h2>{_text(title)}</h2>", *(f"<p>{_text(sentence)}</p>" for sentence in sentences)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """All columns but the first `texts` are numbers, aligned right."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = zip_longest(cells, [""] * texts, fillvalue=' class="number"')
        return f"<tr>{''.join(f'<{tag}{kind}>{_text(cell)}</{tag}>' for cell, kind in kinds)}</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    return f"<table><thead>{row(headings, 'th')}</thead>\n<tbody>\n{body}\n</tbody></table>"


def _svg(title: str, bars: Sequence[tuple[str, int]]) -> str:
    """A bar a line, its label before it and its count after it; as wide as the page, which may be narrow. There is at
    least one bar, and one count above 0."""
    most = max(count for _, count in bars)
    marks = []
    for number, (label, count) in enumerate(bars):
        y, wide = number * _BAR_STEP, round(_BAR_SHARE * count / most, 2)
        marks.append(f'<text class="label" x="{_LABEL_WIDTH - 8}" y="{y + 14}">{_text(label)}</text>')
        marks.append(
            f'<svg x="{_LABEL_WIDTH}" y="{y}"><rect width="{wide}%" height="{_BAR_STEP - 4}"/>'
            f'<text x="{wide}%" dx="6" y="14">{count:,}</text></svg>'
        )
    what = _text(title)
    return (
        f'<figure><figcaption>{what}</figcaption><svg role="img" aria-label="{what}" width="100%" '
        f'height="{_BAR_STEP * len(bars)}">{"".join(marks)}</svg></figure>'
    )


def _text(text: str) -> str:
    """One escaped line of bounded length. Control characters and direction marks are written as \\uXXXX."""
    cut = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return html.escape(
        "".join(c if c == " " or unicodedata.category(c)[0] not in "CZ" else f"\\u{ord(c):04x}" for c in cut)
    )


def _which(result: Row) -> tuple[str, str]:
    return f"{result.source}, line {result.line}", result.custom_id or ""


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _short(number: float) -> str:
    return f"{number:,.3g}" if number < 1000 else f"{number:,.0f}"


def _share(number: float) -> str:
    return f"{100 * number:.4g} %"


def _bytes(count: float) -> str:
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} bytes"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:,.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:,} h {rest // 60:02} min {rest % 60:02} s"
