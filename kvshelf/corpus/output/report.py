"""The morning after: what a batch did, what it cost, what it saves, what failed and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from kvshelf.corpus.output.files import written
from kvshelf.corpus.output.findings import EXTREMES, Findings, find
from kvshelf.corpus.output.forms import Picture, Section, Table, markdown, page
from kvshelf.corpus.output.histogram import Histogram
from kvshelf.corpus.output.results import Result
from kvshelf.corpus.run.progress import Summary
from kvshelf.errors import InvalidRequest

_FORMS: Final[dict[str, Callable[[str, Sequence[Section]], str]]] = {".md": markdown, ".html": page, ".htm": page}
_WORKERS: Final = 20
_UNITS: Final = ("bytes", "kB", "MB", "GB", "TB", "PB")


def require_report(path: Path) -> None:
    """Raises `InvalidRequest` for a name that does not tell how to write the report, or a folder that is not there."""
    if path.suffix.lower() not in _FORMS:
        raise InvalidRequest(f"{path}: the name of the report ends in .md or .html", param="--report")
    if not path.absolute().parent.is_dir():
        raise InvalidRequest(f"{path}: there is no folder {path.absolute().parent}", param="--report")


def write_report(path: Path, summary: Summary, results: Iterable[Result]) -> None:
    """Write the report of a batch as Markdown or HTML, by the name's ending; results are read once, in any order.

    It needs no other file, and memory does not grow with the results. Raises as `require_report` does, and
    `StorageFull` where it cannot be written.
    """
    require_report(path)
    sections = describe(summary, find(results))
    text = _FORMS[path.suffix.lower()](f"Batch {summary.state}", sections)
    with written(path) as target:
        target.write(text.encode())


def describe(summary: Summary, found: Findings) -> list[Section]:
    """What the report says. Sections about nothing are left out."""
    sections = [
        _totals(summary),
        _failures(found),
        _throughput(summary),
        _distribution("Lengths", found.tokens, _whole, "tokens of a document"),
        _distribution("Compression", found.stored, _share, "stored bytes of full bytes"),
        _quality(found),
        _saved(summary, found),
        _slowest(found),
    ]
    return [section for section in sections if section is not None]


def _totals(summary: Summary) -> Section:
    times = {name: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) for name, at in summary.times.items()}
    rows = [
        ("documents in the input", _whole(summary.total) if summary.total is not None else "unknown"),
        ("on the shelf", _whole(summary.done)),
        ("of those, there before", _whole(summary.reused)),
        ("failed", _whole(summary.failed)),
        ("tokens", _whole(summary.tokens)),
        ("bytes of their KV uncompressed", _bytes(summary.bytes_full)),
        ("bytes stored", _bytes(summary.bytes_stored)),
        ("time at work", _duration(summary.elapsed_s)),
        ("replicas' time", f"{summary.gpu_hours:,.2f} hours"),
        *((f"{name} since", at) for name, at in sorted(times.items(), key=lambda item: item[1])),
    ]
    missing = 0 if summary.total is None else summary.total - summary.done - summary.failed
    sentences = [f"It ended because: {summary.reason}."] if summary.reason else []
    if missing:
        sentences.append(f"{missing:,} documents were not reached; the same command goes on with them.")
    return Section("In short", sentences, tables=[Table(("", ""), rows)])


def _failures(found: Findings) -> Section | None:
    if not found.failures:
        return None
    by_count = sorted(found.failures.items(), key=lambda item: (-item[1].count, item[0]))
    rows = []
    for code, failures in by_count:
        for number, result in enumerate(failures.examples):
            first = (code, _whole(failures.count)) if number == 0 else ("", "")
            message = result.error.message if result.error is not None else ""
            rows.append((first[0], _place(result), result.custom_id or "", message, str(result.attempts), first[1]))
    headings = ("code", "for example at", "custom id", "message", "attempts", "documents")
    return Section("Failures", ["Each is a line of the output, too."], tables=[Table(headings, rows, texts=4)])


def _throughput(summary: Summary) -> Section | None:
    new = summary.done - summary.reused
    if not new or not summary.elapsed_s:
        return None
    busiest = sorted(summary.workers.items(), key=lambda item: (-item[1].tokens, item[0]))
    rows = [
        (
            name,
            _whole(work.done),
            _whole(work.tokens),
            _duration(work.seconds),
            _whole(_rate(work.tokens, work.seconds)),
        )
        for name, work in busiest[:_WORKERS]
    ]
    sentences = [
        f"{summary.tokens_per_s:,.0f} tokens a second and {3600 * new / summary.elapsed_s:,.0f} documents an hour were "
        "compressed, by the clock, while the batch was at work."
    ]
    if len(busiest) > _WORKERS:
        sentences.append(f"{len(busiest) - _WORKERS:,} more workers did less than these.")
    headings = ("worker", "documents", "tokens", "time", "tokens a second")
    return Section("Throughput", sentences, tables=[Table(headings, rows)] if rows else [])


def _quality(found: Findings) -> Section | None:
    section = _distribution("Quality", found.agreement, _share, "agreement with the full cache")
    if section is None:
        return None
    rows = [(_place(result), result.custom_id or "", _share(_agreement(result))) for result in found.worst.results()]
    about = f"Measured on {found.agreement.count:,} documents, by the probe that runs when a cache is made."
    lowest = Table(("lowest at", "custom id", "agreement"), rows, texts=2)
    return Section(section.title, [about, *section.sentences], section.picture, [lowest])


def _saved(summary: Summary, found: Findings) -> Section | None:
    if not summary.done:
        return None
    sentences = [
        f"The shelf takes {_bytes(summary.bytes_full - summary.bytes_stored)} less than the uncompressed caches would.",
        f"A question on one of these documents reads {found.tokens.mean:,.0f} tokens from the shelf, on average, "
        "instead of prefilling them.",
    ]
    if found.new_tokens:
        each = found.new_s / found.seconds.count
        sentences.append(
            f"One took {each:,.2f} s of a replica, on average. That is prefill, compression, probe and storing "
            "together; what a question saves is the prefill in it."
        )
    if found.reused_tokens:
        sentences.append(f"{found.reused_tokens:,} tokens were not prefilled because their caches were there before.")
    return Section("Saved", sentences)


def _slowest(found: Findings) -> Section | None:
    if not found.seconds.count:
        return None
    rows = [
        (_place(result), result.custom_id or "", _whole(result.tokens), str(result.attempts), f"{result.seconds:,.2f}")
        for result in found.slowest.results()
    ]
    section = _distribution("Seconds", found.seconds, _short, "seconds of a replica")
    sentences = list(section.sentences) if section else []
    if found.repeated:
        sentences.append(f"Documents that took more than one attempt: {found.repeated:,}.")
    headings = ("slowest at", "custom id", "tokens", "attempts", "seconds")
    picture = section.picture if section else None
    return Section(f"Seconds, and the {EXTREMES} slowest", sentences, picture, [Table(headings, rows, texts=2)])


def _distribution(title: str, numbers: Histogram, show: Callable[[float], str], what: str) -> Section | None:
    if not numbers.count:
        return None
    half, most = numbers.quantile(0.5), numbers.quantile(0.95)
    sentence = (
        f"{what.capitalize()}: from {show(numbers.low)} to {show(numbers.high)}, mean {show(numbers.mean)}, half at or "
        f"below about {show(half)}, 95 % at or below about {show(most)}."
    )
    bars = [(f"{show(bar.low)}", bar.count) for bar in numbers.bars()]
    return Section(title, [sentence], Picture(f"{what}, from", bars))


def _agreement(result: Result) -> float:
    return float(result.quality["agreement"]) if result.quality is not None else 0.0


def _place(result: Result) -> str:
    return f"{result.source}, line {result.line}"


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _short(number: float) -> str:
    return f"{number:,.3g}" if number < 1000 else f"{number:,.0f}"


def _share(number: float) -> str:
    return f"{100 * number:.4g} %"


def _bytes(count: float) -> str:
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:,.0f} bytes" if unit == 0 else f"{size:,.2f} {_UNITS[unit]}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:,.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:,} h {rest // 60:02} min {rest % 60:02} s"
