"""The processor time that a document of a batch costs what all replicas share; `kvshelf plan` computes with it."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import digest
from kvshelf.corpus.row import Row
from kvshelf.corpus.run.journal import FileLines, OutputJournal
from kvshelf.store.disk.database import FILE_NAME
from kvshelf.store.redis.address import parse
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.shelf import Shelf
from kvshelf.workers.cluster.connect import prepare_environment, ray_cluster
from kvshelf_bench.measure import processor_s
from kvshelf_bench.stores.homes import Home
from kvshelf_bench.stores.store import random_cache

SMALL_MB: Final = 0.01
LARGE_MB: Final = 8.0
_LAYERS: Final = 32
_LEASE_S: Final = 30.0
_ROWS_AT_ONCE: Final = 64


@dataclass(frozen=True)
class HomeRates:
    """Of one home: seconds per document with a small cache, including its request and manifest.

    clock_s: by the clock, one writer. process_s: processor time of the writer. server_s: of the Redis server, None for
    a folder. server_s_per_mb: what a megabyte of blob adds to that; nothing but noise if blobs are in object storage.
    index_bytes: kept per document besides its blob, in the server's memory or in the database.
    """

    home: str
    documents: int
    clock_s: float
    process_s: float
    server_s: float | None
    server_s_per_mb: float | None
    index_bytes: float


def home_rates(home: Home, documents: int) -> HomeRates:
    """Record `documents` rows as requests and put their caches."""
    small, large = random_cache(SMALL_MB, _LAYERS), random_cache(LARGE_MB, _LAYERS)
    small_bytes, fewer = small.pack().nbytes, max(8, documents // 50)
    with Shelf(*home.open()) as store:
        _put(store, "warm", documents // 10 + 1, small)
        (server, kept), started, busy = _usage(home), time.perf_counter(), time.process_time()
        _put(store, "small", documents, small)
        clock_s, process_s = time.perf_counter() - started, time.process_time() - busy
        server_small, kept_small = _usage(home)
        _put(store, "large", fewer, large)
        server_large, _ = _usage(home)
    each_small, each_large = (server_small - server) / documents, (server_large - server_small) / fewer
    per_mb = (each_large - each_small) / (large.pack().nbytes - small_bytes) * 1e6
    redis = home.index_url.startswith("redis")
    return HomeRates(
        home.name,
        documents,
        clock_s / documents,
        process_s / documents,
        each_small if redis else None,
        per_mb if redis else None,
        (kept_small - kept) / documents - (small_bytes if home.name == "redis" else 0),
    )


def _put(store: Shelf, name: str, count: int, template: CompressedCache) -> None:
    """Put caches of `count` different documents as a replica does for rows: count the attempt, put, finish."""
    for number in range(count):
        request = f"row_{name}_{number}"
        store.requests.open(request, tenant="default", body=b"")
        attempt = store.requests.start(request, worker="bench", lease_s=_LEASE_S)
        identity = replace(template.identity, document=digest("bench.document", name, str(number)))
        manifest = store.put(replace(template, identity=identity))
        store.requests.finish(request, attempt, cache_ids=[manifest.id])


def _usage(home: Home) -> tuple[float, float]:
    """Processor seconds of the home's server and bytes in its memory so far; for a folder, 0 and the database's bytes.

    The database is counted by its pages, those in its WAL included. The WAL itself does not grow with the documents.
    """
    if home.index_url.startswith("redis"):
        link = RedisLink(parse(home.index_url))
        text = b"".join(bytes(link.call(b"INFO", section)) for section in (b"cpu", b"memory")).decode()
        link.close()
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"]), float(facts["used_memory"])
    path = Path(unquote(urlsplit(home.index_url).path)) / FILE_NAME
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        pages, page_bytes = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return 0.0, float(pages * page_bytes)


def journal_s(results: int) -> float:
    """Processor seconds that the process which runs a batch spends to record one result durably."""
    like = Row(
        "corpus.jsonl", 0, "row-0", "kvs_" + "0" * 40, "doc_" + "0" * 40, 4096, 1024,
        bytes_full=10**9, bytes_full_16bit=10**9, bytes_stored=10**8,
        quality={"agreement": 0.97, "low": 0.94, "high": 0.99, "kl": 0.02, "cues": 150}, attempts=1, seconds=2.0,
        worker="replica-1", policy="keydiff",
    )  # fmt: skip
    every = [replace(like, line=number, custom_id=f"row-{number}") for number in range(results)]
    folder = tempfile.TemporaryDirectory(prefix="kvshelf-bench-")
    with folder as name, OutputJournal(FileLines(Path(name) / "journal"), {"bench": "rates"}) as journal:
        started = time.process_time()
        for first in range(0, results, _ROWS_AT_ONCE):
            journal.append(every[first : first + _ROWS_AT_ONCE])
        return (time.process_time() - started) / results


def controller_s(few: int, many: int, seconds: float) -> tuple[float, float]:
    """Processor seconds a second that a further idle replica costs Serve's controller and Ray's GCS, on a Ray of its
    own."""
    prepare_environment(None)
    import ray
    from ray import serve

    class Idle:
        def __call__(self) -> None:
            pass

    used = {}
    with ray_cluster(None, min_cpus=1):
        serve.start(proxy_location="Disabled")
        for count in (few, many):
            deployment = serve.deployment(Idle).options(
                num_replicas=count, ray_actor_options={"num_cpus": 0}, health_check_period_s=1.0
            )
            serve.run(deployment.bind(), name="idle", route_prefix=None)
            watched = [_pid("ray::ServeController"), _pid(str(Path(ray.__file__).parent), "gcs_server")]
            before, started = [processor_s(pid) for pid in watched], time.perf_counter()
            time.sleep(seconds)
            elapsed = time.perf_counter() - started
            used[count] = [(processor_s(pid) - was) / elapsed for pid, was in zip(watched, before, strict=True)]
    controller, gcs = ((used[many][i] - used[few][i]) / (many - few) for i in range(2))
    return controller, gcs


def _pid(start: str, name: str = "") -> int:
    """The newest process whose command begins with `start` and contains `name`."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace").partition("\0")[0]
            if command.startswith(start) and name in command:
                pids.append(int(folder.name))
    return max(pids)
