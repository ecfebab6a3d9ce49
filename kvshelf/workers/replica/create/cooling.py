"""Caches that cool are coded smaller, by the rule of a ladder, while the model has no other work.

A cache that nobody has asked for long goes to the smallest rung that is due, else to one before it: where its kind
cannot be coded so, where the blob is not smaller, or where the quality that a creation asked for is not reached. Then
it stays as it is until the next start. A figure of its quality is measured anew where the document is kept; otherwise
it is no figure of this cache any more, and its reason says what it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

from kvshelf.api import Quality
from kvshelf.artifact.blob import PackedBlob
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.identity import Identity
from kvshelf.engine.certify.recheck import Remeasure
from kvshelf.engine.quality import VERSION
from kvshelf.errors import InvalidRequest, KvshelfError, ModelMismatch, PolicyUnsupported, SourceNotKept
from kvshelf.kernels import ans
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.ladder.table import ColdCache
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
_STAYING: Final = 4096
"""Caches that are known to stay on their rung, the newest."""


class Cooling:
    """See the module. Its methods are called on the replica's event loop.

    now: of `time.monotonic`. share: of the time since then that coding may take. pause_s: between two looks whether the
    model has other work.
    """

    def __init__(
        self,
        creations: Creations,
        *,
        now: Callable[[], float] = time.monotonic,
        share: float = _SHARE,
        pause_s: float = 0.05,
    ) -> None:
        self.ladder = Ladder()
        self._engine, self._store, self._scheduler = creations.engine, creations.store, creations.scheduler
        self._threads, self._meter = creations.threads, creations.meter
        self._now, self._share, self._pause_s = now, share, pause_s
        self._began, self._worked_s = now(), 0.0
        self._staying: dict[tuple[str, str], None] = {}
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
            self._task = asyncio.ensure_future(self._run_forever())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run_forever(self) -> None:
        while True:
            try:
                await self.look()
            except KvshelfError as error:
                log.warning("the caches that cool could not be coded smaller", reason=error.message)
            await asyncio.sleep(min(_LOOK_S, self.ladder.rungs[1].after_s / 10))

    async def look(self) -> int:
        """Look through the home once and code what has cooled; returns how many caches. Nothing while another replica
        of this model does it."""
        table, name, count = self._store.ladder, self._engine.name, 0
        term = await self._threads.run(table.take, name)
        if term is None:
            return 0
        caches = table.cold(self.ladder, name)
        while (cold := await self._threads.run(next, caches, _END)) is not _END:
            while not (self._scheduler.idle and self._may_work):
                await asyncio.sleep(self._pause_s)
            await self._threads.run(table.renew, name, term)
            if isinstance(cold, ColdCache) and _rung(cold) not in self._staying:
                count += await asyncio.ensure_future(self._cooled(cold))  # a task of its own: its tenant's turn
        await self._threads.run(table.release, name, term)  # after an error the lease ends by itself
        return count

    @property
    def _may_work(self) -> bool:
        return self._worked_s <= self._share * (self._now() - self._began)

    async def _cooled(self, cold: ColdCache) -> bool:
        """Whether a cache was coded smaller; what fails otherwise than by its rule is tried with the next look."""
        manifest = cold.manifest
        try:
            with called_by(Caller(manifest.tenant)):
                for codec in cold.codecs:
                    smaller = await self._threads.compute(self._coded, manifest, codec)
                    if smaller is None:
                        continue
                    cache, packed = smaller
                    quality = await self._quality(manifest, cache)
                    if _reaches(manifest.min_quality, quality):
                        return await self._replaced(cold, packed, quality)
                self._staying[_rung(cold)] = None
                if len(self._staying) > _STAYING:
                    del self._staying[next(iter(self._staying))]
        except KvshelfError as error:
            log.info("a cache could not be coded smaller", cache_id=manifest.id, reason=error.message)
        return False

    def _coded(self, manifest: Manifest, codec: str) -> tuple[CompressedCache, PackedBlob] | None:
        """The cache and its blob under a codec; None where that cannot be, or is no smaller."""
        began = time.thread_time()
        try:
            stored = whole(self._engine, self._store, manifest.id, manifest.tenant)
            self._engine.identity.require_match(stored.identity.model)
            cache = self._engine.coders.recoded(stored, codec)
        except (InvalidRequest, ModelMismatch, PolicyUnsupported) as error:
            log.info("a cache stays on its rung", cache_id=manifest.id, codec=codec, reason=error.message)
            return None
        finally:
            self._worked_s += time.thread_time() - began
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
        """Of the cache as it is coded now. None where nobody measured or asked for one."""
        former = manifest.quality
        if Codec.parse(cache.codec).name == "lossless" or (former is None and manifest.min_quality is None):
            return former
        try:
            job = await self._threads.compute(
                source_job, self._engine, self._store, manifest, Identity.from_dict(manifest.identity)
            )
        except SourceNotKept:
            measured = None
        else:
            measured = await self._measured(manifest, Remeasure(job, cache))
        return measured or unmeasured(manifest, cache.codec)

    async def _measured(self, manifest: Manifest, work: Remeasure) -> Quality | None:
        """Raises `Cancelled` where another document came first."""
        ticket = self._scheduler.compress(work, tenant=manifest.tenant)
        future = asyncio.wrap_future(ticket.future)
        try:
            while not (await asyncio.wait([future], timeout=self._pause_s))[0]:
                if ticket.begun and self._scheduler.has_documents:  # before, it is one of them
                    ticket.cancel()
            return await future
        finally:
            ticket.cancel()
            self._worked_s += ticket.worked_s


_END: Final[Any] = object()


def _rung(cold: ColdCache) -> tuple[str, str]:
    """A blob, and the smallest codec that is due."""
    return cold.manifest.blob_digest, cold.codecs[0]


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


def _reaches(floor: float | None, quality: Quality | None) -> bool:
    if floor is None:
        return True
    return quality is not None and quality.full and quality.low is not None and quality.low >= floor
