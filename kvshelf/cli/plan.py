"""plan: what a corpus would take, and what would break first. Nothing is run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.cli import _common
from kvshelf.cli._common import AsJson
from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from kvshelf.corpus.plan import Fleet, Outcome, Plan, SharedResource

_MODELS = "llama-3.1-8b, mistral-7b, qwen2.5-7b, qwen3-8b, kvshelf-tiny, a folder or a hub id."
_LENGTHS = "A file with a document length per line, optionally followed by a count; replaces --tokens."
_SPEED = "Output of `kvshelf bench speed --parts compression --output FILE`; replaces --tokens-per-s."
_SHARED = "Output of `kvshelf bench rates --output FILE`.  [default: as documented]"


def plan(
    documents: Annotated[
        int | None, typer.Option(min=1, help="Number of documents.  [default: 1,000,000, or as in --lengths]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of each document.")] = 4096,
    lengths: Annotated[Path | None, typer.Option(help=_LENGTHS)] = None,
    model: Annotated[str, typer.Option(help=_MODELS)] = "llama-3.1-8b",
    policy: Annotated[str, typer.Option(help="As in `kvshelf put`.")] = "keydiff",
    compression_ratio: Annotated[float | None, typer.Option(help="Fraction of the entries REMOVED, 0.75 say.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Entries kept per layer and head, instead.")] = None,
    codec: Annotated[str, typer.Option(help="none, int8, int4, int2 ...")] = "none",
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs; or give --hours.")] = None,
    hours: Annotated[float | None, typer.Option(min=0.01, help="Hours available; the plan says how many GPUs.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(min=0.001, help="Of one GPU, compression included.")] = None,
    rates: Annotated[Path | None, typer.Option(help=_SPEED)] = None,
    shared_rates: Annotated[Path | None, typer.Option(help=_SHARED)] = None,
    home: Annotated[str, typer.Option(help="redis or disk.")] = "redis",
    simulate: Annotated[bool, typer.Option("--simulate", help="Simulate a run with failures.")] = False,
    servers: Annotated[int, typer.Option(min=1, help="Redis servers.")] = 1,
    server_memory_gb: Annotated[float, typer.Option(min=0.1, help="Memory for caches of one Redis server.")] = 512.0,
    server_gbit: Annotated[float, typer.Option(min=0.1, help="Network of one Redis server.")] = 25.0,
    shelves: Annotated[int, typer.Option(min=1, help="Redis prefixes that share the corpus.")] = 1,
    services: Annotated[int, typer.Option(min=1, help="Ray clusters that share the corpus.")] = 1,
    node_gpus: Annotated[int, typer.Option(min=1, help="GPUs in a node.")] = 8,
    node_gbit: Annotated[float, typer.Option(min=0.1, help="Network of a node.")] = 100.0,
    node_mtbf_h: Annotated[float, typer.Option(min=0.1, help="Hours between two failures of a node.")] = 6300.0,
    poison: Annotated[float, typer.Option(min=0, max=0.1, help="Share of documents that kill their worker.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Say what a corpus takes: documents an hour, GPUs, bytes, Redis memory, network. Nothing is run.

    --simulate adds the resources that all GPUs share, the fullest first, and a run with failures.
    """
    with _common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf plan"):
        from kvshelf.corpus import plan as paper

        numbers = {"--tokens-per-s": tokens_per_s, "--hours": hours, "--server-memory-gb": server_memory_gb}
        for option, number in numbers.items():
            if number is not None and not math.isfinite(number):
                raise InvalidRequest(f"{option} is {number}, which is no number to plan with", param=option)
        if simulate and home == "disk":
            raise InvalidRequest("a shelf in a folder is one machine's; --simulate is of a Redis home", param="--home")
        shape = paper.shape_of(model)
        shared = paper.MEASURED if shared_rates is None else paper.SharedRates.read(shared_rates)
        corpus = paper.Corpus(((tokens, documents or 1_000_000),))
        corpus = corpus if lengths is None else paper.Corpus.read(lengths, documents)
        work = paper.Work(policy, compression_ratio, budget_tokens, codec)
        speed = paper.Speed.of(shape, policy, tokens_per_s, rates)
        found = paper.make_plan(corpus, shape, work, speed, shared, home=home, gpus=gpus, hours=hours)
        report: dict[str, Any] = {"plan": asdict(found)}
        tables = [_plan_table(found)]
        if simulate:
            fleet = paper.Fleet(
                found.gpus, node_gpus, node_gbit, servers, server_gbit, server_memory_gb * 1e9, shelves, services,
                node_mtbf_h, poison=poison,
            )  # fmt: skip
            resources = {each: each.full_at(found.gpus) for each in paper.shared_resources(found, fleet, shared)}
            outcome = paper.simulate(found, fleet, shared, seed=seed)
            full = ((each, round(at) if math.isfinite(at) else None) for each, at in resources.items())
            parts = [asdict(each) | {"breaks_at_gpus": at} for each, at in full]
            report |= {"fleet": asdict(fleet), "parts": parts, "outcome": asdict(outcome)}
            tables += [_resources_table(resources), _outcome_table(outcome, fleet)]
    if as_json:
        print(json.dumps(report))
        return
    for table in tables:
        _common.table_console().print(table)
    for sentence in found.assumptions:
        _common.notes.print(f"- {sentence}", style="dim", soft_wrap=True)


def _plan_table(found: Plan) -> Table:
    memory = found.redis_memory_bytes
    rows = [
        ("documents", f"{found.documents:,}"),
        ("tokens", f"{found.tokens:,}"),
        ("tokens a second, each GPU", f"{found.tokens_per_s:,.0f}"),
        ("GPUs", f"{found.gpus:,}"),
        ("hours", f"{found.hours:,.2f}"),
        ("GPU hours", f"{found.gpu_hours:,.1f}"),
        ("documents an hour", f"{found.documents_per_hour:,.0f}"),
        ("full KV", _size(found.bytes_full)),
        ("stored", f"{_size(found.bytes_stored)}, {_size(found.bytes_stored / found.documents)} a document"),
        ("manifests, index, ledger", _size(found.home_bytes)),
        ("memory of Redis", "none" if memory is None else _size(memory)),
        ("network to the home", f"{_size(found.network_bytes_per_s)} a second"),
    ]
    return _table(("", ""), rows)


def _resources_table(resources: dict[SharedResource, float]) -> Table:
    rows = []
    for each, at in resources.items():
        used = f"{100 * each.used:,.3g} %" if each.used < 10 else f"{each.used:,.0f} times"
        rows.append((each.name, used, f"{at:,.0f}" if math.isfinite(at) else "-", each.move))
    return _table(("WHAT ALL SHARE", "USED", "FULL AT GPUS", "WHAT MOVES IT"), rows)


def _outcome_table(outcome: Outcome, fleet: Fleet) -> Table:
    slowed = ", ".join(f"{name}: {hours:,.1f} hours" for name, hours in outcome.slowed_h.items())
    rows = [
        ("hours, with failures", f"{outcome.hours:,.2f}"),
        ("documents done", f"{outcome.documents:,}"),
        ("stopped by", outcome.stopped_by or "nothing"),
        ("the pace was set by", slowed or "the GPUs"),
        ("nodes that failed", f"{outcome.node_failures:,} of {-(-fleet.gpus // fleet.gpus_per_node):,}"),
        ("documents that killed their worker", f"{outcome.error_rows:,}, {outcome.worker_deaths:,} times"),
        ("GPU hours lost", f"{outcome.lost_gpu_hours:,.1f}"),
        ("innocent documents given up, expected", f"{outcome.innocent:.1e}"),
    ]
    return _table(("A RUN ON PAPER", ""), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Numbers, in the second and third column, are aligned right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number in (1, 2) else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _size(count: float) -> str:
    if count >= 1e12:
        return f"{count / 1e12:,.1f} TB"
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else _common.megabytes(int(count))
