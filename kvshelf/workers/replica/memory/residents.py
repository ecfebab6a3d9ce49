"""Attached caches that stay in memory between questions, and that are read before a question that a hint foretells."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.artifact.opened.partial import PartialCache
from kvshelf.artifact.records import LayerRecord
from kvshelf.engine.attention.attachment import Attachment, PartialAttachment
from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.store.base import Store
from kvshelf.workers.replica.calls import Threads, tenant_at_work
from kvshelf.workers.replica.fair_queue import FairCondition, FairQueue
from kvshelf.workers.replica.memory.retention import AHEAD_S, Hint, Key, Retention
from kvshelf.workers.replica.memory.tools import Tools
from kvshelf.workers.replica.queues import Pace
from kvshelf.workers.replica.singleflight import SingleFlight

log = logging.getLogger("kvshelf.workers")

Attach = Callable[[ArrivingCache], Attachment]
AttachPart = Callable[[PartialCache], PartialAttachment | None]
"""As `Attachments.of_part`."""


@dataclass(frozen=True)
class ResidentLimits:
    """All caches together have at most `max_bytes`; one larger cache may be held alone. If memory is full, a question
    waits until others are answered. Caches without a question for `idle_s` seconds are evicted, unless one is expected
    within as long. A cache with a hint is read ahead once there is room, and from `ahead_s` seconds before its question
    on, others that are used later make room."""

    max_bytes: int = 2 << 30
    idle_s: float = 600.0
    ahead_s: float = AHEAD_S


@dataclass(eq=False)
class Resident:
    """A cache in memory, or being read. `users`: open questions. `read_s`: seconds of reading and checking all of it, 0
    until that is done, and where questions read it in part. `place`: where it was read from, as
    `ArrivingCache.place`. `ahead`: no question has used it since it was read ahead. `reading`: the end of the read.
    `prefill_s`: seconds of prefill that an answer from it saves, None until they are looked up."""

    document: Attachment
    digest: str
    place: str
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)
    read_s: float = 0.0
    ahead: bool = False
    reading: Future[None] | None = None
    prefill_s: float | None = None


class Warmed(NamedTuple):
    """How many caches of a call are in memory now, their bytes, those of them that were read for it, and the ids of
    those that are not there."""

    caches: int
    nbytes: int
    read_bytes: int
    left_out: Sequence[str]


class _NeverRoom(Exception):
    """The caches that a question holds, and one more that it wants, do not fit into the memory for caches."""


class _NoRoomAhead(Exception):
    """What is used later than a cache with a hint leaves it no room."""


class Residents:
    """The caches that one replica holds, by tenant and id. Each use reads the manifest from the store first, so a cache
    that was deleted, has expired or was replaced is never answered from memory. Its methods run on the replica's event
    loop; reading and everything else that touches the store runs on its threads."""

    def __init__(
        self,
        store: Store,
        attach: Attach,
        attach_part: AttachPart,
        limits: ResidentLimits,
        threads: Threads,
        retention: Retention | None = None,
    ) -> None:
        self._store = store
        self._attach = attach
        self._attach_part = attach_part
        self.limits = limits
        self._threads = threads
        # Readers have threads of their own, so that calls waiting for memory never block the calls that free it.
        self._readers = Threads(4, "reader")
        self.caches: dict[Key, Resident] = {}
        self.retention = retention or Retention()
        self._tools = Tools()
        self.read_pace = Pace()  # seconds per byte
        self._room_pace = Pace()  # seconds that a read waited for room
        self._short = 0  # reads that wait for room
        self._bytes_ahead: dict[Key, int] = {}  # of caches with a hint for which there was no room
        self._changed = asyncio.Event()  # a hint came, or room may have become free
        self._counts: Counter[str] = Counter()
        self._opening: SingleFlight[Resident] = SingleFlight()
        self._freed = FairCondition()
        self._taking = FairQueue("documents that are asked together", 1, sys.maxsize)
        # By the cache that the question with several waits for: bytes of those that it holds meanwhile.
        self._beside: dict[Key, int] = {}
        self._requested: Counter[Key] = Counter()  # caches of questions that have come and do not hold them yet

    @property
    def nbytes(self) -> int:
        return sum(resident.document.nbytes for resident in self.caches.values())

    def __len__(self) -> int:
        return len(self.caches)

    @asynccontextmanager
    async def using_all(
        self,
        cache_ids: Sequence[str],
        tenant: str,
        *,
        part: bool = False,
        tool: str | None = None,
        program: str | None = None,
    ) -> AsyncIterator[list[tuple[Resident, bool]]]:
        """The caches of one question, each as `using` gives it; they are read side by side.

        Only one question at a time takes several: of two that hold some each, neither would get room for the rest.
        Where there are several, errors name theirs in `details["cache_id"]`. Raises as `using`, and `InvalidRequest`
        for caches that do not fit into memory together.
        """
        residents: list[tuple[Resident, bool]] = []
        async with AsyncExitStack() as stack:
            taking = self._taking.turn(tenant, None) if len(cache_ids) > 1 else nullcontext()
            with self._wanting([(tenant, cache_id) for cache_id in cache_ids]):
                async with taking:
                    for cache_id in cache_ids:
                        beside = sum(resident.document.nbytes for resident, _ in residents)
                        try:
                            using = self.using(cache_id, tenant, part=part, beside=beside, tool=tool, program=program)
                            residents.append(await stack.enter_async_context(using))
                        except _NeverRoom:
                            raise InvalidRequest(
                                f"of the {len(cache_ids)} documents of this question, {len(residents)} take {beside} "
                                f"bytes in memory, and with the next the {self.limits.max_bytes} of this worker are "
                                "not enough; ask fewer at once",
                                param="cache_ids",
                            ) from None
                        except KvshelfError as error:
                            if len(cache_ids) > 1:
                                error.details["cache_id"] = cache_id
                            raise
            yield residents

    @contextmanager
    def _wanting(self, keys: Sequence[Key]) -> Iterator[None]:
        """While a question waits for its caches, none of them leaves for one that is read ahead."""
        self._requested.update(keys)
        try:
            yield
        finally:
            self._requested.subtract(keys)
            self._requested = +self._requested

    @asynccontextmanager
    async def using(
        self,
        cache_id: str,
        tenant: str,
        *,
        part: bool = False,
        beside: int = 0,
        tool: str | None = None,
        program: str | None = None,
    ) -> AsyncIterator[tuple[Resident, bool]]:
        """The cache for the length of a block, and whether it was in memory already.

        It may still be arriving; a layer that cannot be read raises where it is used. part: the question reads what it
        selects, so that a cache that is not in memory is not read ahead. beside: bytes of the caches that the same
        question holds. tool: what the answer calls; if the block ends without an error, the cache is pinned for a time.
        program: whose question it is. Raises what `Store.open_cache` raises, and `ModelMismatch`.
        """
        self._tools.note_question(tenant, cache_id, time.monotonic(), program)
        resident, in_memory = await self._acquire(cache_id, tenant, part, beside)
        try:
            yield resident, in_memory
            self._answered((tenant, cache_id), resident, tool, program)
        finally:
            resident.users -= 1
            resident.last_used = time.monotonic()
            if resident.document.failed:
                self._drop((tenant, cache_id), resident)
            if self.caches.get((tenant, cache_id)) is not resident:
                self._close(resident)
            self._changed.set()
            async with self._freed:
                self._freed.notify_all()

    async def hold(self, cache_id: str, tenant: str, document: Attachment, digest: str) -> None:
        """Keep a cache that has just been stored from here, so that its next question need not read it: where caches
        that nobody uses or foretells leave it room, and no read waits for that. digest: of its blob."""
        key, nbytes, now = (tenant, cache_id), document.nbytes, time.monotonic()
        async with self._freed:
            leaving = self._idle(now)
            room = self.limits.max_bytes - self.nbytes + sum(resident.document.nbytes for resident in leaving.values())
            if self._short or key in self.caches or nbytes > room:
                return
            for leaver in sorted(leaving, key=lambda leaver: self.retention.order(leaver, now)):
                if nbytes <= self.limits.max_bytes - self.nbytes:
                    break
                self._evict(leaver)
            self.caches[key] = Resident(document, digest, "memory")
            self.retention.used(key, now, cost_s=self._reload_s(nbytes), nbytes=nbytes)

    def hint(self, hint: Hint, tenant: str) -> None:
        """When a tenant's next question on a cache comes. See `read_ahead_forever`."""
        self.retention.hint(hint, tenant, time.monotonic())
        self._changed.set()

    async def warm(self, keys: Sequence[Key]) -> Warmed:
        """Read caches that no question asks yet, one at a time, and pin each for `idle_s`, as one whose tool runs.

        They make room as hints of a question now do. All must fit into this memory together, else nothing is read:
        raises `InvalidRequest` that names the first that does not, and as `Store.open_cache`.
        """
        nbytes = 0
        for key in dict.fromkeys(keys):
            nbytes += await self._size(key)
            if nbytes > self.limits.max_bytes:
                raise InvalidRequest(
                    f"cache {key[1]} does not fit: with those before it, {nbytes} bytes would be in memory, and a "
                    f"worker holds {self.limits.max_bytes} (resident_bytes); warm fewer",
                    param="cache_ids",
                )
        sizes: list[int] = []
        read_bytes = 0
        left_out: list[str] = []
        for key in dict.fromkeys(keys):
            resident, in_memory = await self._warm(key)
            if resident is None:
                left_out.append(key[1])
            else:
                sizes.append(resident.document.nbytes)
                read_bytes += 0 if in_memory else resident.document.nbytes
                self.retention.pin(key, time.monotonic() + self.limits.idle_s)
        return Warmed(len(sizes), sum(sizes), read_bytes, left_out)

    async def _size(self, key: Key) -> int:
        """Bytes of a cache in memory, by its header where it is not there."""
        tenant, cache_id = key
        if key in self.caches:
            return self.caches[key].document.nbytes
        with await self._threads.run(self._store.open_cache, cache_id, tenant=tenant) as arriving:
            return arriving.attached_bytes

    async def _warm(self, key: Key) -> tuple[Resident | None, bool]:
        """A cache that has been read to its end, None if it was not, and whether it was in memory before."""
        tenant, cache_id = key
        resident = self.caches.get(key)
        in_memory = resident is not None and await self._current(key, resident)
        if resident is not None and not in_memory:
            self._drop(key, resident)
        if not in_memory:
            self.retention.hint(Hint(cache_id, 0.0), tenant, time.monotonic())
            await self._read_ahead(key)
            resident = self.caches.get(key)
        if resident is not None and resident.reading is not None:
            await asyncio.wrap_future(resident.reading)
            if resident.document.failed:
                self._drop(key, resident)
        self.retention.hint(Hint(cache_id, None), tenant, time.monotonic())
        return self.caches.get(key), in_memory

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call: "pinned" after a tool was called, "released" by evicting a pinned cache,
        "read_ahead" by a hint, and "read_ahead_used" by a question that found such a cache."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    async def read_ahead_forever(self) -> NoReturn:
        """Read the caches with a hint within `idle_s`, the nearest first, for as long as this task lives.

        One at a time, and only while no other cache is read: a disk that is busy with questions would make them wait
        for caches that nobody asks yet. (On the trace of `kvshelf bench retention` with 8 GB, the mean first token took
        1.7 s without that rule, 0.28 s with it and 0.46 s without hints.)
        """
        while True:
            self._changed.clear()
            hinted = self.retention.hinted(time.monotonic())
            self._bytes_ahead = {key: self._bytes_ahead[key] for _, key in hinted if key in self._bytes_ahead}
            for wait_s, key in hinted:
                if self._busy:
                    break
                if key not in self.caches and wait_s <= self.limits.idle_s:
                    await self._read_ahead(key)
            now, limits = time.monotonic(), (self.limits.ahead_s, self.limits.idle_s)
            pause_s = min(self.retention.nears_in(limit_s, now) for limit_s in limits)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if pause_s == math.inf else pause_s):
                    await self._changed.wait()

    async def _read_ahead(self, key: Key) -> None:
        """Begin to read a cache before its question, if there is room."""
        tenant, cache_id = key
        tenant_at_work.set(tenant)
        nbytes = self._bytes_ahead.get(key)
        if nbytes is not None and self._later(nbytes, key) is None:
            return
        try:
            await self._opening.join(f"{tenant}/{cache_id}", lambda: self._open(cache_id, tenant, False, ahead=True))
        except _NoRoomAhead:
            pass
        except Exception as error:  # any error: a question will get its own
            self.retention.forget(key)
            log.info("a cache with a hint could not be read ahead: %s", error)

    @property
    def _busy(self) -> bool:
        """Whether a cache is being read or about to be."""
        reads = (resident.reading for resident in self.caches.values())
        return len(self._opening) > 0 or any(reading is not None and not reading.done() for reading in reads)

    async def evict_idle_forever(self) -> NoReturn:
        while True:
            await asyncio.sleep(min(self.limits.idle_s / 4, 30.0))
            self.evict_idle(time.monotonic() - self.limits.idle_s)

    def evict_idle(self, last_used_before: float) -> int:
        """Drop unused caches that were last used before this time of `time.monotonic`. Returns how many."""
        idle = [key for key, resident in self._idle(time.monotonic()).items() if resident.last_used < last_used_before]
        for key in idle:
            self._evict(key)
        return len(idle)

    def _idle(self, now: float) -> dict[Key, Resident]:
        """The unused caches that have no pin, and no hint of a question within `idle_s`."""
        return {
            key: resident
            for key, resident in self._unused()
            if not self.retention.pinned(key, now) and self.retention.wait_s(key, now) > self.limits.idle_s
        }

    def close(self) -> None:
        for key, resident in list(self.caches.items()):
            self._drop(key, resident)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _acquire(self, cache_id: str, tenant: str, part: bool, beside: int) -> tuple[Resident, bool]:
        key, in_memory = (tenant, cache_id), True
        while True:
            resident = self.caches.get(key)
            if resident is None:
                in_memory = False
                try:
                    async with self._holding(beside, key):
                        name = f"{tenant}/{cache_id}"
                        _, began = await self._opening.join(name, lambda: self._open(cache_id, tenant, part))
                except _NeverRoom:
                    if beside:
                        raise
                    continue  # it was another question that holds too much
                except _NoRoomAhead:
                    continue  # it was read ahead of this question, which makes room
                if not began:  # the call read the manifest before this question came, so ask the store again
                    continue
                # Taken from the table, not from the shared call: another cache may have needed its room meanwhile.
                resident = self.caches.get(key)
            elif not await self._current(key, resident):
                self._drop(key, resident)
                continue
            elif self.caches.get(key) is not resident:  # it was dropped while the store was asked
                continue
            if resident is not None:
                nbytes = resident.document.nbytes
                self.retention.used(key, time.monotonic(), cost_s=self._reload_s(nbytes), nbytes=nbytes)
                self._counts["read_ahead_used"] += resident.ahead
                resident.ahead = False
                resident.users += 1
                return resident, in_memory

    def _answered(self, key: Key, resident: Resident, tool: str | None, program: str | None) -> None:
        """An answer ended, and the tool that it calls begins to run."""
        tenant, cache_id = key
        now, nbytes = time.monotonic(), resident.document.nbytes
        self._tools.note_answer(tenant, cache_id, tool, now, program)
        if tool is None or self.caches.get(key) is not resident:
            return
        wait_s = self._room_pace.seconds or 0.0
        stay_s = self._tools.stay_s(tenant, tool, wait_s=wait_s, reload_s=self._reload_s(nbytes))
        if stay_s > 0:
            self.retention.pin(key, now + stay_s)
            self._counts["pinned"] += 1

    def _reload_s(self, nbytes: int) -> float:
        """Seconds to read a cache again, by those of the last reads; 0 before the first."""
        return nbytes * (self.read_pace.seconds or 0.0)

    @asynccontextmanager
    async def _holding(self, beside: int, key: Key) -> AsyncIterator[None]:
        """While a question waits for a cache and holds `beside` bytes of others. Whoever opens the cache, maybe another
        question, waits for no room that this one would have to free."""
        if beside:
            async with self._freed:
                self._beside[key] = beside
                self._freed.notify_all()
        try:
            yield
        finally:
            if beside:
                del self._beside[key]

    async def _current(self, key: Key, resident: Resident) -> bool:
        """Whether a resident cache is still what the shelf has. Raises as `Store.stat` does."""
        tenant, cache_id = key
        manifest = await self._threads.run(self._store.stat, cache_id, tenant=tenant)
        return resident.digest == manifest.blob_digest and not resident.document.failed

    async def _open(self, cache_id: str, tenant: str, part: bool, *, ahead: bool = False) -> Resident:
        opened = await self._opened_part(cache_id, tenant) if part else None
        if opened is not None:
            return opened
        arriving = await self._threads.run(self._store.open_cache, cache_id, tenant=tenant)
        try:
            document = await self._threads.run(self._attach, arriving)
            if ahead:
                self._make_room_ahead(arriving.attached_bytes, (tenant, cache_id))
            else:
                await self._make_room(arriving.attached_bytes, (tenant, cache_id))
        except BaseException:
            arriving.close()
            raise
        resident = Resident(document, arriving.root.hex(), arriving.place, ahead=ahead)
        self.caches[tenant, cache_id] = resident
        self._counts["read_ahead"] += ahead
        loop = asyncio.get_running_loop()

        def look_again(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop has ended before its last read
                loop.call_soon_threadsafe(self._changed.set)

        resident.reading = self._readers.submit(_read, arriving, resident, self.read_pace)
        resident.reading.add_done_callback(look_again)
        return resident

    async def _opened_part(self, cache_id: str, tenant: str) -> Resident | None:
        """A cache of which questions read what they select; None if it has to be read as a whole."""
        cache = await self._threads.run(self._store.open_parts, cache_id, tenant=tenant)
        try:
            document = await self._threads.run(self._attach_part, cache)
            if document is not None:
                await self._make_room(cache.attached_bytes, (tenant, cache_id))
                resident = self.caches[tenant, cache_id] = Resident(document, cache.root.hex(), cache.place)
                return resident
        except BaseException:
            cache.close()
            raise
        cache.close()
        return None

    async def _make_room(self, nbytes: int, key: Key) -> None:
        began = time.monotonic()
        async with self._freed:
            while self.caches and self.nbytes + nbytes > self.limits.max_bytes:
                beside = self._beside.get(key, 0)
                if beside and beside + nbytes > self.limits.max_bytes:
                    raise _NeverRoom
                now = time.monotonic()
                unused = sorted((key for key, _ in self._unused()), key=lambda key: self.retention.order(key, now))
                if unused:
                    self._evict(unused[0])
                    continue
                self._short += 1
                try:
                    await self._freed.wait(key[0])
                finally:
                    self._short -= 1
        self._room_pace.record(time.monotonic() - began)

    def _make_room_ahead(self, nbytes: int, key: Key) -> None:
        """Evict what is used later than a cache with a hint, if that gives it room; raises `_NoRoomAhead` otherwise."""
        leaving = self._later(nbytes, key)
        if leaving is None:
            self._bytes_ahead[key] = nbytes
            raise _NoRoomAhead
        for later in leaving:
            self._evict(later)

    def _later(self, nbytes: int, key: Key) -> list[Key] | None:
        """The caches that leave for one with a hint, none of which is used before it; None if that gives no room, or a
        question waits for room."""
        if self._short:
            return None
        now = time.monotonic()
        near = self.retention.presses(key, self.limits.ahead_s, now)
        unused = {other: resident.document.nbytes for other, resident in self._unused()} if near else {}
        for requested in self._requested:
            unused.pop(requested, None)
        return self.retention.leaving_for(key, unused, self.nbytes + nbytes - self.limits.max_bytes, now)

    def _unused(self) -> list[tuple[Key, Resident]]:
        return [(key, resident) for key, resident in self.caches.items() if not resident.users]

    def _evict(self, key: Key) -> None:
        """Drop an unused cache, to which a hint may bring it back."""
        self._counts["released"] += self.retention.left(key, time.monotonic())
        self._close(self.caches.pop(key))

    def _drop(self, key: Key, resident: Resident) -> None:
        """Drop a cache that is not what the shelf has, or with everything."""
        if self.caches.get(key) is resident:
            del self.caches[key]
            self.retention.forget(key)
            self._close(resident)

    def _close(self, resident: Resident) -> None:
        """Free what a cache that is no longer held keeps open, once nobody uses it."""
        if not resident.users:
            resident.document.close()


def _read(arriving: ArrivingCache, resident: Resident, pace: Pace) -> None:
    # Its last layer keeps `note`: with a reference to the cache, an evicted one would stay in memory until the next
    # garbage collection.
    started, nbytes, read = time.monotonic(), arriving.attached_bytes, weakref.ref(resident)

    def note(layer: Future[LayerRecord]) -> None:
        read_s = time.monotonic() - started
        if (noted := read()) is not None:
            noted.read_s = read_s
        if layer.exception() is None:
            pace.record(read_s, nbytes)

    arriving.layers[-1].add_done_callback(note)  # not after `read`: that also copies the cache to faster places
    arriving.read()
