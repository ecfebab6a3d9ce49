"""The pipeline of a run, streamed by Ray Data: shards are read into pieces of rows, and callers send them to the
engines. Keys and values never travel: a row goes in, and it comes out ended, in a few hundred bytes.

Ray repeats the work of a dead process, and assumes that the blocks it has already seen come back unchanged. So each
stage yields the same blocks in the same order each time: a piece gives one block per row, in order. The job table
records whether a row has ended, so that repeating the row costs one look-up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pydantic_core
import ray
import ray.data
import ray.exceptions as ray_errors
import structlog
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from kvshelf.corpus.input.reading import reader
from kvshelf.corpus.row import Row, Shard
from kvshelf.corpus.run.caller import Caller
from kvshelf.corpus.run.control import Order, Report
from kvshelf.corpus.run.progress import RunOptions
from kvshelf.errors import StoreError
from kvshelf.store.base import Store
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.remote import RemoteEngine, watch

log = structlog.get_logger("kvshelf.corpus")

SLOTS_PER_CALLER: Final = 32
_READERS: Final = 2
_OPEN_AGAIN_S: Final = 2.0
_TELL_S: Final = 0.5
_WATCH_S: Final = 2.0

READ_AHEAD_BYTES: Final = 1 << 30
"""Limit of rows that are read but wait for a caller, on all nodes together; at the limit, reading pauses."""

_UNSEEN_BLOCKS: Final = 8
"""Blocks a task may buffer before the driver reads one. The driver reads ten times a second: with Ray's default of 2, a
slot gives about ten rows a second, so a batch whose caches are all on the shelf would be slow. The setting's name is
private to Ray; a Ray version that does not know it uses its default."""

_CPUS: Final = 0
"""CPUs reserved by a stage's processes: they compute little, and would wait for ever if replicas hold all CPUs."""


@dataclass(frozen=True)
class CallerSetup:
    """The arguments of a caller, which travel to its process. control: Ray's handle of the run's `Control`."""

    engines: Mapping[str, RemoteEngine]
    store: StoreConfig
    options: RunOptions
    began: float
    control: Any


def stream(shards: Sequence[Shard], setup: CallerSetup, *, in_flight: int) -> Generator[Row | None, None, None]:
    """The rows of these shards as they end; None for a row that the run has stopped.

    Close it to end the work. Raises Ray's errors if the pipeline itself breaks.
    """
    callers = -(-in_flight // SLOTS_PER_CALLER)
    slots = -(-in_flight // callers)
    with ray.data.DataContext.current(_context()):
        rows = ray.data.read_datasource(
            _Shards(shards),
            override_num_blocks=len(shards),
            concurrency=min(_READERS, len(shards)),
            label_selector=_where(shards),
            num_cpus=_CPUS,
        )
        ended = rows.map_batches(
            _Callers,
            fn_constructor_kwargs={"setup": setup, "slots": slots},
            batch_size=1,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(
                size=callers,
                max_tasks_in_flight_per_actor=slots + 2,
                max_concurrent_calls_per_actor=slots,
                enable_true_multi_threading=True,
            ),
            num_cpus=_CPUS,
        )
    blocks = ended.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    with closing(iter(blocks)) as arriving:
        for block in arriving:
            for data in block.column("row").to_pylist():
                yield None if data is None else Row.from_dict(pydantic_core.from_json(data))


def _context() -> ray.data.DataContext:
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it logs plans and statistics
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.resource_limits = ray.data.ExecutionResources(object_store_memory=READ_AHEAD_BYTES)
    context.target_max_block_size = 1  # pass each block on at once
    context._max_num_blocks_in_streaming_gen_buffer = _UNSEEN_BLOCKS
    return context


def _where(shards: Sequence[Shard]) -> dict[str, str] | None:
    """Ray's label of this node if it alone can read the shards, else None."""
    local = any(shard.local for shard in shards)
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if local else None


class _Shards(Datasource):  # type: ignore[misc]  # Ray's class has no types
    """Shards, one task each."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        self._shards = shards

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(shard.nbytes for shard in self._shards)

    def get_read_tasks(self, parallelism: int, **_: Any) -> list[ReadTask]:  # noqa: ARG002  # the names are Ray's
        return [
            ReadTask(
                reader(shard),
                BlockMetadata(num_rows=None, size_bytes=shard.nbytes, exec_stats=None, input_files=None),
            )
            for shard in self._shards
        ]


def _opened(config: StoreConfig) -> Store:
    """The store, once it can be opened: a caller that fails to start would end the whole run."""
    while True:
        try:
            return config.open()
        except StoreError as error:
            log.warning("the store cannot be opened now", code=error.code, message=error.message)
            time.sleep(_OPEN_AGAIN_S)


class _Callers:
    """One process of the pipeline: pieces arrive on threads, rows run on one event loop."""

    def __init__(self, setup: CallerSetup, slots: int) -> None:
        self._name = secrets.token_hex(8)
        self._setup = setup
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._caller = Caller(setup.engines, _opened(setup.store), setup.options, began=setup.began, slots=slots)
        self._rows: set[asyncio.Task[Row]] = set()
        threading.Thread(target=self._run, daemon=True, name="caller").start()

    def __call__(self, piece: pa.Table) -> Iterator[pa.Table]:
        rows = map(Row.from_dict, pydantic_core.from_json(piece.column("rows")[0].as_py()))
        ends = [asyncio.run_coroutine_threadsafe(self._settled(row), self._loop) for row in rows]
        for end in ends:
            row = end.result()
            data = None if row is None else pydantic_core.to_json(row.to_dict())
            yield pa.table({"row": pa.array([data], pa.binary())})

    async def _settled(self, row: Row) -> Row | None:
        """The row as it ended; None if the run was stopped before."""
        if self._stopped:
            return None
        task = asyncio.ensure_future(self._caller.settle(row))
        self._rows.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            return None
        finally:
            self._rows.discard(task)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._obey())
        self._loop.create_task(watch(self._setup.engines.values(), interval_s=_WATCH_S))
        self._loop.run_forever()

    async def _obey(self) -> None:
        """Report to the run, and follow its orders."""
        while True:
            report = Report(self._caller.at_work, self._caller.trouble)
            try:
                order = await self._setup.control.take.remote(self._name, report)
            except ray_errors.RayError:
                order = None  # the control restarts; until then the last order holds
            self._follow(order)
            await asyncio.sleep(_TELL_S)

    def _follow(self, order: Order | None) -> None:
        if order is Order.GO:
            self._caller.going.set()
        elif order is Order.HOLD:
            self._caller.going.clear()
        elif order is Order.STOP:
            self._stopped = True
            for task in list(self._rows):
                task.cancel()
