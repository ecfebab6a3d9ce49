"""`kvshelf bench store`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.bench.options import Json, Output, Threads, choices, progress_bar, publish, ratio

if TYPE_CHECKING:
    from kvshelf.bench.measure import Spread
    from kvshelf.bench.stores.manifests import Manifests
    from kvshelf.bench.stores.store import Throughput

PARTS = ("throughput", "manifests")

_MEGABYTES = (0.01, 8000.0)  # so that every layer has an entry, and the caches fit into memory
_STEP = 100  # manifests


def store(
    stores: Annotated[
        list[str] | None,
        typer.Option(
            "--store",
            help="disk:///folder or redis://host to make a shelf in, may be repeated.  [default: a temporary folder]",
        ),
    ] = None,
    parts: Annotated[str, typer.Option("--parts", help="Comma-separated.")] = ",".join(PARTS),
    sizes: Annotated[str, typer.Option("--sizes", help="Megabytes per cache, comma-separated.")] = "1,16,64,256",
    layers: Annotated[int, typer.Option("--layers", min=1, max=512, help="Layers of a cache.")] = 32,
    manifests: Annotated[int, typer.Option("--manifests", min=1, help="Caches on the shelf that is listed.")] = 100_000,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Interleaved rounds; medians are printed.")] = 5,
    threads: Threads = 1,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Put and get beside plain files and redis-py, and a shelf of very many caches.

    Every shelf is the bench's own, in the folder or the Redis that is named, and is removed in the end.
    """
    with needs_extra("serve", "the bench"):
        import torch

        from kvshelf.bench.measure import load_warning, machine
        from kvshelf.bench.stores.homes import made_in
        from kvshelf.bench.stores.manifests import manifests as measure_manifests
        from kvshelf.bench.stores.store import throughput

    chosen, megabytes = choices(parts, PARTS, "--parts"), _sizes(sizes)
    if threads:
        torch.set_num_threads(threads)
    where, tables = machine(), list[Table]()
    report: dict[str, Any] = {"bench": "store", "rounds": rounds, "layers": layers, "machine": where}
    places: list[str | None] = [*stores] if stores else [None]
    with progress_bar() as progress:
        if "throughput" in chosen:
            for place in places:
                with made_in(place) as home:
                    steps = progress.track(megabytes, description=f"{home.name}, put and get")
                    found = [throughput(home, size, layers, rounds) for size in steps]
                report.setdefault("throughput", []).extend(found)
                tables += [_ways_table(found), _steps_table(found)]
        if "manifests" in chosen:
            for place in places:
                with made_in(place) as home:
                    bar = progress.add_task(f"{home.name}, manifests", total=manifests)
                    listed = measure_manifests(home, manifests, rounds, partial(progress.advance, bar))
                report.setdefault("manifests", []).append(listed)
                tables.append(_manifests_table(listed))
    publish(report, tables, output, as_json, notes=load_warning(where))


def _sizes(text: str) -> list[float]:
    low, high = _MEGABYTES
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(low <= size <= high for size in found):
        raise typer.BadParameter(
            f"{text!r} is not a list of megabytes from {low:g} to {high:g}", param_hint="--sizes"
        ) from None
    return found


def _ways_table(found: list[Throughput]) -> Table:
    """One home: a row for each size and way."""
    from kvshelf.bench.stores.store import FIRST_LAYER, OURS

    table = Table("MB", "way", "GB/s", "time", "CPU time", "ours / it", "in CPU time")
    where = "files in the page cache" if found[0].home == "disk" else f"CPU time without the server's, {_redis_py()}"
    table.title = f"{found[0].home}: caches of {found[0].layers} layers, bfloat16, {where}"
    for size in found:
        for name, way in size.ways.items():
            ours = name in OURS
            table.add_row(
                f"{size.nbytes / 1e6:,.1f}",
                name,
                "" if name == FIRST_LAYER else f"{size.nbytes / way.wall_s.median / 1e9:.2f}",
                _ms(way.wall_s),
                _ms(way.cpu_s),
                "" if ours else ratio(way.ours),
                "" if ours else ratio(way.ours_cpu),
            )
        table.add_section()
    return table


def _redis_py() -> str:
    """What answers are read with makes redis-py half as fast or twice."""
    from redis.utils import HIREDIS_AVAILABLE

    return f"redis-py {'with' if HIREDIS_AVAILABLE else 'without'} hiredis"


def _steps_table(found: list[Throughput]) -> Table:
    """One home: what a put consists of, a row for each size."""
    steps = list(found[0].steps_s)
    table = Table("MB", "put", *steps, title=f"{found[0].home}: what a put consists of")
    for size in found:
        cells = [_ms(size.steps_s[step]) for step in steps]
        table.add_row(f"{size.nbytes / 1e6:,.1f}", _ms(size.ways["put"].wall_s), *cells)
    return table


def _manifests_table(found: Manifests) -> Table:
    table = Table("call", "time", "range")
    table.title = (
        f"{found.home}: a shelf of {found.count:,} caches, manifests of {found.manifest_bytes:,} bytes; published in "
        f"{found.publish_s * 1e3:.2f} ms each; the process grew by {found.process_bytes / 1e6:.0f} MB"
    )
    for name, seconds in found.calls_s.items():
        table.add_row(name, _ms(seconds), f"{seconds.low * 1e3:,.2f} - {seconds.high * 1e3:,.2f} ms")
    return table


def _ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:,.2f} ms"
