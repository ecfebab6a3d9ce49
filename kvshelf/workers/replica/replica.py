"""One replica: an engine, its scheduler and the store, behind asynchronous methods. Knows no HTTP and no Ray.

The event loop never computes: tokenization and the store run on threads, the model on the scheduler's. Keys and values
go from here to the store and back; only ids, text and numbers leave this process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from kvshelf.api.inspect import KeptOf, KeptTokens
from kvshelf.artifact.identity import Identity
from kvshelf.engine.engine import Engine
from kvshelf.engine.quality import How
from kvshelf.errors import InternalError
from kvshelf.store.base import Store
from kvshelf.store.jobs.meter import Meter
from kvshelf.workers.replica.attempts import Attempts
from kvshelf.workers.replica.calls import ReplicaThreads, called_as
from kvshelf.workers.replica.conversations import Conversations
from kvshelf.workers.replica.create.creations import Creations
from kvshelf.workers.replica.create.spec import document_of
from kvshelf.workers.replica.inspect import kept_tokens, require_source
from kvshelf.workers.replica.questions import Questions
from kvshelf.workers.replica.reading import attached
from kvshelf.workers.replica.residents import ResidentLimits, Residents
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.search.searches import Searches

STUCK_S = 30.0
"""How long a document may hold the model after its deadline, before its replica is replaced. Late work ends between two
layers, so one layer has taken this long: it hangs, or it blocks the replica for all other callers."""


class Replica:
    """See the module. `start` it on the event loop that will call it, `stop` it once.

    create, watch, append, estimate, quality, tenant_quality, max_document_tokens: see `Creations`. query, stream, hint,
    count, prompt: see `Questions`. search: see `Searches`. origin: the id under which the caller logs the request; log
    lines here carry it, too.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        scheduler: Scheduler,
        residents: ResidentLimits | None = None,
        *,
        quality: How = "fast",
        tenant_quality: Mapping[str, How] | None = None,
        max_document_tokens: int | None = None,
    ) -> None:
        self.name = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self._engine = engine
        engine.layer_shapes  # noqa: B018 - measured here, before the scheduler's thread owns the model
        self._store = store
        self._scheduler = scheduler
        self._threads = threads = ReplicaThreads()
        self._meter = meter = Meter(store.metering, engine.name)
        scheduler.spent = meter.spent
        attempts = Attempts(store.requests, self.name, threads)
        self._creations = Creations(
            engine, store, scheduler, threads, attempts, meter, max_document_tokens, quality, tenant_quality or {}
        )
        self.create, self.watch = self._creations.create, self._creations.watch
        self.estimate, self.append = self._creations.estimate, self._creations.append
        limits = residents or ResidentLimits()
        held = Residents(store, partial(attached, engine, store), engine.attach_part, limits, threads)
        conversations = Conversations(engine, store)
        self._questions = Questions(engine, store, scheduler, threads, held, conversations, meter)
        self.query, self.stream = self._questions.query, self._questions.stream
        self.hint, self.count = self._questions.hint, self._questions.count
        self.prompt = self._questions.prompt
        self._searches = Searches(engine, store, scheduler, threads)
        self.search = self._searches.search

    def start(self) -> None:
        self._meter.start()
        self._scheduler.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """End all work; its callers get `NoWorker`."""
        self._scheduler.stop(drain_s=drain_s)
        self._questions.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._meter.stop()

    async def check_health(self) -> None:
        """Raise if this replica can no longer work and must be replaced."""
        if not self._scheduler.alive:
            raise InternalError(f"the scheduler thread of {self._engine.name!r} has ended")
        if self._scheduler.overdue_s > STUCK_S:
            raise InternalError(f"{self._engine.name!r} hangs in a document that should have ended {STUCK_S:g} s ago")

    async def settle(self, *, origin: str = "") -> None:
        """Add what tenants have used to the store now. Raises `StoreUnavailable`; it is then added later."""
        with called_as(origin):
            await self._threads.run(self._meter.flush)

    async def describe(self, *, origin: str = "") -> dict[str, Any]:
        """The model, for /v1/models, its `ModelIdentity`, the shape of its layers, the digest of its transforms, what
        its chat template is, and the bytes that a token stands for at most. JSON types only."""
        with called_as(origin):
            engine = self._engine
            return {
                "id": engine.name,
                "max_tokens": engine.max_tokens,
                "default_layout": engine.default_layout,
                "fingerprint": engine.identity.fingerprint(),
                "tokenizer": engine.identity.tokenizer,
                "dtype": engine.identity.dtype,
                "chat_template": "none" if engine.text is None else engine.text.about_template,
                "device": ", ".join(map(str, engine.passes.devices.each)),
                "identity": asdict(engine.identity),
                "layer_shapes": engine.layer_shapes,
                "token_bytes": engine.token_bytes,
                "transforms": engine.coder.transforms.digest if engine.has_transforms else "",
            }

    async def inspect(
        self, cache_id: str, body: KeptOf | None, *, tenant: str, first_layer: int = 0, origin: str = ""
    ) -> KeptTokens:
        """Which tokens of its document a cache kept, see `kvshelf.workers.replica.inspect`. body: the
        caller's own copy of it; None stands for the kept source."""
        with called_as(origin, tenant):
            document = None if body is None else document_of(body)
            return await self._threads.compute(
                kept_tokens, self._engine, self._store, cache_id, document, tenant=tenant, first_layer=first_layer
            )

    async def require_source(self, identity: Identity, source: str, *, tenant: str, origin: str = "") -> None:
        """Whether a text is a cache's document, see `kvshelf.workers.replica.inspect`."""
        with called_as(origin, tenant):
            await self._threads.compute(require_source, self._engine, identity, source)
