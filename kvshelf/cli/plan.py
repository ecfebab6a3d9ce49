"""plan: what a corpus would take, and what would break first. Nothing is run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
    from kvshelf.corpus.plan import Corpus, Plan, Speed
    from kvshelf.corpus.simulate import Fleet, Outcome, Part
    from kvshelf.workers.replica.create.estimates import Shape

_TERABYTE = 1e12

_Documents = Annotated[int | None, typer.Option(min=1, help="How many.  [default: 1,000,000, or as in --lengths]")]
_Tokens = Annotated[int, typer.Option(min=1, help="Length of each.")]
_Lengths = Annotated[
    Path | None, typer.Option(help="Instead: a file with a length on each line, and how many have it behind that.")
]
_Model = Annotated[
    str, typer.Option(help="llama-3.1-8b, mistral-7b, qwen2.5-7b, qwen3-8b, kvshelf-tiny, a folder or a hub id.")
]
_Policy = Annotated[str, typer.Option(help="As in `kvshelf put`.")]
_CompressionRatio = Annotated[float | None, typer.Option(help="Fraction of the entries REMOVED, 0.75 say.")]
_BudgetTokens = Annotated[int | None, typer.Option(help="Entries kept per layer and head, instead.")]
_Codec = Annotated[str, typer.Option(help="none, int8, int4, int2 ...")]
_Gpus = Annotated[int | None, typer.Option(min=1, help="How many there are; or give --hours.")]
_Hours = Annotated[float | None, typer.Option(min=0.01, help="By when it is to be done: how many GPUs that takes.")]
_TokensPerS = Annotated[float | None, typer.Option(min=0.001, help="Of one GPU, compression included.")]
_Rates = Annotated[
    Path | None, typer.Option(help="Instead: what `kvshelf bench speed --parts compression --output FILE` wrote.")
]
_SharedRates = Annotated[
    Path | None, typer.Option(help="What `kvshelf bench rates --output FILE` wrote.  [default: as documented]")
]
_Home = Annotated[str, typer.Option(help="redis or disk.")]
_Simulate = Annotated[bool, typer.Option("--simulate", help="Let it run on paper, with failures.")]
_Servers = Annotated[int, typer.Option(min=1, help="Redis servers.")]
_ServerMemoryGb = Annotated[float, typer.Option(min=0.1, help="Memory of one for caches.")]
_ServerGbit = Annotated[float, typer.Option(min=0.1, help="Network of one.")]
_Shelves = Annotated[int, typer.Option(min=1, help="Redis prefixes that share the corpus out.")]
_Services = Annotated[int, typer.Option(min=1, help="Ray clusters that share the corpus out.")]
_NodeGpus = Annotated[int, typer.Option(min=1, help="GPUs in a node.")]
_NodeGbit = Annotated[float, typer.Option(min=0.1, help="Network of a node.")]
_NodeMtbfH = Annotated[float, typer.Option(min=0.1, help="Hours between two failures of a node.")]
_Poison = Annotated[float, typer.Option(min=0, max=0.1, help="Share of documents that kill their worker.")]
_Seed = Annotated[int, typer.Option(help="Of the simulation.")]


def plan(
    documents: _Documents = None,
    tokens: _Tokens = 4096,
    lengths: _Lengths = None,
    model: _Model = "llama-3.1-8b",
    policy: _Policy = "keydiff",
    compression_ratio: _CompressionRatio = None,
    budget_tokens: _BudgetTokens = None,
    codec: _Codec = "none",
    gpus: _Gpus = None,
    hours: _Hours = None,
    tokens_per_s: _TokensPerS = None,
    rates: _Rates = None,
    shared_rates: _SharedRates = None,
    home: _Home = "redis",
    simulate: _Simulate = False,
    servers: _Servers = 1,
    server_memory_gb: _ServerMemoryGb = 512.0,
    server_gbit: _ServerGbit = 25.0,
    shelves: _Shelves = 1,
    services: _Services = 1,
    node_gpus: _NodeGpus = 8,
    node_gbit: _NodeGbit = 100.0,
    node_mtbf_h: _NodeMtbfH = 6300.0,
    poison: _Poison = 1e-5,
    seed: _Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Documents an hour, GPUs, bytes, memory of Redis and network for a corpus. Nothing is run.

    --simulate adds what all GPUs share, the fullest part first, and a run with failures.
    """
    with _common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf plan"):
        from kvshelf.corpus.plan import Work, make_plan, shape_of
        from kvshelf.corpus.rates import MEASURED, SharedRates
        from kvshelf.corpus.simulate import Fleet, parts_of
        from kvshelf.corpus.simulate import simulate as run_on_paper

        _require_finite({"--tokens-per-s": tokens_per_s, "--hours": hours, "--server-memory-gb": server_memory_gb})
        _require_clear(home, gpus, hours, simulate=simulate)
        shape = shape_of(model)
        shared = MEASURED if shared_rates is None else SharedRates.read(shared_rates)
        found = make_plan(
            _corpus(documents, tokens, lengths),
            shape,
            Work(policy, compression_ratio, budget_tokens, codec),
            _speed(shape, policy, tokens_per_s, rates),
            shared,
            home="redis" if home == "redis" else "disk",
            gpus=gpus,
            hours=hours,
        )
        memory = server_memory_gb * 1e9
        fleet = Fleet(
            found.gpus,
            node_gpus,
            node_gbit,
            servers,
            server_gbit,
            memory,
            shelves,
            services,
            node_mtbf_h,
            poison=poison,
        )
        parts = parts_of(found, fleet, shared) if simulate else []
        outcome = run_on_paper(found, fleet, shared, seed=seed) if simulate else None
    if as_json:
        print(json.dumps(_as_dict(found, fleet, parts, outcome)))
    else:
        _show(found, fleet, parts, outcome)


def _require_clear(home: str, gpus: int | None, hours: float | None, *, simulate: bool) -> None:
    if home not in ("redis", "disk"):
        raise InvalidRequest(f"--home {home!r} is no home to plan with; redis or disk", param="--home")
    if gpus is not None and hours is not None:
        raise InvalidRequest("--gpus and --hours answer each other; give one", param="--hours")
    if simulate and home != "redis":
        raise InvalidRequest("a shelf in a folder is one machine's; --simulate is of a Redis home", param="--home")


def _corpus(documents: int | None, tokens: int, lengths: Path | None) -> Corpus:
    from kvshelf.corpus.plan import Corpus

    return Corpus(((tokens, documents or 1_000_000),)) if lengths is None else Corpus.read(lengths, documents)


def _require_finite(given: Mapping[str, float | None]) -> None:
    for option, number in given.items():
        if number is not None and not math.isfinite(number):
            raise InvalidRequest(f"{option} is {number}, which is no number to plan with", param=option)


def _speed(shape: Shape, policy: str, tokens_per_s: float | None, rates: Path | None) -> Speed:
    from kvshelf.corpus.plan import Speed, assumed_speed, measured_speed

    if rates is not None and tokens_per_s is not None:
        raise InvalidRequest("--rates and --tokens-per-s answer each other; give one", param="--rates")
    if rates is not None:
        return measured_speed(rates, policy)
    if tokens_per_s is not None:
        return Speed(tokens_per_s, f"{tokens_per_s:,g} tokens a second for each GPU, as given.")
    return assumed_speed(shape)


def _as_dict(found: Plan, fleet: Fleet, parts: Sequence[Part], outcome: Outcome | None) -> dict[str, Any]:
    report: dict[str, Any] = {"plan": asdict(found)}
    if outcome is not None:
        at = [part.breaks_at(found.gpus) for part in parts]
        full = [None if gpus == float("inf") else round(gpus) for gpus in at]
        rows = [asdict(part) | {"breaks_at_gpus": gpus} for part, gpus in zip(parts, full, strict=True)]
        report |= {"fleet": asdict(fleet), "parts": rows, "outcome": asdict(outcome)}
    return report


def _show(found: Plan, fleet: Fleet, parts: Sequence[Part], outcome: Outcome | None) -> None:
    console = _common.table_console()
    console.print(_plan_table(found))
    if outcome is not None:
        console.print(_parts_table(parts, found.gpus))
        console.print(_outcome_table(outcome, fleet))
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


def _parts_table(parts: Sequence[Part], gpus: int) -> Table:
    rows = []
    for part in parts:
        at = part.breaks_at(gpus)
        rows.append((part.name, _times(part.used), "-" if at == float("inf") else f"{at:,.0f}", part.move))
    return _table(("WHAT ALL SHARE", "USED", "FULL AT GPUS", "WHAT MOVES IT"), rows, left=(3,))


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


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 or number in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _times(share: float) -> str:
    return f"{100 * share:,.3g} %" if share < 10 else f"{share:,.0f} times"


def _size(count: float) -> str:
    if count >= _TERABYTE:
        return f"{count / _TERABYTE:,.1f} TB"
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else _common.megabytes(int(count))
