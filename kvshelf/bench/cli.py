"""`kvshelf bench ...`: one command per measurement."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from kvshelf.bench.cli_quality import memory, quality
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

app = typer.Typer(help="Measure models, policies and speed on this machine.", no_args_is_help=True)
app.command()(quality)
app.command()(memory)


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
    from kvshelf.bench import retrieval as bench
    from kvshelf.bench.measure import machine

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


@app.command()
def speed(
    model: Model = "kvshelf-tiny",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Tokens of the document.")] = 4096,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Interleaved rounds; medians are printed.")] = 5,
    store: Annotated[str | None, typer.Option("--store", help="Store URL; default a temporary disk home.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time to first token from the shelf beside prefilling again, and compression beside its prefill."""
    from kvshelf.bench import speed as bench
    from kvshelf.bench.measure import machine
    from kvshelf.store import open_store

    engine = load_engine(model, device, dtype, threads)
    levels = [("full", 0.0), ("keydiff", 0.5), ("keydiff", 0.75), ("lagkv", 0.75), ("snapkv", 0.75)]
    with tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder:
        home = open_store(store or f"disk://{folder}/shelf")
        try:
            first = bench.first_token(engine, home, tokens, rounds, levels)
        finally:
            home.close()
    costs = bench.compression_cost(engine, tokens, rounds, levels[1:])
    report: dict[str, Any] = {
        "bench": "speed",
        "model": model,
        "tokens": tokens,
        "rounds": rounds,
        "machine": machine(),
    }
    report["first_token"] = [row.to_dict() for row in first]
    report["compression"] = [row.to_dict() for row in costs]
    publish(report, [_first_token_table(first, tokens), _cost_table(costs)], output, as_json)


@app.command()
def column_sums(
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Tokens of the sequence.")] = 8192,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Repeats; medians are printed.")] = 5,
    threads: Threads = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Exact attention column sums beside plain attention and two other ways to the same sums, on the CPU.

    One layer of 8 query and 2 KV heads of 128 channels.
    """
    import torch

    from kvshelf.bench.column_sums import time_column_sums
    from kvshelf.bench.measure import machine

    if threads:
        torch.set_num_threads(threads)
    dtypes = (torch.float32, torch.bfloat16)
    times = {
        str(dtype).removeprefix("torch."): time_column_sums(tokens, dtype=dtype, repeats=rounds) for dtype in dtypes
    }
    table = Table("dtype", "plain attention", "column sums", "second flash call", "naive")
    table.title = f"attention column sums of {tokens} tokens, CPU time beside plain causal attention"
    for name, row in times.items():
        others = (row.column_sums, row.second_attention, row.naive)
        shown = [f"{seconds:.3f} s, {seconds / row.attention:.2f}x" for seconds in others]
        table.add_row(name, f"{row.attention:.3f} s", *shown)
    rows = [{"dtype": name, **asdict(row)} for name, row in times.items()]
    report = {"bench": "column-sums", "tokens": tokens, "rounds": rounds, "machine": machine(), "rows": rows}
    publish(report, [table], output, as_json)


def _first_token_table(rows: list[Any], tokens: int) -> Table:
    table = Table("policy", "stored", "run", "shelf", "prefill again", "ratio")
    table.title = f"time to first token after a document of {tokens} tokens (run: question tokens prefilled)"
    for row in rows:
        table.add_row(
            _level(row),
            f"{row.stored_bytes / 1e6:.2f} MB",
            f"{row.prefill_tokens}",
            f"{row.shelf_s.median * 1e3:.1f} ms",
            f"{row.again_s.median * 1e3:.0f} ms",
            f"1/{row.speedup.median:.0f} (1/{row.speedup.low:.0f} - 1/{row.speedup.high:.0f})",
        )
    return table


def _cost_table(rows: list[Any]) -> Table:
    table = Table("policy", "prefill", "compression", "share", title="compression beside its own prefill")
    for row in rows:
        table.add_row(
            _level(row),
            f"{row.prefill_s.median * 1e3:.0f} ms",
            f"{row.compress_s.median * 1e3:.1f} ms",
            f"{row.share.median:.2%} ({row.share.low:.2%} - {row.share.high:.2%})",
        )
    return table


def _level(row: Any) -> str:
    return f"{row.policy}, {row.compression_ratio:.0%} removed" if row.compression_ratio else row.policy
