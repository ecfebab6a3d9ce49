"""`kvshelf bench quality`, `needle`, `memory`, `retrieval`, `together` and `search`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count, product
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
    Device,
    Dtype,
    Json,
    Model,
    Output,
    Threads,
    Weights,
    choices,
    counted,
    decimals,
    numbers,
    publish,
    split,
    writable,
)

if TYPE_CHECKING:
    from kvshelf_bench.quality.grid import MadeUnit
    from kvshelf_bench.quality.measuring import Progress
    from kvshelf_bench.quality.memory import Answers, Peak
    from kvshelf_bench.quality.outcome import Outcome

_PICTURES = (".png", ".svg", ".pdf")
_OF_MADE = ("size", "tasks", "haystacks", "lengths", "documents", "export")
_CROSSED = ("policies", "ratios", "budgets", "codecs", "select", "shares")
_OF_DATASETS = (
    *("ways", "fraction", "limit", "max_new_tokens", "cues", "questions", "turns", "scorer", "prompts", "truncate"),
    *("results", "compare", "baseline", "kvpress_python"),
)


def quality(
    context: typer.Context,
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "plain",
    threads: Threads = 1,
    processes: Annotated[int, typer.Option(min=0, help="0: one per core, or one for a GPU.")] = 0,
    size: Annotated[
        str,
        typer.Option(
            help="small (minutes), core (the cells of docs/internals/policies.md), default (an hour) or large (a day)."
        ),
    ] = "default",
    policies: Annotated[str, typer.Option(help="Such as ems,lagkv:lag=64,sink=8.  [default: all]")] = "",
    ratios: Annotated[str, typer.Option(help="Fractions removed, comma-separated.")] = "",
    budgets: Annotated[str, typer.Option(help="Entries kept per KV head, comma-separated: beside the ratios.")] = "",
    codecs: Annotated[str, typer.Option(help="Comma-separated.")] = "",
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = "",
    haystacks: Annotated[str, typer.Option(help="filler, prose, dense.")] = "",
    lengths: Annotated[str, typer.Option(help="Tokens per document, comma-separated.")] = "",
    documents: Annotated[int | None, typer.Option(min=1, help="Documents per cell.")] = None,
    select: Annotated[str, typer.Option(help="Selectors that read a part, such as quest,policy:snapkv:window=8.")] = "",
    shares: Annotated[
        str, typer.Option(help="Parts of a document's tokens that they may read.  [default: 1/4 to 1/32]")
    ] = "",
    export: Annotated[bool, typer.Option("--export", help="Also rows answered by plain transformers.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0,
    dataset: Annotated[
        str, typer.Option(help="Instead of made cells: a file, a folder, a dataset of the hub, or abilities.")
    ] = "",
    ways: Annotated[
        str, typer.Option(help="With --dataset, instead of --policies: such as full/int4,keydiff@0.75,snapkv@128.")
    ] = "",
    fraction: Annotated[
        float, typer.Option(min=0, max=1, help="With --dataset: the share of its documents, drawn by --seed.")
    ] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="With --dataset: at most so many documents.")] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(min=0, help="With --dataset: tokens of an answer; 0: as its rows or their benchmark say, or 48."),
    ] = 0,
    cues: Annotated[
        int | None, typer.Option(min=0, help="With --dataset: cues of each cache's figure; 0 measures none.")
    ] = None,
    questions: Annotated[
        str, typer.Option(help="With --dataset: unknown at compression, or known: one compression for each.")
    ] = "unknown",
    turns: Annotated[
        bool, typer.Option("--turns", help="With --dataset: each question behind the earlier ones and their answers.")
    ] = False,
    scorer: Annotated[str, typer.Option(help="With --dataset: in place of those of its tasks.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="With --dataset: prompts of its tasks, as LongBench's dataset2prompt.json.")
    ] = None,
    truncate: Annotated[
        str, typer.Option(help="With --dataset: middle cuts contexts that are too long; middle:3500 sets the tokens.")
    ] = "",
    results: Annotated[
        Path | None, typer.Option(help="With --dataset: a new folder of predictions, metrics and configurations.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="With --dataset: an earlier --results folder, set beside this run.")
    ] = None,
    baseline: Annotated[str, typer.Option(help="With --dataset: kvpress runs the ways that it has, too.")] = "",
    kvpress_python: Annotated[
        Path | None, typer.Option(help="With --baseline kvpress: a Python that has kvpress installed.")
    ] = None,
    resume: Annotated[
        Path, typer.Option(callback=writable, help="Results so far; what it holds is not measured again.")
    ] = Path("kvshelf-quality.jsonl"),
    output: Output = None,
    picture: Annotated[
        Path | None, typer.Option(callback=writable, help="Score against bytes, as .png, .svg or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How well the model answers from what each policy, ratio and codec keeps, at how many bytes."""
    _require_of_one_kind(context, bool(dataset))
    if picture is not None:
        _require_drawable(picture)
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.engines import EngineOptions
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality import quality as bench
        from kvshelf_bench.quality.grid import make_grid
        from kvshelf_bench.quality.tables import notes, quality_tables

    options = EngineOptions(model, device, dtype, threads, weights)
    crossed: dict[str, Any] = {
        "policies": split(policies),
        "ratios": decimals(ratios, "--ratios", 0, 1) if ratios else (),
        "budgets": numbers(budgets, "--budgets") if budgets else (),
        "codecs": split(codecs),
        "select": split(select),
        "shares": decimals(shares, "--shares", 0, 1) if shares else (),
    }
    if dataset:
        from kvshelf_bench.quality.dataset import command

        command.measure(
            command.Chosen(
                bench="quality", dataset=dataset, resume=resume, processes=processes, output=output, as_json=as_json,
                ways=split(ways), crossed=crossed, fraction=fraction, limit=limit, seed=seed,
                max_new_tokens=max_new_tokens, cues=cues, questions=questions, turns=turns, scorer=scorer,
                prompts=prompts, truncate=truncate, results=results, compare=compare, baseline=baseline,
                kvpress_python=kvpress_python, picture=picture,
            ),
            options,
        )  # fmt: skip
        return
    grid = make_grid(
        size,
        tasks=split(tasks),  # type: ignore[arg-type]  # make_grid refuses unknown names
        haystacks=split(haystacks),  # type: ignore[arg-type]
        lengths=numbers(lengths) if lengths else (),
        documents=documents,
        export=export,
        seed=seed,
        **crossed,
    )
    with _bar(grid.units()) as done:
        summary = bench.run(grid, options, resume, processes=processes, progress=done)
    title = f"{model}: exact answers, the question unknown at compression"
    report: dict[str, Any] = {
        "bench": "quality",
        "model": model,
        "weights": weights,
        "size": size,
        "seed": seed,
        "machine": machine(),
    }
    report |= summary.to_dict()
    publish(report, quality_tables(summary, title), output, as_json, notes=notes(summary))
    if picture is not None:
        from kvshelf_bench.quality.picture import draw

        if not draw(summary, picture, title):
            typer.echo(f"{picture} was not drawn: the model can do none of the cells that all rows share", err=True)


def _require_of_one_kind(context: typer.Context, dataset: bool) -> None:
    """Refuses options of made documents with a dataset, those of a dataset without one, and ways beside policies."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    others, kind = (_OF_MADE, "made documents") if dataset else (_OF_DATASETS, "a --dataset")
    for name in given:
        if name in others:
            raise InvalidRequest(f"--{name.replace('_', '-')} is for {kind} alone; leave it out", param=name)
        if name in _CROSSED and "ways" in given:
            raise InvalidRequest(f"--ways says all that --{name} does; give one of them", param=name)


def needle(
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "plain",
    threads: Threads = 1,
    processes: Annotated[int, typer.Option(min=0, help="0: one per core, or one for a GPU.")] = 0,
    ways: Annotated[str, typer.Option(help="Such as full/int4,keydiff@0.75,snapkv@128.")] = "keydiff,kvzip,snapkv",
    lengths: Annotated[str, typer.Option(help="Tokens of a document, comma-separated.")] = "512,1024,2048",
    depths: Annotated[str, typer.Option(help="Percent of the haystack before the needle.")] = "0,25,50,75,100",
    documents: Annotated[int, typer.Option(min=1, help="Documents of a cell.")] = 1,
    haystack: Annotated[Path | None, typer.Option(help="A text, or a folder of .txt files.  [default: prose]")] = None,
    needle: Annotated[str, typer.Option(help="A sentence to hide.  [default: a fact for each document]")] = "",
    question: Annotated[str, typer.Option(help="About the --needle.")] = "",
    answer: Annotated[str, typer.Option(help="To the --question.")] = "",
    questions: Annotated[str, typer.Option(help="unknown at compression, or known.")] = "unknown",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0,
    resume: Annotated[
        Path, typer.Option(callback=writable, help="Results so far; what it holds is not measured again.")
    ] = Path("kvshelf-quality.jsonl"),
    results: Annotated[Path | None, typer.Option(help="A new folder, as of `bench quality --dataset`.")] = None,
    output: Output = None,
    picture: Annotated[Path | None, typer.Option(callback=writable, help="A map of each way.")] = None,
    as_json: Json = False,
) -> None:
    """A needle in a haystack: right answers by the length of the document and the depth of the needle in it."""
    if picture is not None:
        _require_drawable(picture)
    if any((needle, question, answer)) and not all((needle, question, answer)):
        raise InvalidRequest("--needle, --question and --answer are of one needle; give all three", param="needle")
    percent = [round(one) for one in decimals(depths, "--depths", 0, 100)]
    with needs_extra("serve", "the bench"), needs_extra("bench", "the picture"):
        from functools import partial

        from kvshelf_bench.engines import EngineOptions
        from kvshelf_bench.quality.dataset import command
        from kvshelf_bench.quality.dataset.needle import Cells, Needle, draw, grids, made, read_haystack

    hay = None if haystack is None else read_haystack(haystack)
    hidden = Needle(needle, question, answer) if needle else None
    cells = Cells(numbers(lengths), percent, documents, seed)
    options = EngineOptions(model, device, dtype, threads, weights)
    found = made(cells, options.load().require_text("haystack"), hay, hidden)
    chosen = command.Chosen(
        bench="needle", dataset="needle", resume=resume, processes=processes, output=output, as_json=as_json,
        ways=split(ways), crossed={}, seed=seed, max_new_tokens=max_new_tokens, cues=0,
        questions=questions, results=results, picture=picture,
    )  # fmt: skip
    shown = command.Made(found, partial(grids, cells=cells), partial(draw, cells=cells))
    command.measure(chosen, options, shown)


def memory(
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    tokens: Annotated[str, typer.Option(help="Tokens of the document, template included, comma-separated.")] = "16000",
    policies: Annotated[str, typer.Option(help="Comma-separated.  [default: all]")] = "",
    removed: Annotated[float, typer.Option(help="Fraction removed.")] = 0.75,
    ways: Annotated[str, typer.Option(help="Instead of --policies: such as snapkv@1024,lagkv:lag=64@0.5.")] = "",
    questions: Annotated[int, typer.Option(min=1, help="Asked of each cache at once, with --answer-tokens.")] = 1,
    answer_tokens: Annotated[int, typer.Option(min=0, help="Of each answer; 0 asks nothing.")] = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Peak memory of compressing a document under each policy, beside a prefill that keeps all, and of answering."""
    with needs_extra("serve", "the bench"):
        from kvshelf.methods.policies import POLICIES
        from kvshelf_bench.engines import EngineOptions
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality import memory as bench
        from kvshelf_bench.quality.grid import Row, Variant

    if not 0 <= removed < 1:
        raise InvalidRequest(f"--removed is {removed}; it must be a fraction from 0 to below 1", param="removed")
    lengths = numbers(tokens, "--tokens")
    if min(lengths) < 64:
        raise InvalidRequest(f"--tokens {tokens}: each number must be at least 64", param="tokens")
    variants = [] if ways else list(map(Variant.parse, split(policies) or tuple(POLICIES)))
    chosen = [Row.parse(way) for way in split(ways)]
    chosen += [Row(variant, removed if variant.takes_budget else 0.0) for variant in variants]
    options, answers, rows = EngineOptions(model, device, dtype, threads), bench.Answers(questions, answer_tokens), []
    tables = []
    each = len(dict.fromkeys((Row(Variant("full"), 0.0), *chosen)))
    with counted(f"{model}, {tokens} tokens", each * len(lengths)) as step:
        for length in lengths:
            found = []
            for row in bench.peaks(options, length, chosen, answers):
                found.append(row)
                step()
            tables.append(_memory_table(found, length, answers))
            rows += found
    report: dict[str, Any] = {"bench": "memory", "model": model, "machine": machine(), "answers": asdict(answers)}
    publish(report | {"rows": rows}, tables, output, as_json)


def _memory_table(rows: Sequence[Peak], length: int, answers: Answers) -> Table:
    headings = ["policy", "phase", "removed", "peak", "of full's", "cache", "prefill", "compression"]
    table = Table(*headings, *(["answering", "a token"] if answers.tokens else []), title=f"{length} tokens")
    for row in rows:
        share = f"{row.peak_bytes / rows[0].peak_bytes:.0%}" if rows[0].peak_bytes else ""
        cells = [f"{row.peak_bytes / 1e6:,.1f} MB", share, f"{row.cache_bytes / 1e6:,.1f} MB"]
        cells += [f"{row.prefill_s:.2f} s", f"{row.compress_s:.2f} s"]
        if answers.tokens:
            cells += [f"{row.answer_bytes / 1e6:,.1f} MB", f"{row.token_s * 1000:.1f} ms"]
        shown = cells if row.refused is None else [f"refused: {row.refused}"]
        table.add_row(row.policy, row.phase, f"{row.removed:.0%}" if row.budget is None else f"to {row.budget}", *shown)
    return table


def retrieval(
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    policy: Annotated[str, typer.Option(help="full measures the model itself.")] = "full",
    compression_ratio: Annotated[float | None, typer.Option(help="Fraction removed.")] = None,
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = "needle,multikey,digits32",
    haystacks: Annotated[str, typer.Option(help="Comma-separated.")] = "filler,prose",
    lengths: Annotated[str, typer.Option(help="Tokens per document, comma-separated.")] = "1024,2048,4096",
    documents: Annotated[int, typer.Option(min=1, help="Fresh documents per cell.")] = 200,
    seed: Annotated[int | None, typer.Option(help="Seed of the first document.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Exact answers from a cache, per task, haystack and length."""
    with needs_extra("serve", "the bench"):
        from kvshelf.samples.tasks import HAYSTACKS, TASKS
        from kvshelf_bench.engines import EngineOptions
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality.retrieval import EVALUATION_SEED, measure_cell

    engine = EngineOptions(model, device, dtype, threads).load()
    compress: dict[str, Any] = {"policy": policy}
    if compression_ratio is not None:
        compress["compression_ratio"] = compression_ratio
    around = choices(haystacks, HAYSTACKS, "--haystacks")
    cells = list(product(numbers(lengths), choices(tasks, TASKS, "--tasks"), around))
    first, results = EVALUATION_SEED if seed is None else seed, []
    with counted(f"{model}, {policy}", documents * len(cells)) as step:
        for tokens, task, hay in cells:
            made = measure_cell(engine, task, hay, tokens, documents, compress=compress, seed=first, progress=step)
            results.append(made)
    report: dict[str, Any] = {"bench": "retrieval", "model": model, "compress": compress, "machine": machine()}
    report["cells"] = [asdict(cell) | {"share": cell.share} for cell in results]
    table = Table("task", "haystack", "tokens", "documents", "exact", "95 %", title=f"{model}, policy {policy}")
    for cell in results:
        interval = f"{cell.low:.1%} - {cell.high:.1%}"
        table.add_row(cell.task, cell.haystack, f"{cell.tokens}", f"{cell.documents}", f"{cell.share:.1%}", interval)
    publish(report, [table], output, as_json)


def together(
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    documents: Annotated[str, typer.Option(help="How many are asked together, comma-separated.")] = "3,8,32",
    tokens: Annotated[int, typer.Option(min=300, help="Tokens of each document.")] = 512,
    sets: Annotated[int, typer.Option(min=1, help="Sets of documents for each number.")] = 5,
    questions: Annotated[int, typer.Option(min=1, max=48, help="Questions about a set.")] = 16,
    policy: Annotated[str, typer.Option(help="Of every cache.")] = "full",
    codec: Annotated[str, typer.Option(help="Of every cache.")] = "int4",
    select: Annotated[
        str, typer.Option(help="Also measured: a selector that reads as much as a quarter of one document.")
    ] = "fasa",
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """One question about several documents, beside one prefill of all and the document that knows."""
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.engines import EngineOptions
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality.together import measure_together

    engine, counts, rows = EngineOptions(model, device, dtype, threads).load(), numbers(documents), []
    with counted(model, sets * len(counts)) as step:
        for count_ in counts:
            rows.append(
                measure_together(
                    engine, count_, tokens=tokens, sets=sets, questions=questions, policy=policy,
                    codec=codec, selector=select, seed=seed, progress=step,
                )
            )  # fmt: skip
    headings = ("documents", "questions", "together", "95 %", "one prefill", "the right one alone", "first source")
    table = Table(
        *headings, select, "first token", title=f"{model}, {policy}, {codec}: {tokens} tokens each, exact answers"
    )
    for row in rows:
        share = [
            f"{100 * found / row.questions:.1f} %" for found in (row.exact, row.alone, row.first_source, row.selected)
        ]
        joined = "too long" if row.joined is None else f"{100 * row.joined / row.questions:.1f} %"
        interval = f"{row.low:.1%} - {row.high:.1%}"
        cells = (f"{row.documents}", f"{row.questions}", share[0], interval, joined, *share[1:3])
        table.add_row(*cells, f"{share[3]} of {row.select_tokens}", f"{row.first_token.median:.2f} of single ones")
    report: dict[str, Any] = {"bench": "together", "model": model, "policy": policy, "codec": codec}
    publish(report | {"machine": machine(), "rows": rows}, [table], output, as_json)


def search(
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = "multikey",
    haystacks: Annotated[str, typer.Option(help="Comma-separated.")] = "prose",
    tokens: Annotated[int, typer.Option(min=64, help="Tokens per document.")] = 512,
    documents: Annotated[int, typer.Option(min=1, help="Documents on the shelf.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Another set of documents.")] = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """How often a search names the document that a question is about, beside BM25 over the texts."""
    with needs_extra("serve", "the bench"):
        from kvshelf.samples.tasks import HAYSTACKS, TASKS
        from kvshelf_bench.engines import EngineOptions
        from kvshelf_bench.measure import machine
        from kvshelf_bench.quality import search as bench
    with needs_extra("bench", "the comparison with BM25"):
        import bm25s  # noqa: F401 - before the documents are compressed

    engine = EngineOptions(model, device, dtype, threads).load()
    kinds = choices(tasks, TASKS, "--tasks"), choices(haystacks, HAYSTACKS, "--haystacks")
    asked = list(bench.documents(engine, *kinds, tokens, documents, seed))
    with counted(f"{model}, {documents} documents", documents) as step:
        ways = bench.measure(engine, asked, step)
    table = Table(
        "search", "first", "among 5", "bytes", f"of {bench.CODEC}", "ms", title=f"{model}: {documents} documents"
    )
    for way in ways:
        sizes = [f"{way.nbytes:,.0f}", f"{way.share:.1%}"] if way.nbytes else ["", ""]
        table.add_row(way.name, f"{way.at_1:.1%}", f"{way.at_5:.1%}", *sizes, f"{way.ms:.1f}")
    report: dict[str, Any] = {"bench": "search", "model": model, "tasks": tasks, "haystacks": haystacks, "seed": seed}
    report |= {"tokens": tokens, "documents": documents, "machine": machine(), "ways": [asdict(way) for way in ways]}
    publish(report, [table], output, as_json)


@contextmanager
def _bar(units: Sequence[MadeUnit]) -> Iterator[Progress[MadeUnit]]:
    """Progress in tokens to prefill, as units differ by an order of magnitude, with the count of units next to it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    numbered = count(1)
    with Bar(*columns, console=Console(stderr=True), speed_estimate_period=300) as progress:
        bar = progress.add_task("loading", total=sum(map(_cost, units)))

        def done(unit: MadeUnit, _: Sequence[Outcome], found: bool) -> None:
            name = f"{next(numbered)}/{len(units)} {unit.variant.label}, {unit.cell.label}"
            progress.update(bar, advance=_cost(unit), description=name + (" (found)" if found else ""))

        yield done


def _cost(unit: MadeUnit) -> int:
    """What a unit takes, in tokens to prefill: a row's answers take about as long as 512 of them."""
    return unit.cell.tokens + 512 * len(unit.rows)


def _require_drawable(picture: Path) -> None:
    """Before an hour of work, not after it."""
    if picture.suffix not in _PICTURES:
        raise InvalidRequest(f"--picture {picture} must end in one of {', '.join(_PICTURES)}", param="picture")
    with needs_extra("bench", "--picture"):
        import matplotlib  # noqa: F401
