"""The trace against a replica's own memory and caches on a disk; answers are pauses, so only reads are measured."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvshelf.engine.engine import Engine
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.calls import Threads
from kvshelf.workers.replica.memory.residents import ResidentLimits, Residents
from kvshelf.workers.replica.memory.retention import Retention
from kvshelf.workers.replica.memory.steps import STEP_S
from kvshelf_bench.retention.simulation import ReplayOutcome
from kvshelf_bench.retention.trace import ANSWER_S, Orchestrator, Order, Program, Trace

SCALE: Final = 64
SIZE_SCALE: Final = 256
"""Times and sizes are so many times smaller: sizes more, because a small read has its fixed cost, too. Fixed seconds do
not shrink: a hint counts at least 10 s after its time, and until tools have run a hundred times their durations count
as Exp(1 s)."""

_TENANT: Final = "default"


@contextmanager
def shelf_of(trace: Trace, engine: Engine) -> Iterator[tuple[DiskStore, dict[str, str]]]:
    """A shelf in a temporary folder with a cache of about its size for each one that a trace asks, and their ids."""
    draw = random.Random(0)
    names = sorted({turn.cache for program in trace.programs for turn in program.turns})
    with tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder, DiskStore.open(Path(folder) / "home") as store:
        ids = {}
        for name in names:
            count = max(16, trace.sizes[name] // engine.kv_bytes_per_token)
            tokens = [draw.randrange(engine.model.config.vocab_size) for _ in range(count)]
            ids[name] = store.put(engine.compress(tokens, policy="full")).id
        yield store, ids


def replay(
    trace: Trace, order: Order, max_bytes: int, engine: Engine, store: DiskStore, ids: dict[str, str]
) -> ReplayOutcome:
    """One run of a scaled trace. Raises `AssertionError` if memory is over its limit at any step."""
    with Threads(8) as threads:
        limits = ResidentLimits(max_bytes=max_bytes, ahead_s=ResidentLimits.ahead_s / SCALE)
        retention = Retention(order.priority)
        residents = Residents(store, engine.attach, engine.attachments.of_part, limits, threads, retention)
        return asyncio.run(_Replay(trace, order, residents, max_bytes, ids).run())


class _Replay:
    def __init__(self, trace: Trace, order: Order, residents: Residents, max_bytes: int, ids: dict[str, str]) -> None:
        self._trace = trace
        self._order = order
        self._residents = residents
        self._max_bytes = max_bytes
        self._ids = ids
        self._orchestrator = Orchestrator(order, ANSWER_S / SCALE, STEP_S / SCALE)
        self._waiting = ThreadPoolExecutor(64)
        self.outcome = ReplayOutcome()

    async def run(self) -> ReplayOutcome:
        reading = asyncio.ensure_future(self._residents.read_ahead_forever())
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, program in enumerate(self._trace.programs):
                await asyncio.sleep(max(0.0, began + program.start_s - time.monotonic()))
                group.create_task(self._play(number, program))
        reading.cancel()
        self.outcome.counts |= self._residents.take_counts()
        self._residents.close()
        self._waiting.shutdown()
        return self.outcome

    async def _play(self, number: int, program: Program) -> None:
        for turn, one in enumerate(program.turns):
            arrived = time.monotonic()
            tool = one.tool if self._order.tools else None
            async with self._residents.using(self._ids[one.cache], _TENANT, tool=tool) as (resident, in_memory):
                self._look()
                self._foretell(number, program, turn, answering=True)
                document = resident.document
                self.outcome.hits += in_memory and document.arrived
                last = document.num_layers - 1
                await asyncio.get_running_loop().run_in_executor(self._waiting, document.prefixes, last)
                self.outcome.waits_s.append(time.monotonic() - arrived)
                if not in_memory:
                    self.outcome.read_bytes += document.nbytes
                await asyncio.sleep(one.answer_s)
            self._foretell(number, program, turn, answering=False)
            self._look()
            await asyncio.sleep(one.pause_s)

    def _foretell(self, number: int, program: Program, turn: int, *, answering: bool) -> None:
        for hint in self._orchestrator.foretell(number, program, turn, time.monotonic(), answering=answering):
            self._residents.hint(hint._replace(cache_id=self._ids[hint.cache_id]), _TENANT)

    def _look(self) -> None:
        most = self.outcome.most_bytes = max(self.outcome.most_bytes, self._residents.nbytes)
        assert most <= self._max_bytes, f"{most} bytes in a memory of {self._max_bytes}"
