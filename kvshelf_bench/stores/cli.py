"""`kvshelf bench store` and `kvshelf bench rates`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.terminal import progress_bar
from kvshelf_bench.options import Reporting, Threads, choices, decimals, milliseconds, publish, ratio

if TYPE_CHECKING:
    from kvshelf_bench.stores.manifests import Manifests
    from kvshelf_bench.stores.store import Throughput

PARTS = ("throughput", "manifests")

_MEGABYTES = (0.01, 8000.0)  # smallest: every layer has an entry; largest: the caches fit into memory


def store(
    *,
    stores: Annotated[
        list[str] | None,
        typer.Option(
            "--store",
            help="disk:///folder or redis://host to make a shelf in, also with ?blobs=s3://bucket/prefix; may be "
            "repeated.  [default: a temporary folder]",
        ),
    ] = None,
    parts: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(PARTS),
    sizes: Annotated[str, typer.Option(help="Megabytes per cache, comma-separated.")] = "1,16,64,256",
    layers: Annotated[int, typer.Option(min=1, max=512, help="Layers of a cache.")] = 32,
    manifests: Annotated[int, typer.Option(min=1, help="Caches on the shelf that is listed.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
    threads: Threads = 1,
    reporting: Reporting,
) -> None:
    """Put and get beside plain files, redis-py and obstore, and a shelf of very many caches.

    Every shelf is the bench's own, in the folder, Redis or bucket that is named, and is removed in the end.
    """
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.measure import load_warning, machine, use_threads
        from kvshelf_bench.stores.homes import made_in
        from kvshelf_bench.stores.manifests import manifests as measure_manifests
        from kvshelf_bench.stores.store import throughput

    chosen, megabytes = choices(parts, PARTS, "--parts"), decimals(sizes, "--sizes", *_MEGABYTES)
    use_threads(threads)
    where, tables = machine(), list[Table]()
    report: dict[str, Any] = {"bench": "store", "rounds": rounds, "layers": layers, "machine": where}
    places: list[str | None] = [*stores] if stores else [None]
    with progress_bar() as progress:
        if "throughput" in chosen:
            for place in places:
                with made_in(place) as home:
                    steps = progress.track(megabytes, description=f"{home.name}, put and get")
                    rows = [throughput(home, size, layers, rounds) for size in steps]
                report.setdefault("throughput", []).extend(rows)
                tables += [_ways_table(rows), _steps_table(rows)]
        if "manifests" in chosen:
            for place in places:
                with made_in(place) as home:
                    bar = progress.add_task(f"{home.name}, manifests", total=manifests)
                    listed = measure_manifests(home, manifests, rounds, partial(progress.advance, bar))
                report.setdefault("manifests", []).append(listed)
                tables.append(_manifests_table(listed))
    publish(report, tables, reporting, notes=load_warning(where))


def rates(
    *,
    redis: Annotated[str, typer.Option(help="redis://host to make a shelf in, also with ?blobs=s3://...")],
    folder: Annotated[
        str | None, typer.Option(help="disk:///folder to make another in.  [default: a temporary one]")
    ] = None,
    documents: Annotated[int, typer.Option(min=10, help="On each shelf.")] = 1000,
    replicas: Annotated[int, typer.Option(min=3, help="Idle replicas during the measurement of Ray.")] = 10,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure Ray.")] = 30.0,
    reporting: Reporting,
) -> None:
    """Measure what a document costs the resources that all replicas share, for `kvshelf plan --shared-rates`.

    Processor time of the Redis server, of a writer to a folder, of Serve's controller, Ray's GCS and a batch's journal.
    """
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.measure import load_warning, machine
        from kvshelf_bench.stores.homes import made_in
        from kvshelf_bench.stores.rates import controller_s, home_rates, journal_s

    where = machine()
    with made_in(redis) as home:
        server = home_rates(home, documents)
    with made_in(folder) as home:
        disk = home_rates(home, documents)
    controller, gcs = controller_s(2, replicas, seconds)
    measured = {
        "redis_document_s": server.server_s,
        "redis_mb_s": server.server_s_per_mb,
        "redis_document_bytes": server.index_bytes,
        "disk_document_s": disk.process_s,
        "disk_document_bytes": disk.index_bytes,
        "controller_replica_s": controller,
        "gcs_replica_s": gcs,
        "driver_result_s": journal_s(20 * documents),
    }
    table = Table("rate", "measured")
    for name, value in measured.items():
        if value is not None:
            table.add_row(name, f"{value:,.0f} bytes" if name.endswith("bytes") else f"{1e3 * value:.4g} ms")
    report = {"bench": "rates", "machine": where, "homes": [asdict(server), asdict(disk)], "rates": measured}
    publish(report, [table], reporting, notes=load_warning(where))


def _ways_table(rows: list[Throughput]) -> Table:
    from kvshelf_bench.stores.store import FIRST_LAYER, OURS

    table = Table("MB", "way", "MB/s", "time", "CPU time", "ours / it", "in CPU time")
    table.title = f"{rows[0].home}: caches of {rows[0].layers} layers, bfloat16, {_medium(rows[0].home)}"
    for size in rows:
        for name, way in size.ways.items():
            rate = "" if name == FIRST_LAYER else f"{size.nbytes / way.wall_s.median / 1e6:,.0f}"
            ratios = ("", "") if name in OURS else (ratio(way.ours), ratio(way.ours_cpu))
            table.add_row(
                f"{size.nbytes / 1e6:,.1f}", name, rate, milliseconds(way.wall_s), milliseconds(way.cpu_s), *ratios
            )
        table.add_section()
    return table


def _medium(home: str) -> str:
    """What the reader of a home's table must know: the parser of redis-py changes its speed by a factor of two."""
    if home == "disk":
        return "files in the page cache"
    if home != "redis":
        return f"CPU time without the server's, obstore {version('obstore')}"
    from redis.utils import HIREDIS_AVAILABLE

    return f"CPU time without the server's, redis-py {'with' if HIREDIS_AVAILABLE else 'without'} hiredis"


def _steps_table(rows: list[Throughput]) -> Table:
    """One home: what a put consists of, a row for each size."""
    steps = list(rows[0].steps_s)
    table = Table("MB", "put", *steps, title=f"{rows[0].home}: what a put consists of")
    for size in rows:
        cells = [milliseconds(size.steps_s[step]) for step in steps]
        table.add_row(f"{size.nbytes / 1e6:,.1f}", milliseconds(size.ways["put"].wall_s), *cells)
    return table


def _manifests_table(listed: Manifests) -> Table:
    table = Table("call", "time", "range")
    table.title = (
        f"{listed.home}: a shelf of {listed.count:,} caches, manifests of {listed.manifest_bytes:,} bytes; published "
        f"in {listed.publish_s * 1e3:.2f} ms each; the process grew by {listed.process_bytes / 1e6:.0f} MB"
    )
    for name, seconds in listed.calls_s.items():
        table.add_row(name, milliseconds(seconds), f"{seconds.low * 1e3:,.2f} - {seconds.high * 1e3:,.2f} ms")
    return table
