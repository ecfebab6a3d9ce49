"""`kvshelf bench batch`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.errors import InvalidRequest
from kvshelf_bench.options import Model, Reporting, counted, numbers, publish


def batch(
    *,
    model: Model = "kvshelf-tiny",
    documents: Annotated[int, typer.Option(min=4, help="Of 200 to 6,000 tokens.")] = 200,
    replicas: Annotated[str, typer.Option(help="How many, comma-separated.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 3,
    reporting: Reporting,
) -> None:
    """A batch through Ray beside bare loops of compress and put on as many processes."""
    chosen = numbers(replicas, "--replicas")
    if max(chosen) > documents:
        raise InvalidRequest(f"--replicas {replicas}: more than {documents}, the number of documents", param="replicas")
    with needs_extra("serve", "the bench"):
        from kvshelf.workers.cluster.connect import prepare_environment

        prepare_environment(None)
        import structlog

        from kvshelf_bench.batches.batch import bare_loops, batch_run
        from kvshelf_bench.batches.corpus import made_corpus
        from kvshelf_bench.measure import load_warning, machine

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # runs log their states
    where, corpus = machine(), made_corpus(documents)
    report: dict[str, Any] = {"bench": "batch", "model": model, "documents": documents, "machine": where, "runs": []}
    headings = ("replicas", "tokens/s", "of bare loops", "by process time", "driver MB", "worker MB", "again, s")
    table = Table(*headings, title=f"{model}, {documents} documents, {sum(map(len, corpus)):,} tokens")
    with counted("rounds", len(chosen) * rounds) as step:
        for count in chosen:
            measured = []
            for _ in range(rounds):
                bare = bare_loops(corpus, model, count)
                run, memory, again_s = batch_run(corpus, model, count)
                measured.append(
                    {"bare": asdict(bare), "run": asdict(run), "memory": asdict(memory), "again_s": again_s}
                )
                step()
            report["runs"].append({"replicas": count, "rounds": measured})
            table.add_row(str(count), *_row(measured))
    publish(report, [table], reporting, notes=load_warning(where))


def _row(measured: list[dict[str, Any]]) -> list[str]:
    def middle(of: Callable[[dict[str, Any]], float]) -> float:
        return median([of(round_) for round_ in measured])

    def megabytes(process: str) -> str:
        early = middle(lambda r: r["memory"][f"{process}_early"])
        end = middle(lambda r: r["memory"][f"{process}_end"])
        return f"{early / 1e6:.0f}, {end / 1e6:.0f} at the end"

    return [
        f"{middle(lambda r: r['run']['tokens'] / r['run']['wall_s']):,.0f}",
        f"{middle(lambda r: r['bare']['wall_s'] / r['run']['wall_s']):.2f}",
        f"{middle(lambda r: r['bare']['process_s'] / r['run']['process_s']):.2f}",
        megabytes("driver"),
        megabytes("worker"),
        f"{middle(lambda r: r['again_s']):.1f}",
    ]
