"""Creating caches: documents compressed once and stored, or found on the shelf. `Replica` hands them over to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from kvshelf.errors import CacheError, CacheNotFound
from kvshelf.store.base import Store
from kvshelf.store.identity import canonical_json
from kvshelf.store.manifest import Manifest, Timings
from kvshelf.workers.attempts import Attempts
from kvshelf.workers.calls import Threads, log_as, named_errors
from kvshelf.workers.engine import Engine
from kvshelf.workers.estimates import Rates, estimate
from kvshelf.workers.flights import Flights
from kvshelf.workers.intake import Document
from kvshelf.workers.job import Job
from kvshelf.workers.phases import Phase, in_sequence, rounded
from kvshelf.workers.scheduler import Scheduler

log = structlog.get_logger("kvshelf.workers")


@dataclass(frozen=True)
class Created:
    """A stored cache, and whether it was on the shelf already. `manifest` has JSON types only.

    phases: of the work, where there was any: queue, prefill, compress, store, told one after the other although prefill
    and compress take turns.
    """

    manifest: dict[str, Any]
    existing: bool
    phases: tuple[Phase, ...] = ()


class Creations:
    """What one replica creates. `worker` is its name in the ledger."""

    def __init__(self, engine: Engine, store: Store, scheduler: Scheduler, threads: Threads, worker: str) -> None:
        self._engine = engine
        self._store = store
        self._scheduler = scheduler
        self._threads = threads
        self._attempts = Attempts(store.ledger, worker, threads)
        self._flights: Flights[Created] = Flights()
        self._rates = Rates()

    async def create(
        self,
        spec: Mapping[str, Any],
        *,
        tenant: str,
        deadline_s: float | None = None,
        request_id: str | None = None,
        origin: str = "",
    ) -> Created:
        """Compress what `spec` describes (the fields of `CreateCache`) and store it, unless the shelf has it.

        With `request_id`, a request of the ledger, the attempt is counted there before any work, and its end recorded.
        """
        log_as(origin)
        if request_id is None:
            with named_errors():
                return await self._create(spec, tenant, deadline_s)
        self._scheduler.require_room()  # a full queue is no attempt
        async with self._attempts.counted(request_id, tenant) as attempt:
            with named_errors():
                created = await self._create(spec, tenant, deadline_s)
            finish = self._store.ledger.finish
            await self._threads.run(finish, request_id, attempt, cache_ids=[created.manifest["id"]])
            return created

    async def estimate(self, spec: Mapping[str, Any], *, origin: str = "") -> dict[str, Any]:
        """What creating this would take, see `estimates.estimate`: in seconds as this replica has measured them."""
        log_as(origin)
        with named_errors():
            return await self._threads.run(estimate, self._engine, self._rates, _document(spec), spec)

    async def _create(self, spec: Mapping[str, Any], tenant: str, deadline_s: float | None) -> Created:
        job = await self._threads.run(_prepare, self._engine, spec)
        cache_id = self._store.cache_id(job.identity, tenant=tenant, codec=spec["codec"])
        created, began = await self._flights.join(
            cache_id, lambda: self._compress(cache_id, job, spec, tenant, deadline_s)
        )
        if created.existing or not began:
            manifest = await self._threads.run(_as_asked, self._store, created.manifest, spec)
            return Created(manifest, existing=True)
        return created

    async def _compress(
        self, cache_id: str, job: Job, spec: Mapping[str, Any], tenant: str, deadline_s: float | None
    ) -> Created:
        try:
            manifest = await self._threads.run(self._store.stat, cache_id, tenant=tenant)
            return Created(_plain(manifest), existing=True)
        except (CacheNotFound, CacheError):
            pass  # not there, or there and of no use any more: `put` replaces it
        await self._threads.run(self._store.admit, tenant)
        ticket = self._scheduler.compress(job, deadline_s=deadline_s)
        try:
            compression = await asyncio.wrap_future(ticket.future)
        finally:
            ticket.cancel()
        manifest = await self._threads.run(
            self._store.put,
            compression.cache,
            codec=spec["codec"],
            tenant=tenant,
            ttl_s=spec["ttl_s"],
            expires_at=spec["expires_at"],
            labels=spec["labels"],
            name=spec["name"],
            timings=Timings(queue_s=ticket.queue_s, prefill_s=compression.prefill_s, compress_s=compression.compress_s),
            source=_source(spec),
        )
        took = manifest.timings
        self._rates.add(manifest.policy, manifest.num_tokens, took)
        phases = in_sequence(queue=took.queue_s, prefill=took.prefill_s, compress=took.compress_s, store=took.store_s)
        log.info(
            "compressed", cache_id=cache_id, tokens=manifest.num_tokens, kept=manifest.kept_tokens, **rounded(phases)
        )
        return Created(_plain(manifest), existing=False, phases=phases)


def _prepare(engine: Engine, spec: Mapping[str, Any]) -> Job:
    return engine.prepare(
        _document(spec),
        layout=spec["layout"],
        policy=spec["policy"],
        compression_ratio=spec["compression_ratio"],
        budget_tokens=spec["budget_tokens"],
        policy_params=spec["policy_params"],
        expected_questions=spec["expected_questions"],
    )


def _document(spec: Mapping[str, Any]) -> Document:
    found: Document = next(spec[name] for name in ("document", "messages", "token_ids") if spec[name] is not None)
    return found


def prolonged(store: Store, manifest: Manifest, ttl_s: float | None, expires_at: float | None) -> Manifest:
    """A cache that is there already lives at least as long as its newest request asks; never shorter."""
    have, want = manifest.expires_at, store.expiry(ttl_s, expires_at)
    if have is None or (want is not None and want <= have):
        return manifest
    return store.update(manifest.id, tenant=manifest.tenant, expires_at=want)


def _as_asked(store: Store, plain: dict[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """A cache that is there already, with what its newest request wants besides: more time, its source kept."""
    manifest = prolonged(store, Manifest.model_validate(plain), spec["ttl_s"], spec["expires_at"])
    source = _source(spec)
    if source is not None and not manifest.has_source:
        manifest = store.keep_source(manifest.id, source, tenant=manifest.tenant)
    return _plain(manifest)


def _source(spec: Mapping[str, Any]) -> str | None:
    """What is kept beside the cache as its document: the text, or the messages as JSON. None: nothing is to be kept."""
    if not spec["keep_source"]:
        return None
    document: str | None = spec["document"]
    return document if document is not None else canonical_json(spec["messages"])


def _plain(manifest: Manifest) -> dict[str, Any]:
    return manifest.model_dump(mode="json")
