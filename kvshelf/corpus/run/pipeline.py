"""The pipeline of a run, as Ray Data streams it: shards are read into pieces of rows, and callers put them to the
engines. Keys and values never travel: a row goes in, and a few hundred bytes of result come out.

Ray repeats what was in a process that died, and takes what it has already seen of it as the same. So each stage gives
the same blocks in the same order each time: a piece has one result for each of its rows, in their order. Whether a row
has ended is in the ledger, so that repeating it costs a look.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import ray
import ray.data
import ray.exceptions as ray_errors
import structlog
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from kvshelf.corpus.input.reading import reader
from kvshelf.corpus.input.rows import Row
from kvshelf.corpus.input.sources import Shard, Source
from kvshelf.corpus.output.results import Result
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
"""Of rows that have been read and wait for a caller, on all nodes together; then reading waits."""

_UNSEEN_BLOCKS: Final = 8
"""That a task may have yielded before the driver looks at the first of them, which it does ten times a second: with
Ray's own 2, a slot brings no more than some ten rows a second, and a batch that is all on the shelf is slow. Ray has no
public name for it; where it does not know this one, it takes its own."""

_CPUS: Final = 0
"""Of the processes of a stage: they compute little. With a share of a CPU they would wait for ever where replicas hold
them all."""


@dataclass(frozen=True)
class Calls:
    """What callers are made of; it travels to their processes. `gate` is Ray's handle of the run's `Gate`."""

    engines: Mapping[str, RemoteEngine]
    store: StoreConfig
    options: RunOptions
    began: float
    gate: Any


def stream(
    source: Source, shards: Sequence[Shard], calls: Calls, *, in_flight: int
) -> Generator[Result | None, None, None]:
    """The results of all rows of these shards of the source, as they come; None for rows that the run has stopped.

    Close it to end the work. Raises Ray's errors where the pipeline itself breaks.
    """
    callers = -(-in_flight // SLOTS_PER_CALLER)
    slots = -(-in_flight // callers)
    with ray.data.DataContext.current(_context()):
        rows = ray.data.read_datasource(
            _Corpus(shards),
            override_num_blocks=len(shards),
            concurrency=min(_READERS, len(shards)),
            label_selector=_where(source),
            num_cpus=_CPUS,
        )
        results = rows.map_batches(
            _Callers,
            fn_constructor_kwargs={"calls": calls, "slots": slots},
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
    blocks = results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    with closing(iter(blocks)) as arriving:
        for block in arriving:
            for text in block.column("result").to_pylist():
                yield None if text is None else Result.from_dict(json.loads(text))


def _context() -> ray.data.DataContext:
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # its plans and statistics are no news
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.resource_limits = ray.data.ExecutionResources(object_store_memory=READ_AHEAD_BYTES)
    context.target_max_block_size = 1  # what a stage yields goes on at once, and is not gathered into larger blocks
    context._max_num_blocks_in_streaming_gen_buffer = _UNSEEN_BLOCKS
    return context


def _where(source: Source) -> dict[str, str] | None:
    """Files of one machine are read there; this is the label that Ray gives to its node."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if source.local else None


class _Corpus(Datasource):  # type: ignore[misc]  # Ray's class has no types
    """The shards of a source, one task each."""

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
    """The store, as soon as it can be had: a caller that did not start would end the whole run."""
    while True:
        try:
            return config.open()
        except StoreError as error:
            log.warning("the store cannot be opened now", code=error.code, message=error.message)
            time.sleep(_OPEN_AGAIN_S)


class _Callers:
    """One process of the pipeline: its pieces come on threads, its rows run on one event loop."""

    def __init__(self, calls: Calls, slots: int) -> None:
        self._name = secrets.token_hex(8)
        self._calls = calls
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._caller = Caller(calls.engines, _opened(calls.store), calls.options, began=calls.began, slots=slots)
        self._rows: set[asyncio.Task[Result]] = set()
        threading.Thread(target=self._run, daemon=True, name="caller").start()

    def __call__(self, piece: pa.Table) -> Iterator[pa.Table]:
        rows = [Row.from_json(data) for data in piece.column("rows")[0].as_py()]
        ends = [asyncio.run_coroutine_threadsafe(self._settled(row), self._loop) for row in rows]
        for end in ends:
            result = end.result()
            text = None if result is None else json.dumps(result.to_dict())
            yield pa.table({"result": pa.array([text], pa.string())})

    async def _settled(self, row: Row) -> Result | None:
        """None: the run was stopped before the row's end."""
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
        self._loop.create_task(watch(self._calls.engines.values(), interval_s=_WATCH_S))
        self._loop.run_forever()

    async def _obey(self) -> None:
        """Tell the run how it goes here, and do what it says."""
        while True:
            report = Report(self._caller.at_work, self._caller.trouble)
            try:
                order = await self._calls.gate.take.remote(self._name, report)
            except ray_errors.RayError:
                order = None  # it is being started again; until then the last order holds
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
