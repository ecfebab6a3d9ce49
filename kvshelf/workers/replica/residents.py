"""Attached caches that stay in memory between questions; the least recently used is evicted first.

Each use reads the manifest from the store first, so a cache that was deleted, has expired or was replaced is never
answered from memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.store.artifact.arriving import ArrivingCache
from kvshelf.store.artifact.blob.reading import PartialCache
from kvshelf.store.base import Store
from kvshelf.workers.engine.attention.attachment import Attachment, PartialAttachment
from kvshelf.workers.replica.singleflight import SingleFlight

ResultT = TypeVar("ResultT")

Attach = Callable[[ArrivingCache], Attachment]
AttachPart = Callable[[PartialCache], PartialAttachment | None]
"""As `Engine.attach_part`."""


@dataclass(frozen=True)
class ResidentLimits:
    """All caches together have at most `max_bytes`; one larger cache may be held alone. If memory is full, a question
    waits until others are answered. Caches without a question for `idle_s` seconds are evicted."""

    max_bytes: int = 2 << 30
    idle_s: float = 600.0


@dataclass(eq=False)
class Resident:
    """A cache in memory, or being read. `users`: open questions. `read_s`: seconds of reading and checking all of it, 0
    until that is done, and where questions read it in part. `place`: where it was read from, as
    `ArrivingCache.place`."""

    document: Attachment
    digest: str
    place: str
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)
    read_s: float = 0.0


class _NeverRoom(Exception):
    """The caches that a question holds, and one more that it wants, do not fit into the memory for caches."""


class Residents:
    """The caches that one replica holds, by tenant and id. Its methods run on the replica's event loop; reading and
    everything else that touches the store runs on its threads."""

    def __init__(
        self,
        store: Store,
        attach: Attach,
        attach_part: AttachPart,
        limits: ResidentLimits,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._store = store
        self._attach = attach
        self._attach_part = attach_part
        self._limits = limits
        self._threads = threads
        # Readers have threads of their own, so that calls waiting for memory never block the calls that free it.
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="reader")
        self._held: OrderedDict[tuple[str, str], Resident] = OrderedDict()
        self._opening: SingleFlight[Resident] = SingleFlight()
        self._freed = asyncio.Condition()
        self._taking = asyncio.Lock()
        # By the cache that the question with several waits for: bytes of those that it holds meanwhile.
        self._beside: dict[tuple[str, str], int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all resident caches."""
        return sum(resident.document.nbytes for resident in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    @asynccontextmanager
    async def using_all(
        self, cache_ids: Sequence[str], tenant: str, *, part: bool = False
    ) -> AsyncIterator[list[tuple[Resident, bool]]]:
        """The caches of one question, each as `using` gives it; they are read side by side.

        Only one question at a time takes several: of two that hold some each, neither would get room for the rest.
        Where there are several, errors name theirs in `details["cache_id"]`. Raises as `using`, and `InvalidRequest`
        for caches that do not fit into memory together.
        """
        held: list[tuple[Resident, bool]] = []
        async with AsyncExitStack() as stack:
            async with self._taking if len(cache_ids) > 1 else nullcontext():
                for cache_id in cache_ids:
                    beside = sum(resident.document.nbytes for resident, _ in held)
                    try:
                        using = self.using(cache_id, tenant, part=part, beside=beside)
                        held.append(await stack.enter_async_context(using))
                    except _NeverRoom:
                        raise InvalidRequest(
                            f"of the {len(cache_ids)} documents of this question, {len(held)} take {beside} bytes in "
                            f"memory, and with the next the {self._limits.max_bytes} of this worker are not enough; "
                            "ask fewer at once",
                            param="cache_ids",
                        ) from None
                    except KvshelfError as error:
                        if len(cache_ids) > 1:
                            error.details["cache_id"] = cache_id
                        raise
            yield held

    @asynccontextmanager
    async def using(
        self, cache_id: str, tenant: str, *, part: bool = False, beside: int = 0
    ) -> AsyncIterator[tuple[Resident, bool]]:
        """The cache for the length of a block, and whether it was in memory already.

        It may still be arriving; a layer that cannot be read raises where it is used. part: the question reads what it
        selects, so that a cache that is not in memory is not read ahead. beside: bytes of the caches that the same
        question holds. Raises what `Store.open_cache` raises, and `ModelMismatch`.
        """
        resident, there = await self._acquire(cache_id, tenant, part, beside)
        try:
            yield resident, there
        finally:
            resident.users -= 1
            resident.last_used = time.monotonic()
            if resident.document.failed:
                self._drop((tenant, cache_id), resident)
            if self._held.get((tenant, cache_id)) is not resident:
                self._close(resident)
            async with self._freed:
                self._freed.notify_all()

    async def evict_idle_forever(self) -> NoReturn:
        """Evict idle caches, for as long as this task lives."""
        while True:
            await asyncio.sleep(min(self._limits.idle_s / 4, 30.0))
            self.evict_idle(time.monotonic() - self._limits.idle_s)

    def evict_idle(self, last_used_before: float) -> int:
        """Drop unused caches that were last used before this time of `time.monotonic`. Returns how many."""
        idle = [(k, r) for k, r in self._held.items() if not r.users and r.last_used < last_used_before]
        for key, resident in idle:
            self._drop(key, resident)
        return len(idle)

    def close(self) -> None:
        """Drop everything."""
        for key, resident in list(self._held.items()):
            self._drop(key, resident)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _acquire(self, cache_id: str, tenant: str, part: bool, beside: int) -> tuple[Resident, bool]:
        key, there = (tenant, cache_id), True
        while True:
            resident = self._held.get(key)
            if resident is None:
                there = False
                try:
                    async with self._holding(beside, key):
                        name = f"{tenant}/{cache_id}"
                        _, began = await self._opening.join(name, lambda: self._open(cache_id, tenant, part))
                except _NeverRoom:
                    if beside:
                        raise
                    continue  # it was another question that holds too much
                if not began:  # the call read the manifest before this question came, so ask the store again
                    continue
                # Taken from the table, not from the shared call: another cache may have needed its room meanwhile.
                resident = self._held.get(key)
            elif not await self._current(key, resident):
                self._drop(key, resident)
                continue
            elif self._held.get(key) is not resident:  # it was dropped while the store was asked
                continue
            if resident is not None:
                self._held.move_to_end(key)
                resident.users += 1
                return resident, there

    @asynccontextmanager
    async def _holding(self, beside: int, key: tuple[str, str]) -> AsyncIterator[None]:
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

    async def _current(self, key: tuple[str, str], resident: Resident) -> bool:
        """Whether a resident cache is still what the shelf has. Raises as `Store.stat` does."""
        tenant, cache_id = key
        manifest = await self._off_loop(lambda: self._store.stat(cache_id, tenant=tenant))
        return resident.digest == manifest.blob_digest and not resident.document.failed

    async def _open(self, cache_id: str, tenant: str, part: bool) -> Resident:
        opened = await self._opened_part(cache_id, tenant) if part else None
        if opened is not None:
            return opened
        arriving = await self._off_loop(lambda: self._store.open_cache(cache_id, tenant=tenant))
        try:
            document = await self._off_loop(lambda: self._attach(arriving))
            await self._make_room(arriving.attached_bytes, (tenant, cache_id))
        except BaseException:
            arriving.close()
            raise
        resident = Resident(document, arriving.root.hex(), arriving.place)
        self._held[tenant, cache_id] = resident
        self._readers.submit(_read, arriving, resident)
        return resident

    async def _opened_part(self, cache_id: str, tenant: str) -> Resident | None:
        """A cache of which questions read what they select; None if it has to be read as a whole."""
        cache = await self._off_loop(lambda: self._store.open_parts(cache_id, tenant=tenant))
        try:
            document = await self._off_loop(lambda: self._attach_part(cache))
            if document is not None:
                await self._make_room(cache.attached_bytes, (tenant, cache_id))
                resident = self._held[tenant, cache_id] = Resident(document, cache.root.hex(), cache.place)
                return resident
        except BaseException:
            cache.close()
            raise
        cache.close()
        return None

    async def _make_room(self, nbytes: int, key: tuple[str, str]) -> None:
        async with self._freed:
            while self._held and self.nbytes + nbytes > self._limits.max_bytes:
                beside = self._beside.get(key, 0)
                if beside and beside + nbytes > self._limits.max_bytes:
                    raise _NeverRoom
                idle = next(((key, held) for key, held in self._held.items() if not held.users), None)
                if idle is None:
                    await self._freed.wait()
                else:
                    self._drop(*idle)

    def _drop(self, key: tuple[str, str], resident: Resident) -> None:
        if self._held.get(key) is resident:
            del self._held[key]
            self._close(resident)

    def _close(self, resident: Resident) -> None:
        """Free what a cache that is no longer held keeps open, once nobody uses it."""
        if not resident.users:
            resident.document.close()

    async def _off_loop(self, call: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _read(arriving: ArrivingCache, resident: Resident) -> None:
    started = time.monotonic()

    def note(_: object) -> None:
        resident.read_s = time.monotonic() - started

    arriving.layers[-1].add_done_callback(note)  # not after `read`: that also copies the cache to faster places
    arriving.read()
