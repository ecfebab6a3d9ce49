"""`kvshelf bench ...`: one command per measurement."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from kvshelf.bench.batches.cli import batch
from kvshelf.bench.kernels.cli import column_sums, kernels
from kvshelf.bench.options import (
    Device,
    Dtype,
    Json,
    Model,
    Output,
    Threads,
    choices,
    load_engine,
    numbers,
    progress_bar,
    publish,
)
from kvshelf.bench.quality.cli import memory, quality
from kvshelf.bench.speed.cli import speed
from kvshelf.bench.stores.cli import store
from kvshelf.bench.stores.cli_rates import rates

app = typer.Typer(help="Measure models, policies and speed on this machine.", no_args_is_help=True)
app.command()(quality)
app.command()(memory)
app.command()(speed)
app.command()(column_sums)
app.command()(kernels)
app.command()(store)
app.command()(rates)
app.command()(batch)


@app.command()
def retrieval(
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    policy: Annotated[str, typer.Option("--policy", help="full measures the model itself.")] = "full",
    compression_ratio: Annotated[float | None, typer.Option("--compression-ratio", help="Fraction removed.")] = None,
    tasks: Annotated[str, typer.Option("--tasks", help="Comma-separated.")] = "needle,multikey,digits32",
    haystacks: Annotated[str, typer.Option("--haystacks", help="Comma-separated.")] = "filler,prose",
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens per document, comma-separated.")] = "1024,2048,4096",
    documents: Annotated[int, typer.Option("--documents", min=1, help="Fresh documents per cell.")] = 200,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the first document.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Exact answers from a cache, per task, haystack and length."""
    from kvshelf.bench.measure import machine
    from kvshelf.bench.quality import retrieval as bench

    engine = load_engine(model, device, dtype, threads)
    compress: dict[str, Any] = {"policy": policy}
    if compression_ratio is not None:
        compress["compression_ratio"] = compression_ratio
    chosen = bench.cells(
        choices(tasks, bench.TASKS, "--tasks"), choices(haystacks, bench.HAYSTACKS, "--haystacks"), numbers(lengths)
    )
    results = []
    with progress_bar() as progress:
        bar = progress.add_task(f"{model}, {policy}", total=documents * len(chosen))
        for task, haystack, tokens in chosen:
            cell = bench.measure_cell(
                engine, task, haystack, tokens, documents, compress=compress,
                seed=bench.EVALUATION_SEED if seed is None else seed, progress=lambda: progress.advance(bar),
            )  # fmt: skip
            results.append(cell)
    report: dict[str, Any] = {"bench": "retrieval", "model": model, "compress": compress, "machine": machine()}
    report["cells"] = [cell.to_dict() for cell in results]
    table = Table("task", "haystack", "tokens", "documents", "exact", "95 %", title=f"{model}, policy {policy}")
    for cell in results:
        interval = f"{cell.low:.1%} - {cell.high:.1%}"
        table.add_row(cell.task, cell.haystack, f"{cell.tokens}", f"{cell.documents}", f"{cell.share:.1%}", interval)
    publish(report, [table], output, as_json)
