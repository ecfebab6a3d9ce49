"""`kvshelf bench quality`, `needle`, `memory`, `retrieval`, `together` and `search`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count, product, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.errors import InvalidRequest
from kvshelf_bench.options import (
    FreeLoading,
    Json,
    Loading,
    Output,
    Reporting,
    WeightedLoading,
    choices,
    counted,
    decimals,
    numbers,
    publish,
    split,
    writable,
)
from kvshelf_bench.quality.options import DatasetOptions, Sets

if TYPE_CHECKING:
    from kvshelf_bench.quality.grid import Changes, Grid, MadeUnit, Row
    from kvshelf_bench.quality.measuring import Progress
    from kvshelf_bench.quality.memory import Answers, Peak
    from kvshelf_bench.quality.outcome import Outcome
    from kvshelf_bench.quality.together import Together

Processes = Annotated[int, typer.Option(min=0, help="0: one per core, or one for a GPU.")]
Resume = Annotated[Path, typer.Option(callback=writable, help="Results so far; what it holds is not measured again.")]

_PICTURES = (".png", ".svg", ".pdf")
_OF_MADE = ("size", "tasks", "haystacks", "lengths", "documents", "export")
_CROSSED = ("policies", "ratios", "budgets", "codecs", "select", "shares")
_OF_DATASETS = (
    *("ways", "fraction", "limit", "max_new_tokens", "cues", "questions", "turns", "scorer", "prompts", "truncate"),
    *("results", "compare", "baseline", "kvpress_python"),
)


@dataclass(frozen=True)
class _GridOptions:
    """A grid of made documents, and the ways to keep and to read them, which a dataset may have, too."""

    size: Annotated[
        str,
        typer.Option(
            help="small (minutes), core (the cells of docs/internals/policies.md), default (an hour) or large (a day)."
        ),
    ] = "default"
    policies: Annotated[str, typer.Option(help="Such as ems,lagkv:lag=64,sink=8.  [default: all]")] = ""
    ratios: Annotated[str, typer.Option(help="Fractions removed, comma-separated.")] = ""
    budgets: Annotated[str, typer.Option(help="Entries kept per KV head, comma-separated: beside the ratios.")] = ""
    codecs: Annotated[str, typer.Option(help="Comma-separated.")] = ""
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = ""
    haystacks: Annotated[str, typer.Option(help="filler, prose, dense.")] = ""
    lengths: Annotated[str, typer.Option(help="Tokens per document, comma-separated.")] = ""
    documents: Annotated[int | None, typer.Option(min=1, help="Documents per cell.")] = None
    select: Annotated[str, typer.Option(help="Selectors that read a part, such as quest,policy:snapkv:window=8.")] = ""
    shares: Annotated[
        str, typer.Option(help="Parts of a document's tokens that they may read.  [default: 1/4 to 1/32]")
    ] = ""
    export: Annotated[bool, typer.Option("--export", help="Also rows answered by plain transformers.")] = False
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0

    def rows(self) -> Changes:
        """Of the ways to keep and to read documents. Raises `InvalidRequest`."""
        from kvshelf_bench.quality.grid import Changes

        return Changes(
            policies=split(self.policies),
            ratios=decimals(self.ratios, "--ratios", 0, 1) if self.ratios else (),
            budgets=numbers(self.budgets, "--budgets") if self.budgets else (),
            codecs=split(self.codecs),
            select=split(self.select),
            shares=decimals(self.shares, "--shares", 0, 1) if self.shares else (),
        )

    def grid(self, rows: Changes) -> Grid:
        """Raises `InvalidRequest`."""
        from kvshelf_bench.quality.grid import make_grid

        changes = replace(
            rows,
            tasks=split(self.tasks),  # type: ignore[arg-type]  # make_grid refuses unknown names
            haystacks=split(self.haystacks),  # type: ignore[arg-type]
            lengths=numbers(self.lengths) if self.lengths else (),
            documents=self.documents,
        )
        return make_grid(self.size, changes, export=self.export, seed=self.seed)


@dataclass(frozen=True)
class _Printing:
    """Where the result goes, as `Reporting`, with a picture between its options."""

    output: Output = None
    picture: Annotated[
        Path | None, typer.Option(callback=writable, help="Score against bytes, as .png, .svg or .pdf.")
    ] = None
    as_json: Json = False

    @property
    def reporting(self) -> Reporting:
        return Reporting(self.output, self.as_json)

    def require_drawable(self) -> None:
        """Before an hour of work, not after it."""
        if self.picture is None:
            return
        if self.picture.suffix not in _PICTURES:
            raise InvalidRequest(f"--picture {self.picture} must end in one of {', '.join(_PICTURES)}", param="picture")
        with needs_extra("bench", "--picture"):
            import matplotlib  # noqa: F401


def quality(
    *,
    context: typer.Context,
    loading: WeightedLoading,
    processes: Processes = 0,
    cells: _GridOptions,
    dataset: DatasetOptions,
    resume: Resume = Path("kvshelf-quality.jsonl"),
    printing: _Printing,
) -> None:
    """How well the model answers from what each policy, ratio and codec keeps, at how many bytes."""
    _require_of_one_kind(context, bool(dataset.dataset))
    printing.require_drawable()
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality import quality as bench
        from kvshelf_bench.quality.tables import notes, quality_tables

    options, rows, model = loading.engine_options(), cells.rows(), loading.model
    if dataset.dataset:
        from kvshelf_bench.quality.dataset import command

        request = command.DatasetRequest(
            **vars(dataset), bench="quality", resume=resume, processes=processes, reporting=printing.reporting,
            changes=rows, seed=cells.seed, picture=printing.picture,
        )  # fmt: skip
        command.measure(request, options)
        return
    grid = cells.grid(rows)
    with _bar(grid.units()) as done:
        summary = bench.run(grid, options, resume, processes=processes, progress=done)
    title = f"{model}: exact answers, the question unknown at compression"
    report: dict[str, Any] = {"bench": "quality", "model": model, "weights": loading.weights, "size": cells.size}
    report |= {"seed": cells.seed, "machine": machine(), **summary.to_dict()}
    publish(report, quality_tables(summary, title), printing.reporting, notes=notes(summary))
    if printing.picture is not None:
        from kvshelf_bench.quality.picture import draw

        if not draw(summary, printing.picture, title):
            warning = f"{printing.picture} was not drawn: the model can do none of the cells that all rows share"
            typer.echo(warning, err=True)


def _require_of_one_kind(context: typer.Context, dataset: bool) -> None:
    """Refuses options of made documents with a dataset, those of a dataset without one, and ways beside policies."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    on_command_line = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    others, kind = (_OF_MADE, "made documents") if dataset else (_OF_DATASETS, "a --dataset")
    for name in on_command_line:
        if name in others:
            raise InvalidRequest(f"--{name.replace('_', '-')} is for {kind} alone; leave it out", param=name)
        if name in _CROSSED and "ways" in on_command_line:
            raise InvalidRequest(f"--ways says all that --{name} does; give one of them", param=name)


@dataclass(frozen=True)
class _Haystacks:
    lengths: Annotated[str, typer.Option(help="Tokens of a document, comma-separated.")] = "512,1024,2048"
    depths: Annotated[str, typer.Option(help="Percent of the haystack before the needle.")] = "0,25,50,75,100"
    documents: Annotated[int, typer.Option(min=1, help="Documents of a cell.")] = 1
    haystack: Annotated[Path | None, typer.Option(help="A text, or a folder of .txt files.  [default: prose]")] = None
    needle: Annotated[str, typer.Option(help="A sentence to hide.  [default: a fact for each document]")] = ""
    question: Annotated[str, typer.Option(help="About the --needle.")] = ""
    answer: Annotated[str, typer.Option(help="To the --question.")] = ""

    def percent(self) -> list[int]:
        """The depths. Raises `InvalidRequest`, also for a needle of which a part is missing."""
        parts = self.needle, self.question, self.answer
        if any(parts) and not all(parts):
            raise InvalidRequest("--needle, --question and --answer are of one needle; give all three", param="needle")
        return [round(one) for one in decimals(self.depths, "--depths", 0, 100)]


@dataclass(frozen=True)
class _Asking:
    questions: Annotated[str, typer.Option(help="unknown at compression, or known.")] = "unknown"
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 24


@dataclass(frozen=True)
class _Documents:
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0
    resume: Resume = Path("kvshelf-quality.jsonl")
    results: Annotated[Path | None, typer.Option(help="A new folder, as of `bench quality --dataset`.")] = None


@dataclass(frozen=True)
class _Mapping(_Printing):
    picture: Annotated[Path | None, typer.Option(callback=writable, help="A map of each way.")] = None


def needle(
    *,
    loading: WeightedLoading,
    processes: Processes = 0,
    ways: Annotated[str, typer.Option(help="Such as full/int4,keydiff@0.75,snapkv@128.")] = "keydiff,kvzip,snapkv",
    haystacks: _Haystacks,
    asking: _Asking,
    run: _Documents,
    printing: _Mapping,
) -> None:
    """A needle in a haystack: right answers by the length of the document and the depth of the needle in it."""
    printing.require_drawable()
    percent = haystacks.percent()
    with needs_extra("serve", "the bench"), needs_extra("bench", "the picture"):
        from functools import partial

        from kvshelf_bench.quality.dataset import command
        from kvshelf_bench.quality.dataset.needle import Cells, Needle, draw, grids, make_documents, read_haystack

    hay = None if haystacks.haystack is None else read_haystack(haystacks.haystack)
    hidden = Needle(haystacks.needle, haystacks.question, haystacks.answer) if haystacks.needle else None
    cells = Cells(numbers(haystacks.lengths), percent, haystacks.documents, run.seed)
    options = loading.engine_options()
    documents = make_documents(cells, options.load().encoder.require_text("haystack"), hay, hidden)
    request = command.DatasetRequest(
        **vars(asking), bench="needle", dataset="needle", cues=0, ways=ways, resume=run.resume, results=run.results,
        processes=processes, reporting=printing.reporting, seed=run.seed, picture=printing.picture,
    )  # fmt: skip
    source = command.MadeDocuments(documents, partial(grids, cells=cells), partial(draw, cells=cells))
    command.measure(request, options, source)


@dataclass(frozen=True)
class _Kept:
    policies: Annotated[str, typer.Option(help="Comma-separated.  [default: all]")] = ""
    removed: Annotated[float, typer.Option(help="Fraction removed.")] = 0.75
    ways: Annotated[str, typer.Option(help="Instead of --policies: such as snapkv@1024,lagkv:lag=64@0.5.")] = ""

    def require(self) -> None:
        if not 0 <= self.removed < 1:
            reason = f"--removed is {self.removed}; it must be a fraction from 0 to below 1"
            raise InvalidRequest(reason, param="removed")

    def rows(self) -> list[Row]:
        """Raises `InvalidRequest`."""
        from kvshelf.methods.policies import POLICIES
        from kvshelf_bench.quality.grid import Row, Variant

        if self.ways:
            return list(map(Row.parse, split(self.ways)))
        variants = list(map(Variant.parse, split(self.policies) or tuple(POLICIES)))
        return [Row(variant, self.removed if variant.takes_budget else 0.0) for variant in variants]


@dataclass(frozen=True)
class _Answering:
    questions: Annotated[str, typer.Option(help="Asked at once, comma-separated; with --answer-tokens.")] = "1"
    answer_tokens: Annotated[str, typer.Option(help="Of each answer, comma-separated.  [default: none]")] = ""

    def answers(self) -> list[Answers]:
        """Each number of questions with each length. Raises `InvalidRequest`."""
        from kvshelf_bench.quality.memory import Answers

        if not self.answer_tokens and self.questions != "1":
            reason = f"--questions {self.questions}: nothing is asked without --answer-tokens; give both"
            raise InvalidRequest(reason, param="questions")
        lengths = numbers(self.answer_tokens, "--answer-tokens") if self.answer_tokens else []
        return list(starmap(Answers, product(numbers(self.questions, "--questions"), lengths)))


def memory(
    *,
    loading: Loading,
    tokens: Annotated[str, typer.Option(help="Tokens of the document, template included, comma-separated.")] = "16000",
    kept: _Kept,
    answering: _Answering,
    reporting: Reporting,
) -> None:
    """Peak memory of compressing a document under each policy, beside a prefill that keeps all, and of answering."""
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality import memory as bench
        from kvshelf_bench.quality.grid import PLAIN

    kept.require()
    lengths = numbers(tokens, "--tokens")
    if min(lengths) < 64:
        raise InvalidRequest(f"--tokens {tokens}: each number must be at least 64", param="tokens")
    options, chosen, model = loading.engine_options(), kept.rows(), loading.model
    answers, rows, tables = answering.answers(), [], []
    with counted(f"{model}, {tokens} tokens", len({PLAIN, *chosen}) * len(lengths)) as step:
        for length in lengths:
            of_length = []
            for row in bench.peaks(options, length, chosen, answers):
                of_length.append(row)
                step()
            tables += _memory_tables(of_length, length)
            rows += of_length
    report: dict[str, Any] = {"bench": "memory", "model": model, "machine": machine()}
    publish(report | {"rows": rows}, tables, reporting)


def _memory_tables(rows: Sequence[Peak], length: int) -> list[Table]:
    """Of compressing, and of answering where anything was asked."""
    headings = ("policy", "phase", "removed", "peak", "of full's", "cache", "prefill", "compression")
    table = Table(*headings, title=f"{length} tokens")
    answering = Table(
        "policy", "removed", "questions", "answers of", "peak", "a token", title=f"asked of {length} tokens"
    )
    for row in rows:
        size = f"{row.removed:.0%}" if row.budget is None else f"to {row.budget}"
        share = f"{row.peak_bytes / rows[0].peak_bytes:.0%}" if rows[0].peak_bytes else ""
        cells = [f"{row.peak_bytes / 1e6:,.1f} MB", share, f"{row.cache_bytes / 1e6:,.1f} MB"]
        cells += [f"{row.prefill_s:.2f} s", f"{row.compress_s:.2f} s"]
        table.add_row(row.policy, row.phase, size, *(cells if row.refused is None else [f"refused: {row.refused}"]))
        for one in row.answering:
            cost = f"{one.peak_bytes / 1e6:,.1f} MB", f"{one.token_s * 1000:.1f} ms" if one.token_s else ""
            answering.add_row(row.policy, size, f"{one.questions}", f"{one.tokens}", *cost)
    return [table, *([answering] if answering.rows else [])]


@dataclass(frozen=True)
class _Compressing:
    policy: Annotated[str, typer.Option(help="full measures the model itself.")] = "full"
    compression_ratio: Annotated[float | None, typer.Option(help="Fraction removed.")] = None

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class _Fresh:
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = "needle,multikey,digits32"
    haystacks: Annotated[str, typer.Option(help="Comma-separated.")] = "filler,prose"
    lengths: Annotated[str, typer.Option(help="Tokens per document, comma-separated.")] = "1024,2048,4096"
    documents: Annotated[int, typer.Option(min=1, help="Fresh documents per cell.")] = 200
    seed: Annotated[int | None, typer.Option(help="Seed of the first document.")] = None


def retrieval(loading: FreeLoading, compression: _Compressing, fresh: _Fresh, reporting: Reporting) -> None:
    """Exact answers from a cache, per task, haystack and length."""
    with needs_extra("serve", "the bench"):
        from kvshelf.samples.tasks import HAYSTACKS, TASKS
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality.retrieval import EVALUATION_SEED, measure_cell

    engine, compress = loading.engine_options().load(), compression.arguments()
    model, policy, documents = loading.model, compression.policy, fresh.documents
    around = choices(fresh.haystacks, HAYSTACKS, "--haystacks")
    cells = list(product(numbers(fresh.lengths), choices(fresh.tasks, TASKS, "--tasks"), around))
    first, results = EVALUATION_SEED if fresh.seed is None else fresh.seed, []
    with counted(f"{model}, {policy}", documents * len(cells)) as step:
        for tokens, task, hay in cells:
            measured = measure_cell(engine, task, hay, tokens, documents, compress=compress, seed=first, progress=step)
            results.append(measured)
    report: dict[str, Any] = {"bench": "retrieval", "model": model, "compress": compress, "machine": machine()}
    report["cells"] = [asdict(cell) | {"share": cell.share} for cell in results]
    table = Table("task", "haystack", "tokens", "documents", "exact", "95 %", title=f"{model}, policy {policy}")
    for cell in results:
        interval = f"{cell.low:.1%} - {cell.high:.1%}"
        table.add_row(cell.task, cell.haystack, f"{cell.tokens}", f"{cell.documents}", f"{cell.share:.1%}", interval)
    publish(report, [table], reporting)


def together(
    *,
    loading: Loading,
    documents: Annotated[str, typer.Option(help="How many are asked together, comma-separated.")] = "3,8,32",
    sets: Sets,
    reporting: Reporting,
) -> None:
    """One question about several documents, beside one prefill of all and the document that knows."""
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality.together import measure_together

    engine, counts = loading.engine_options().load(), numbers(documents)
    with counted(loading.model, sets.sets * len(counts)) as step:
        rows = [measure_together(engine, number, sets, step) for number in counts]
    texts = f"{sets.tokens} tokens each" if sets.dataset is None else sets.dataset.name
    title = f"{loading.model}, {sets.policy}, {sets.codec}: {texts}, right answers"
    report: dict[str, Any] = {"bench": "together", "model": loading.model, "policy": sets.policy, "codec": sets.codec}
    report["dataset"] = None if sets.dataset is None else sets.dataset.name
    publish(report | {"machine": machine(), "rows": rows}, _together_tables(rows, sets.select, title), reporting)


def _together_tables(rows: Sequence[Together], selector: str, title: str) -> list[Table]:
    headings = ("documents", "questions", "together", "95 %", "one prefill", "the right one alone", "first source")
    table = Table(*headings, *([selector] if selector else []), "first token", title=title)
    routes = Table("documents", "route", "right", "right document first", "first token", title="one or two, by a route")
    for row in rows:

        def share(hits: int | None, of: int = row.questions) -> str:
            return "too long" if hits is None else f"{100 * hits / of:.1f} %"

        interval = f"{row.low:.1%} - {row.high:.1%}"
        cells = [f"{row.documents}", f"{row.questions}", share(row.exact), interval, share(row.joined)]
        cells += [share(row.alone), share(row.first_source)]
        cells += [] if row.selected is None else [share(row.selected)]
        table.add_row(*cells, f"{row.first_token.median:.2f} of single ones")
        for one in row.routed:
            first_token = f"{one.first_token.median:.3f} of the documents' prefills"
            routes.add_row(f"{row.documents}", one.route, share(one.exact), share(one.right_first), first_token)
    return [table, routes]


@dataclass(frozen=True)
class _Shelf:
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = "multikey"
    haystacks: Annotated[str, typer.Option(help="Comma-separated.")] = "prose"
    tokens: Annotated[int, typer.Option(min=64, help="Tokens per document.")] = 512
    documents: Annotated[int, typer.Option(min=1, help="Documents on the shelf.")] = 200
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0


def search(loading: FreeLoading, shelf: _Shelf, reporting: Reporting) -> None:
    """How often a search names the document that a question is about, beside BM25 over the texts."""
    with needs_extra("serve", "the bench"):
        from kvshelf.samples.tasks import HAYSTACKS, TASKS
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality import search as bench
    with needs_extra("bench", "the comparison with BM25"):
        import bm25s  # noqa: F401 - before the documents are compressed

    engine, model, documents = loading.engine_options().load(), loading.model, shelf.documents
    kinds = choices(shelf.tasks, TASKS, "--tasks"), choices(shelf.haystacks, HAYSTACKS, "--haystacks")
    texts = list(bench.documents(engine, *kinds, shelf.tokens, documents, shelf.seed))
    with counted(f"{model}, {documents} documents", documents) as step:
        ways = bench.measure(engine, texts, step)
    table = Table(
        "search", "first", "among 5", "bytes", f"of {bench.CODEC}", "ms", title=f"{model}: {documents} documents"
    )
    for way in ways:
        sizes = [f"{way.nbytes:,.0f}", f"{way.share:.1%}"] if way.nbytes else ["", ""]
        table.add_row(way.name, f"{way.at_1:.1%}", f"{way.at_5:.1%}", *sizes, f"{way.ms:.1f}")
    report: dict[str, Any] = {"bench": "search", "model": model, **vars(shelf), "machine": machine()}
    report["ways"] = [asdict(way) for way in ways]
    publish(report, [table], reporting)


@contextmanager
def _bar(units: Sequence[MadeUnit]) -> Iterator[Progress[MadeUnit]]:
    """Progress in tokens to prefill, as units differ by an order of magnitude, with the count of units next to it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    numbered = count(1)
    with Bar(*columns, console=Console(stderr=True), speed_estimate_period=300) as progress:
        bar = progress.add_task("loading", total=sum(map(_cost, units)))

        def done(unit: MadeUnit, _: Sequence[Outcome], resumed: bool) -> None:
            name = f"{next(numbered)}/{len(units)} {unit.variant.label}, {unit.cell.label}"
            progress.update(bar, advance=_cost(unit), description=name + (" (found)" if resumed else ""))

        yield done


def _cost(unit: MadeUnit) -> int:
    """What a unit takes, in tokens to prefill: a row's answers take about as long as 512 of them."""
    return unit.cell.tokens + 512 * len(unit.rows)
