"""`kvshelf bench ...`: one command per measurement."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(help="Measure models, policies and speed on this machine.", no_args_is_help=True)

Model = Annotated[str, typer.Option("--model", help="Bundled name, local folder or hub id.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda:0 ...")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Threads of torch; 0 leaves its own choice.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write the result as JSON to this file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


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

    engine = _engine(model, device, dtype, threads)
    compress: dict[str, Any] = {"policy": policy}
    if compression_ratio is not None:
        compress["compression_ratio"] = compression_ratio
    chosen = bench.cells(
        _choices(tasks, bench.TASKS, "--tasks"), _choices(haystacks, bench.HAYSTACKS, "--haystacks"), _lengths(lengths)
    )
    results = []
    with _progress() as progress:
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
    _publish(report, [table], output, as_json)


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

    engine = _engine(model, device, dtype, threads)
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
    _publish(report, [_first_token_table(first, tokens), _cost_table(costs)], output, as_json)


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


def _engine(model: str, device: str, dtype: str, threads: int) -> Any:
    import torch

    from kvshelf.workers.engine import Engine

    if threads:
        torch.set_num_threads(threads)
    return Engine.load(model, device=device, dtype=dtype)


def _choices(text: str, known: tuple[Any, ...], option: str) -> list[Any]:
    chosen = [word.strip() for word in text.split(",")]
    for word in chosen:
        if word not in known:
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(known)}", param_hint=option)
    return chosen


def _lengths(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint="--lengths") from error


def _progress() -> Progress:
    return Progress(
        "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    )


def _publish(report: dict[str, Any], tables: list[Table], output: Path | None, as_json: bool) -> None:
    text = json.dumps(report, indent=2)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        typer.echo(text)
        return
    console = Console()
    for table in tables:
        console.print(table)
    where = report["machine"]
    console.print(
        f"{where['processor']}, {where['threads']} of {where['cores']} cores, load {where['load']:.1f}, "
        f"{where['gpu'] or 'no GPU'}, torch {where['torch']}, transformers {where['transformers']}",
        style="dim",
    )
