"""Caches that cool are coded smaller, by the rule of a ladder, while the model has no other work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

from kvshelf import errors
from kvshelf.api import Quality
from kvshelf.artifact.blob import PackedBlob
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.identity import Identity
from kvshelf.engine.certify.recheck import Remeasure
from kvshelf.engine.quality import VERSION
from kvshelf.kernels import ans
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.ladder.table import LEASE_S, ColdCache
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.calls import Caller, called_by
from kvshelf.workers.replica.create.creations import Creations
from kvshelf.workers.replica.inspect import source_job
from kvshelf.workers.replica.reading import whole

log = structlog.get_logger("kvshelf.workers")

_SHARE: Final = 0.05
"""Of a replica's time."""
_LOOK_S: Final = 600.0
"""Seconds between two looks through the home; a tenth of the first rung's age where that is less."""
_STAYING: Final = 65_536
"""Caches that are known to stay on their rung; with so many of them the ladder rests until the next start."""
_CREDIT_S: Final = 3600.0
"""How much of the time without cold caches counts for the share."""
_PASSING: Final = (errors.Cancelled, errors.QueueFull, errors.NoWorker, errors.OutOfMemory, errors.StoreUnavailable)
"""Errors of the moment."""


class Cooling:
    """A cache that nobody has asked for long goes to the smallest rung that is due, else to one before it: where its
    kind cannot be coded so, the blob is not smaller, or the quality that a creation asked for is not reached. Then, and
    after an error that is its own, it stays as it is until the next start. All methods run on the replica's event loop.

    now: of `time.monotonic`, for the share of the time since then that coding may take. pause_s: between two looks
    whether the model has other work. renew_s: between two renewals of the lease.
    """

    def __init__(
        self,
        creations: Creations,
        *,
        now: Callable[[], float] = time.monotonic,
        share: float = _SHARE,
        pause_s: float = 0.05,
        renew_s: float = LEASE_S / 3,
    ) -> None:
        self.ladder = Ladder()
        self._engine, self._store, self._scheduler = creations.engine, creations.store, creations.scheduler
        self._threads, self._meter = creations.threads, creations.meter
        self._require_room = creations.require_room
        self._now, self._share, self._pause_s = now, share, pause_s
        self._renew_s = renew_s
        self._seen, self._credit_s = now(), 0.0
        self._term: int | None = None
        self._renewed = 0.0
        self._staying: set[tuple[str, str, str, float | None]] = set()
        self._task: asyncio.Task[None] | None = None

    def follow(self, ladder: Ladder) -> None:
        """Code by this ladder. Raises `PolicyUnsupported` for one with `klt` and a model without transforms."""
        if any(Codec.parse(rung.codec).name == "klt" for rung in ladder.rungs):
            ans.require_encoder()
            self._engine.coders.own  # noqa: B018 - raises where there are none
        self.ladder = ladder

    def begin(self) -> None:
        """Look for cold caches from now on; nothing without a ladder, or where it does so already."""
        if self.ladder.rungs and self._task is None:

            async def look_forever() -> None:
                while True:
                    try:
                        await self.look()
                    except Exception as error:  # the next look may do better, whatever it is
                        log.warning("the caches that cool could not be coded smaller", reason=str(error), exc_info=True)
                    await asyncio.sleep(min(_LOOK_S, self.ladder.rungs[1].after_s / 10))

            self._task = asyncio.ensure_future(look_forever())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def look(self) -> int:
        """Look through the home once and code what has cooled; returns how many caches. Nothing while another replica
        of this model does it."""
        table, model, count = self._store.ladder, self._engine.identity.fingerprint(), 0
        self._term, self._renewed = await self._threads.run(table.take, model), time.monotonic()
        caches = table.cold(self.ladder, model)
        while self._term is not None and (cold := await self._threads.run(next, caches, _END)) is not _END:
            if len(self._staying) >= _STAYING:
                log.warning("the ladder rests until the next start", staying=len(self._staying))
                break
            while await self._has_lease() and not (self._scheduler.idle and self._may_work):
                await asyncio.sleep(self._pause_s)
            if self._term is not None and isinstance(cold, ColdCache) and _rung(cold) not in self._staying:
                count += await asyncio.ensure_future(self._cooled(cold))  # a task of its own: its tenant's turn
        if self._term is not None:
            await self._threads.run(table.release, model, self._term)  # after an error the lease ends by itself
        return count

    async def _has_lease(self) -> bool:
        """Whether the ladder is still this replica's: renews the lease in time."""
        if self._term is not None and time.monotonic() - self._renewed >= self._renew_s:
            try:
                await self._threads.run(self._store.ladder.renew, self._engine.identity.fingerprint(), self._term)
                self._renewed = time.monotonic()
            except errors.StateConflict:
                self._term = None
        return self._term is not None

    @property
    def _may_work(self) -> bool:
        now = self._now()
        self._credit_s = min(self._credit_s + self._share * (now - self._seen), self._share * _CREDIT_S)
        self._seen = now
        return self._credit_s >= 0

    async def _cooled(self, cold: ColdCache) -> bool:
        """Whether a cache was coded smaller. What an error of the moment kept is tried with the next look."""
        manifest, began = cold.manifest, time.monotonic()
        try:
            with called_by(Caller(manifest.tenant)):
                if not await self._threads.run(self._store.ladder.is_cold, cold):
                    return False
                for codec in cold.codecs:
                    smaller = await self._threads.compute(self._coded, manifest, codec)
                    if smaller is None:
                        continue
                    cache, packed = smaller
                    quality = await self._quality(manifest, cache)
                    floor, low = manifest.min_quality, None if quality is None or not quality.full else quality.low
                    reached = floor is None or (low is not None and low >= floor)
                    if reached or Codec.parse(codec).name == "lossless":
                        return await self._has_lease() and await self._replaced(cold, packed, quality)
            self._staying.add(_rung(cold))
        except _PASSING as error:
            log.info("a cache could not be coded smaller", cache_id=manifest.id, reason=error.message)
        except Exception as error:  # one cache's error is its own, whatever it is
            self._staying.add(_rung(cold))
            log.warning("a cache cannot be coded smaller", cache_id=manifest.id, reason=str(error), exc_info=True)
        finally:
            self._credit_s -= time.monotonic() - began
        return False

    def _coded(self, manifest: Manifest, codec: str) -> tuple[CompressedCache, PackedBlob] | None:
        """The cache and its blob under a codec; None where that cannot be, or is no smaller."""
        try:
            stored = whole(self._engine, self._store, manifest.id, manifest.tenant)
            self._engine.identity.require_match(stored.identity.model)
            cache = self._engine.coders.recoded(stored, codec)
        except (errors.InvalidRequest, errors.ModelMismatch, errors.PolicyUnsupported) as error:
            log.info("a cache stays on its rung", cache_id=manifest.id, codec=codec, reason=error.message)
            return None
        packed = cache.pack()
        if packed.nbytes >= manifest.bytes_stored:
            return None
        if cache.identity.transforms:
            transforms = self._engine.coders.own.transforms
            self._store.transforms.keep(transforms.digest, transforms.data)
        return cache, packed

    async def _replaced(self, cold: ColdCache, packed: PackedBlob, quality: Quality | None) -> bool:
        manifest = cold.manifest
        if not await self._threads.run(self._store.ladder.replace, cold, packed, quality):
            return False
        saved = manifest.bytes_stored - packed.nbytes
        self._meter.add(manifest.tenant, recoded=1, recoded_bytes=saved)
        about = {"cache_id": manifest.id, "was": manifest.codec, "codec": packed.header.codec}
        log.info("a cache that has cooled is coded smaller", saved_bytes=saved, **about)
        return True

    async def _quality(self, manifest: Manifest, cache: CompressedCache) -> Quality | None:
        """The quality of the cache as it is coded now. None where nobody measured or asked for one."""
        former = manifest.quality
        if Codec.parse(cache.codec).name == "lossless" or (former is None and manifest.min_quality is None):
            return former
        try:
            job = await self._threads.compute(
                source_job, self._engine, self._store, manifest, Identity.from_dict(manifest.identity)
            )
            await self._threads.compute(self._require_room, job)
        except (errors.DocumentTooLong, errors.SourceNotKept, errors.StateConflict):
            # Or what is kept is read as another document now.
            measured = None
        else:
            measured = await self._measured(manifest, Remeasure(job, cache))
        return measured or unmeasured(manifest, cache.codec)

    async def _measured(self, manifest: Manifest, work: Remeasure) -> Quality | None:
        """Raises `Cancelled` where another document came first, or the lease was lost."""
        ticket = self._scheduler.compress(work, tenant=manifest.tenant)
        future = asyncio.wrap_future(ticket.future)
        try:
            while not (await asyncio.wait([future], timeout=self._pause_s))[0]:
                others = ticket.begun and self._scheduler.has_documents  # before, it is one of them
                if others or not await self._has_lease():
                    ticket.cancel()
            return await future
        finally:
            ticket.cancel()
            self._meter.add(manifest.tenant, recoded_s=ticket.worked_s)


_END: Final[Any] = object()


def _rung(cold: ColdCache) -> tuple[str, str, str, float | None]:
    """A tenant's blob, the smallest codec that is due, and what decides whether it may have that."""
    manifest = cold.manifest
    return manifest.tenant, manifest.blob_digest, cold.codecs[0], manifest.min_quality


def unmeasured(manifest: Manifest, codec: str) -> Quality | None:
    """What is known of a quality that was measured under the codec before; nothing that meets a `min_quality`."""
    former = manifest.quality
    if former is None:
        return None
    about = former.reason if former.agreement is None else f"{former.agreement:.3f} under codec {manifest.codec}"
    reason = f"{about}, and not measured since it was coded as {codec}"
    return Quality(
        agreement=None, low=None, high=None, worst=None, cues=0, reason=reason, kl=0.0, probe_s=0.0, version=VERSION
    )
