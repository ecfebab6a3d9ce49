"""What a document of a batch costs the parts that all replicas share: a home and its server, Ray and Serve themselves,
and the process that runs the batch. `kvshelf plan` reckons with it.

Processor time, because these parts are one thread each: what one document takes of a second is how many fit into one.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from kvshelf.bench.stores.homes import Home
from kvshelf.bench.stores.store import random_cache
from kvshelf.corpus.output.results import Result
from kvshelf.corpus.run.journal import FileJournal
from kvshelf.store.artifact.cache import CompressedCache
from kvshelf.store.artifact.identity import digest
from kvshelf.store.disk.database import FILE_NAME
from kvshelf.store.index import Index
from kvshelf.store.redis.address import parse
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.shelf import Shelf
from kvshelf.workers.cluster.connect import prepare_environment, ray_cluster

SMALL_MB: Final = 0.01
LARGE_MB: Final = 8.0

_LAYERS: Final = 32
_LEASE_S: Final = 30.0
_ROWS_AT_ONCE: Final = 64
_TICK_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class HomeRates:
    """Of one home. Seconds for each document with a small cache, its ledger entries and its manifest included.

    clock_s: by the clock, one writer. process_s: processor time of the writer. server_s: of the Redis server, None for
    a folder. server_s_per_mb: what a megabyte of blob adds to that. index_bytes: what the home keeps of a document
    besides its blob, in the server's memory or in the database.
    """

    home: str
    documents: int
    clock_s: float
    process_s: float
    server_s: float | None
    server_s_per_mb: float | None
    index_bytes: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def home_rates(home: Home, documents: int) -> HomeRates:
    """Take so many rows through the ledger and put their caches."""
    meter = _meter(home)
    small = _Rows("small", documents, random_cache(SMALL_MB, _LAYERS))
    large = _Rows("large", max(8, documents // 50), random_cache(LARGE_MB, _LAYERS))
    index, blobs = home.open()
    with Shelf(index, blobs) as store:
        _put(store, index, replace(small, name="warm", count=documents // 10 + 1))
        first, started, busy = meter(), time.perf_counter(), time.process_time()
        _put(store, index, small)
        clock_s, process_s = time.perf_counter() - started, time.process_time() - busy
        second = meter()
        _put(store, index, large)
        third = meter()
    each_small = (second.server_s - first.server_s) / small.count
    each_large = (third.server_s - second.server_s) / large.count
    more_mb = (large.blob_bytes - small.blob_bytes) / 1e6
    redis = home.name == "redis"
    return HomeRates(
        home.name,
        documents,
        clock_s / documents,
        process_s / documents,
        each_small if redis else None,
        (each_large - each_small) / more_mb if redis else None,
        (second.kept_bytes - first.kept_bytes) / documents - (small.blob_bytes if redis else 0),
    )


@dataclass(frozen=True)
class _Rows:
    """The caches of `count` different documents, all with the same bytes."""

    name: str
    count: int
    template: CompressedCache

    @property
    def blob_bytes(self) -> int:
        return self.template.pack().nbytes

    def cache(self, number: int) -> CompressedCache:
        identity = replace(self.template.identity, document=digest("bench.document", self.name, str(number)))
        return replace(self.template, identity=identity)


@dataclass(frozen=True)
class _Reading:
    """Processor seconds of the home's server so far, and the bytes it keeps; of a folder, those of its database."""

    server_s: float
    kept_bytes: float


def _meter(home: Home) -> Callable[[], _Reading]:
    if home.name == "redis":
        return lambda: _redis_reading(home.url)
    database = Path(unquote(home.url.removeprefix("disk://"))) / FILE_NAME
    return lambda: _Reading(0.0, _database_bytes(database))


def _database_bytes(path: Path) -> int:
    """By its pages, those that are still in its WAL included. The WAL itself does not grow with the documents."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        pages, page_bytes = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return int(pages * page_bytes)


def _redis_reading(url: str) -> _Reading:
    link = RedisLink(parse(url))
    text = b"".join(bytes(link.call(b"INFO", section)) for section in (b"cpu", b"memory")).decode()
    link.close()
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return _Reading(float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"]), float(facts["used_memory"]))


def _put(store: Shelf, index: Index, rows: _Rows) -> None:
    """As a replica does it for a row: count the attempt, put, finish."""
    for number in range(rows.count):
        request = f"row_{rows.name}_{number}"
        index.ledger.open_request(request, tenant="default", body=b"")
        attempt = index.ledger.start_attempt(request, worker="bench", lease_s=_LEASE_S)
        manifest = store.put(rows.cache(number))
        index.ledger.finish(request, attempt, cache_ids=[manifest.id])


def journal_s(results: int) -> float:
    """Processor seconds that the process which runs a batch spends on one result: to write it down durably."""
    with tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder:
        path = Path(folder) / "journal"
        with FileJournal(path, {"bench": "rates"}) as journal:
            started = time.process_time()
            for first in range(0, results, _ROWS_AT_ONCE):
                batch = range(first, min(first + _ROWS_AT_ONCE, results))
                journal.append([_result(number) for number in batch])
            return (time.process_time() - started) / results


def _result(number: int) -> Result:
    quality = {"agreement": 0.97, "kl": 0.02, "tokens": 64}
    return Result(
        "corpus.jsonl", number, f"row-{number}", "kvs_" + "0" * 40, "doc_" + "0" * 40, 4096, 1024, 10**9, 10**8,
        quality, 1, 2.0, worker="replica-1", policy="keydiff",
    )  # fmt: skip


def controller_s(few: int, many: int, seconds: float, period_s: float = 1.0) -> tuple[float, float]:
    """Processor seconds per second that each further replica costs Serve's controller and Ray's GCS: health checks of
    replicas that do nothing, on a Ray of one's own."""
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
                num_replicas=count, ray_actor_options={"num_cpus": 0}, health_check_period_s=period_s
            )
            serve.run(deployment.bind(), name="idle", route_prefix=None)
            watched = [_pid("ray::ServeController"), _pid(str(Path(ray.__file__).parent), "gcs_server")]
            before, started = [_processor_s(pid) for pid in watched], time.perf_counter()
            time.sleep(seconds)
            elapsed = time.perf_counter() - started
            used[count] = [(_processor_s(pid) - was) / elapsed for pid, was in zip(watched, before, strict=True)]
    controller, gcs = ((used[many][i] - used[few][i]) / (many - few) for i in range(2))
    return controller, gcs


def _pid(*words: str) -> int:
    """The newest process whose command line begins with the first word and has the others in its name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode(errors="replace").partition("\0")[0]
            if line.startswith(words[0]) and all(word in line for word in words):
                found.append(int(folder.name))
    return max(found)


def _processor_s(pid: int) -> float:
    """Processor seconds that a process has used so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK_S
