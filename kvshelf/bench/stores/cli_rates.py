"""`kvshelf bench rates`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.bench.options import Json, Output, publish


def rates(
    redis: Annotated[str, typer.Option("--redis", help="redis://host to make a shelf in.")],
    folder: Annotated[
        str | None, typer.Option("--folder", help="disk:///folder to make another in.  [default: a temporary one]")
    ] = None,
    documents: Annotated[int, typer.Option("--documents", min=10, help="On each shelf.")] = 1000,
    replicas: Annotated[
        int, typer.Option("--replicas", min=3, help="Idle replicas during the measurement of Ray.")
    ] = 10,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long to measure Ray.")] = 30.0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure what a document costs the resources that all replicas share, for `kvshelf plan --shared-rates`.

    Processor time of the Redis server, of a writer to a folder, of Serve's controller, Ray's GCS and a batch's journal.
    """
    with needs_extra("serve", "the bench"):
        from kvshelf.bench.measure import load_warning, machine
        from kvshelf.bench.stores.homes import made_in
        from kvshelf.bench.stores.rates import controller_s, home_rates, journal_s

    where = machine()
    with made_in(redis) as home:
        server = home_rates(home, documents)
    with made_in(folder) as home:
        disk = home_rates(home, documents)
    controller, gcs = controller_s(2, replicas, seconds)
    found = {
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
    for name, value in found.items():
        if value is not None:
            table.add_row(name, f"{value:,.0f} bytes" if name.endswith("bytes") else f"{1e3 * value:.4g} ms")
    report = {"bench": "rates", "machine": where, "homes": [asdict(server), asdict(disk)], "rates": found}
    publish(report, [table], output, as_json, notes=load_warning(where))
