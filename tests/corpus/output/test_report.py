"""The report of a batch, from results that a hostile corpus could have made."""

from __future__ import annotations

import html.parser
import random
import re
import statistics
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvshelf.api.batches import WorkerShare
from kvshelf.corpus.output.report import BatchOptions, Histogram, require_report, write_report
from kvshelf.corpus.row import Row, RowError
from kvshelf.corpus.run.progress import RunState, Summary
from kvshelf.errors import InvalidRequest

HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "a | b\n| --- | --- |\n# heading",
    "[click](javascript:alert(1))",
    "`code` ``` ~~~ **bold** <http://x>",
    "\u202egnp.exe\u2066",
    "\x00\x07\x1b[31m\ud800",
    "x" * 5000,
]  # fmt: skip


def done(number: int, **changes: object) -> Row:
    result = Row(
        source="corpus.jsonl", line=number, custom_id=f"row-{number}", cache_id="kvs_x", document_id="doc_x",
        tokens=1000, kept=250, bytes_full=4000, bytes_full_16bit=2000, bytes_stored=1000,
        quality={"agreement": 0.95, "low": 0.91, "high": 0.98, "kl": 0.1, "cues": 150},
        attempts=1, seconds=2.0, worker="replica-1",
    )  # fmt: skip
    return replace(result, **changes)  # type: ignore[arg-type]


def failed(number: int, code: str = "worker_crashed", message: str = "it died", **changes: object) -> Row:
    return replace(Row("corpus.jsonl", number, attempts=3, error=RowError(code, message)), **changes)  # type: ignore[arg-type]


SUMMARY = Summary(
    RunState.COMPLETED, total=10, done=8, reused=2, failed=2, tokens=8000, bytes_full=32000, bytes_full_16bit=16000,
    bytes_stored=8000, tokens_per_s=1500.0, elapsed_s=60.0, gpu_hours=0.25,
    workers={"replica-1": WorkerShare(done=6, tokens=6000, seconds=12.0)},
    times={"running": 1_800_000_000.0, "completed": 1_800_000_060.0},
)  # fmt: skip


MADE = BatchOptions(
    "s3://corpus/2026/", ["kvshelf-tiny"], {"policy": "snapkv", "compression_ratio": 0.75, "ttl_s": 60.0}
)


def report(tmp_path: Path, results: list[Row], summary: Summary = SUMMARY) -> str:
    path = tmp_path / "report.html"
    write_report(path, MADE, summary, results)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    return path.read_text()


class Tags(html.parser.HTMLParser):
    """The elements of a page, whether they are closed in order, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_says_what_happened(tmp_path: Path) -> None:
    results = [done(n, tokens=1000 + n, seconds=n / 4, attempts=1 + (n == 5)) for n in range(1, 7)]
    results += [done(7, reused=True), done(8, reused=True), failed(9), failed(10, "invalid_request", "no document")]
    tags = Tags(report(tmp_path, results))
    text = tags.text
    assert sum(name == "figure" for name, _ in tags.found) == 4, "lengths, compression, quality, seconds"
    for words in (
        "s3://corpus/2026/", "kvshelf-tiny", "snapkv", "0.75; ", "codecnone", "ttl s60.0",
        "Batch completed", "documents in the input", "1,500 tokens a second and 360 documents an hour", "0.25 hours",
        "worker_crashed", "corpus.jsonl, line 9", "it died", "no document", "2027-01-15 08:00:00 UTC",
        "8.00 kB, 50.0% of 16.00 kB uncompressed in 16 bits; 32.00 kB in the model's dtype",
        "from 1,000 to 1,006", "2,000 tokens were not prefilled",
        "One took 0.88 s of a replica", "more than one attempt: 1.",
        "Measured on 8 of 8 documents",
    ):  # fmt: skip
        assert words in text, words
    assert all(values["width"] == "100%" for name, values in tags.found if name == "svg" and "role" in values)
    wide = [attributes["width"] or "" for name, attributes in tags.found if name == "rect"]
    assert max(float(width.removesuffix("%")) for width in wide) <= 60, "the rest of the width is for label and count"
    assert text.rindex("row-6") < text.rindex("row-5"), "the slowest first"


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_markup_in_the_corpus_is_shown_as_text(tmp_path: Path, hostile: str) -> None:
    plain = [tag for tag, _ in Tags(report(tmp_path, [done(1), failed(2)])).found]
    rows = [done(1, custom_id=hostile, source=hostile), failed(2, "c", hostile, custom_id=hostile, source=hostile)]
    text = report(
        tmp_path, rows, replace(SUMMARY, reason=hostile, workers={hostile: WorkerShare(done=1, tokens=1, seconds=1)})
    )
    tags = Tags(text)
    assert [tag for tag, _ in tags.found if tag not in ("p",)] == [tag for tag in plain if tag != "p"]
    assert tags.open == []
    assert {name for _, attributes in tags.found for name in attributes} <= {
        "lang", "charset", "http-equiv", "content", "name", "class", "role", "aria-label",
        "width", "height", "x", "y", "dx",
    }  # fmt: skip
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    assert len(text) < 12_000


def test_a_batch_without_a_success_has_a_report_too(tmp_path: Path) -> None:
    nothing = Summary(RunState.FAILED, reason="no row of the input is a document", total=1, failed=1)
    text = report(tmp_path, [failed(1)], nothing)
    assert "no row of the input is a document" in text
    assert "Saved" not in text
    assert "nan" not in Tags(text).text.lower()


def test_rows_that_were_not_reached_are_told(tmp_path: Path) -> None:
    stopped = replace(SUMMARY, state=RunState.CANCELLED, total=100)
    assert "90 documents were not reached" in report(tmp_path, [done(1)], stopped)


@pytest.mark.parametrize("name", ["report.md", "report.txt", "report", "missing/report.html"])
def test_a_name_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        require_report(tmp_path / name)
    assert error.value.param == "--report"
    assert ".html" in error.value.message or name.startswith("missing")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_results(tmp_path: Path, soak: bool) -> None:
    def results(count: int) -> Iterator[Row]:
        numbers = random.Random(1)
        for n in range(count):
            yield done(n, tokens=numbers.randrange(1, 10**6), seconds=numbers.random() * 100) if n % 50 else failed(n)

    def peak(count: int) -> int:
        tracemalloc.start()
        write_report(tmp_path / "report.html", MADE, replace(SUMMARY, total=count), results(count))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(100)
    small, large = peak(2000), peak(1_000_000 if soak else 20_000)
    assert large < small + 100_000


def test_quantiles_are_near_those_of_the_numbers() -> None:
    drawn = random.Random(2)
    numbers = [drawn.lognormvariate(8, 1.5) for _ in range(20_000)]
    histogram = Histogram.doublings()
    for number in numbers:
        histogram.add(number)
    assert histogram.mean == pytest.approx(statistics.fmean(numbers))
    for share, exact in zip((0.05, 0.5, 0.95), statistics.quantiles(numbers, n=20)[::9], strict=True):
        assert histogram.quantile(share) == pytest.approx(exact, rel=0.045)
    assert sum(count for _, count in histogram.bars()) == len(numbers)
    assert all(end == pytest.approx(2 * start) for (start, _), (end, _) in pairwise(histogram.bars()))


def test_shares_have_their_ends() -> None:
    histogram = Histogram.shares()
    for number in (0.0, 1.0, 1.0, 0.5):
        histogram.add(number)
    counts = [count for _, count in histogram.bars()]
    assert (len(counts), counts[0], counts[-1], counts[10]) == (20, 1, 2, 1)
    assert (histogram.quantile(0.1), histogram.quantile(0.99)) == (
        pytest.approx(0, abs=0.002),
        pytest.approx(1, abs=0.002),
    )
