"""`kvshelf bench retention`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.terminal import progress_bar
from kvshelf_bench.options import Reporting, Threads, choices, decimals, publish

if TYPE_CHECKING:
    from kvshelf_bench.retention.simulation import ReplayOutcome

PARTS = ("simulation", "queue", "live")


@dataclass(frozen=True)
class _Traces:
    seconds: Annotated[float, typer.Option(min=60, help="Length of the simulated trace.")] = 3600.0
    live_seconds: Annotated[
        float, typer.Option(min=60, help="Length of the trace that is replayed, 64 times faster.")
    ] = 1200.0
    read_mb_s: Annotated[float, typer.Option(min=1, help="Simulated rate of reads.")] = 1000.0
    load: Annotated[float, typer.Option(min=0.01, help="Programs that start in a second.")] = 0.2
    slots: Annotated[int, typer.Option(min=1, help="Answers at once, of the queue.")] = 2


def retention(
    *,
    parts: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(PARTS),
    memory: Annotated[str, typer.Option(help="Gigabytes for caches, comma-separated.")] = "4,8,16",
    traces: _Traces,
    threads: Threads = 1,
    reporting: Reporting,
) -> None:
    """Which caches a replica's memory keeps for a trace of agents: LRU, GDSF, Continuum's pins, hints, both, KVFlow's
    steps; and when programs end if their first question gives them their place in the queue.

    Live is the replica's memory with caches of kvshelf-tiny on a disk, at a 64th of all times and a 256th of all sizes.
    """
    with needs_extra("serve", "the bench"):
        from kvshelf.engine.engine import Engine
        from kvshelf_bench.measure import load_warning, machine, use_threads
        from kvshelf_bench.retention.live import SCALE, SIZE_SCALE, replay, shelf_of
        from kvshelf_bench.retention.queueing import program_times
        from kvshelf_bench.retention.simulation import Simulation
        from kvshelf_bench.retention.trace import ORDERS, make_trace

    chosen, gigabytes = choices(parts, PARTS, "--parts"), decimals(memory, "--memory", 3.1, 1e6)
    use_threads(threads)
    where, tables = machine(), list[Table]()
    report: dict[str, Any] = {"bench": "retention", "machine": where, "memory_gb": gigabytes}
    with progress_bar() as progress:
        if "simulation" in chosen:
            trace, rate = make_trace(traces.seconds, traces.load), traces.read_mb_s * 1e6
            by_size = {
                size: {order.name: Simulation(trace, order, int(size * 1e9), rate).run() for order in ORDERS}
                for size in progress.track(gigabytes, description="simulation")
            }
            title = (
                f"simulation of {trace.questions} questions (trace {trace.digest}), reads at {traces.read_mb_s:g} MB/s"
            )
            _add("simulation", title, by_size, trace.digest, report, tables)
        if "queue" in chosen:
            trace = make_trace(traces.seconds, traces.load)
            title = f"{traces.slots} answers at once, {len(trace.programs)} programs (trace {trace.digest})"
            table = Table("order of", "programs of several turns", "single questions", title=title)
            rows = {"questions": False, "programs": True}
            times = {order: program_times(trace, traces.slots, named=named) for order, named in rows.items()}
            for order, (several_s, single_s) in times.items():
                table.add_row(order, f"{several_s:.1f} s", f"{single_s:.1f} s")
            report["queue"] = {order: one._asdict() for order, one in times.items()}
            tables.append(table)
        if "live" in chosen:
            trace = make_trace(traces.live_seconds, traces.load).scaled(1 / SCALE, 1 / SIZE_SCALE)
            engine = Engine.load("kvshelf-tiny", device="cpu")
            with shelf_of(trace, engine) as (store, ids):
                by_size = {
                    size: {
                        order.name: replay(trace, order, int(size * 1e9 / SIZE_SCALE), engine, store, ids)
                        for order in ORDERS
                    }
                    for size in progress.track(gigabytes, description="live")
                }
            title = f"live, {trace.questions} questions (trace {trace.digest}), times / {SCALE}, sizes / {SIZE_SCALE}"
            _add("live", title, by_size, trace.digest, report, tables)
    publish(report, tables, reporting, notes=load_warning(where))


def _add(
    part: str,
    title: str,
    by_size: dict[float, dict[str, ReplayOutcome]],
    digest: str,
    report: dict[str, Any],
    tables: list[Table],
) -> None:
    table = Table("GB", "order", "hits", "first token", "read", "pinned", "released", "read ahead", "used", title=title)
    rows = []
    for size, outcomes in by_size.items():
        for name, outcome in outcomes.items():
            counts = outcome.counts
            table.add_row(
                f"{size:g}",
                name,
                f"{outcome.hit_share:.1%}",
                f"{1e3 * outcome.mean_s:,.1f} ms",
                f"{outcome.read_bytes / 1e9:,.1f} GB",
                *(str(counts[event]) for event in ("pinned", "released", "read_ahead", "read_ahead_used")),
            )
            fields = {key: value for key, value in asdict(outcome).items() if key != "waits_s"}
            rows.append({"memory_gb": size, "order": name, "mean_s": outcome.mean_s, **fields})
        table.add_section()
    report[part] = {"trace": digest, "rows": rows}
    tables.append(table)
