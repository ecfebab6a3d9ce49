"""The overhead of a batch: a run through Ray beside bare loops of `compress` and `put`.

Both process the same documents on equally many processes, each with one thread of torch, without measuring quality,
into fresh shelves on disk, one after the other in each round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvshelf.corpus.run.journal import FileLines, OutputJournal
from kvshelf.corpus.run.progress import RunOptions, RunState
from kvshelf.errors import InternalError
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.connect import ray_cluster
from kvshelf_bench.batches.corpus import POLICY, shard_of
from kvshelf_bench.measure import processor_s
from kvshelf_bench.options import NumberT
from kvshelf_bench.processes import arriving, processes

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class BatchCost:
    """For all documents: wall seconds, and processor seconds of all processes, Ray's too. Both are without the start of
    Ray, replicas or processes; those of a run are with the start of its stages."""

    tokens: int
    wall_s: float
    process_s: float


@dataclass(frozen=True)
class Memory:
    """Resident bytes of the driver and of the largest other process, after a tenth of the rows and at the end."""

    driver_early: int
    driver_end: int
    worker_early: int
    worker_end: int


def bare_loops(corpus: Sequence[list[int]], model: str, count: int) -> BatchCost:
    """`count` processes, each with a loop over its share of the documents; all loops begin together.

    There are at least as many documents as processes. Raises `WorkerCrashed` when a process dies.
    """
    with TemporaryDirectory() as folder:
        shares = [(corpus[at::count], model, f"disk://{folder}/shelf") for at in range(count)]
        with processes(_loop, shares) as loops:
            list(arriving(dict(loops)))  # all are ready
            started = time.perf_counter()
            for connection in loops:
                with suppress(BrokenPipeError):  # `arriving` notices a process that has died since
                    connection.send("begin")
            process_s = sum(seconds for _, seconds in arriving(dict(loops)))
            wall_s = time.perf_counter() - started
    return BatchCost(sum(map(len, corpus)), wall_s, process_s)


def _loop(bench: Connection, documents: Sequence[list[int]], model: str, store: str) -> None:
    """Sends "ready", waits for the start, and sends the processor time that the loop took."""
    from kvshelf_bench.engines import EngineOptions  # loads transformers, which the driver of a run does not

    engine = EngineOptions(model).load()
    with StoreConfig(store).open() as shelf:
        engine.compress(documents[0], policy=POLICY)  # the first call does one-time set-up, outside the timed loop
        bench.send("ready")
        bench.recv()
        started = time.process_time()
        for ids in documents:
            shelf.put(engine.compress(ids, policy=POLICY))
        bench.send(time.process_time() - started)


def batch_run(corpus: Sequence[list[int]], model: str, replicas: int) -> tuple[BatchCost, Memory, float]:
    """A run over the same documents: cost, memory, and the seconds of a second run, whose caches all exist."""
    with TemporaryDirectory() as folder, ray_cluster(None, min_cpus=replicas):
        from kvshelf.workers.cluster import deployment

        store = StoreConfig(f"disk://{folder}/shelf")
        config = deployment.ReplicaConfig(model, store, threads=1, quality=False)
        engines = deployment.deploy([config], replicas)
        deployment.await_running(engines.values(), deadline_s=300)
        cost, memory = _run(corpus, engines, store, Path(folder) / "first")
        again, _ = _run(corpus, engines, store, Path(folder) / "second")
    return cost, memory, again.wall_s


def _run(corpus: Sequence[list[int]], engines: Any, store: StoreConfig, file: Path) -> tuple[BatchCost, Memory]:
    from kvshelf.corpus.run.run import BatchRun

    with OutputJournal(FileLines(file), {}) as journal:
        run = BatchRun([shard_of(corpus)], engines, store, journal, RunOptions("bench", "batch_bench"))
        early: tuple[int, int] | None = None
        before, started = _tree_s(), time.perf_counter()
        run.start()
        while (summary := run.wait(0.2)) is None:
            if early is None and run.progress().fraction > 0.1:
                early = _resident()
        cost = BatchCost(sum(map(len, corpus)), time.perf_counter() - started, _tree_s() - before)
    if summary.state is not RunState.COMPLETED or summary.failed:
        raise InternalError(f"the run of the bench ended {summary.state}: {summary.reason}, {summary.failed} failed")
    end = _resident()
    early = early or end
    return cost, Memory(early[0], end[0], early[1], end[1])


def _of_tree(read: Callable[[int], NumberT]) -> list[NumberT]:
    """What `read` says of this process and of each descendant that has not ended meanwhile."""
    pids, numbers = [os.getpid()], []
    for pid in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
            numbers.append(read(pid))
    return numbers


def _tree_s() -> float:
    """Processor seconds of the tree, ended children included."""
    return sum(_of_tree(lambda pid: processor_s(pid, children=True)))


def _resident() -> tuple[int, int]:
    """Resident bytes of this process, and of its largest descendant."""
    sizes = _of_tree(lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES)
    return sizes[0], max(sizes[1:], default=0)
