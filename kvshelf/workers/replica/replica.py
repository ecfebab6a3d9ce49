"""One replica: an engine, its scheduler and the store, behind asynchronous methods. Knows no HTTP and no Ray."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvshelf import api
from kvshelf.api.caches import ExportDtype, ExportTo
from kvshelf.api.inspect import KeptOf, KeptTokens
from kvshelf.artifact.identity import Identity
from kvshelf.engine.engine import Engine
from kvshelf.engine.quality import How
from kvshelf.errors import InternalError
from kvshelf.store.base import Store
from kvshelf.store.jobs.metering import Meter
from kvshelf.workers.replica.api import ReplicaApi
from kvshelf.workers.replica.attempts import Attempts
from kvshelf.workers.replica.calls import Caller, ReplicaThreads, called_by
from kvshelf.workers.replica.conversations import Conversations
from kvshelf.workers.replica.create.cooling import Cooling
from kvshelf.workers.replica.create.creations import Creations
from kvshelf.workers.replica.create.spec import document_of
from kvshelf.workers.replica.guard import Guard, GuardRules
from kvshelf.workers.replica.inspect import kept_tokens, require_source
from kvshelf.workers.replica.memory.residents import ResidentLimits, Residents
from kvshelf.workers.replica.questions import Questions
from kvshelf.workers.replica.reading import attached, exported
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.search.searches import Searches

P = ParamSpec("P")
T = TypeVar("T")
PartT = TypeVar("PartT")

STUCK_S = 30.0
"""How long a document may hold the model after its deadline, before its replica is replaced. Late work ends between two
layers, so one layer has taken this long: it hangs, or it blocks the replica for all other callers."""


def _called(
    call: Callable[Concatenate[PartT, P], Coroutine[Any, Any, T]], part: str
) -> Callable[Concatenate[Replica, P], Coroutine[Any, Any, T]]:
    """The call of a part of a replica as the replica's own, with its arguments and its docstring."""

    @wraps(call)
    async def method(self: Replica, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await call(getattr(self, part), *args, **kwargs)

    return method


def _streamed(
    call: Callable[Concatenate[PartT, P], AsyncGenerator[T, None]], part: str
) -> Callable[Concatenate[Replica, P], AsyncIterator[T]]:
    """As `_called`; a generator of its own, because Ray streams nothing else."""

    @wraps(call)
    async def method(self: Replica, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        async with aclosing(call(getattr(self, part), *args, **kwargs)) as events:
            async for event in events:
                yield event

    return method


class Replica(ReplicaApi):
    """The event loop never computes: tokenization and the store run on threads, the model on the scheduler's. Only ids,
    text and numbers leave this process. `start` it on the event loop that will call it, `stop` it once.

    quality, tenant_quality, max_document_tokens: see `Creations`. guard: without it no answer is asked again.
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
        guard: GuardRules | None = None,
    ) -> None:
        self.name = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self.engine = engine
        engine.passes.layer_shapes  # noqa: B018 - measured here, before the scheduler's thread owns the model
        self.store = store
        self.scheduler = scheduler
        self._threads = threads = ReplicaThreads()
        self.meter = meter = Meter(store.metering, engine.name)
        scheduler.spent = meter.spent
        attempts = Attempts(store.requests, self.name, threads)
        self.creations = Creations(
            engine, store, scheduler, threads, attempts, meter, max_document_tokens, quality, tenant_quality or {}
        )
        attach, limits = partial(attached, engine, store), residents or ResidentLimits()
        self.questions = Questions(
            engine,
            store,
            scheduler,
            threads,
            Residents(store, attach, engine.attachments.of_part, limits, threads),
            Conversations(engine, store),
            meter,
            Guard(self.creations, guard or GuardRules()),
        )
        self.cooling = Cooling(self.creations)
        self.searches = Searches(engine, store, scheduler, threads)

    def start(self) -> None:
        self.meter.start()
        self.scheduler.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """End all work; its callers get `NoWorker`."""
        self.scheduler.stop(drain_s=drain_s)
        self.questions.stop()
        self.cooling.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.meter.stop()

    async def check_health(self) -> None:
        """Raise if this replica can no longer work and must be replaced. Called every second, first when it begins."""
        self.cooling.begin()
        if not self.scheduler.alive:
            raise InternalError(f"the scheduler thread of {self.engine.name!r} has ended")
        if self.scheduler.overdue_s > STUCK_S:
            raise InternalError(f"{self.engine.name!r} hangs in a document that should have ended {STUCK_S:g} s ago")

    async def settle(self, *, caller: Caller) -> None:
        """Add what tenants have used to the store now. Raises `StoreUnavailable`; it is then added later."""
        with called_by(caller):
            await self._threads.run(self.meter.flush)

    async def describe(self, *, caller: Caller) -> dict[str, Any]:
        """The model, for /v1/models, its `ModelIdentity`, the shape of its layers, the digest of its transforms, what
        its chat template is, and the bytes that a token stands for at most. JSON types only."""
        with called_by(caller):
            engine = self.engine
            return {
                "id": engine.name,
                "max_tokens": engine.max_tokens,
                "default_layout": engine.encoder.default_layout,
                "fingerprint": engine.identity.fingerprint(),
                "tokenizer": engine.identity.tokenizer,
                "dtype": engine.identity.dtype,
                "chat_template": "none" if engine.text is None else engine.text.about_template,
                "device": ", ".join(map(str, engine.passes.devices.distinct)),
                "identity": asdict(engine.identity),
                "linked": dict(engine.attachments.readable.linked),
                "layer_shapes": engine.passes.layer_shapes,
                "token_bytes": engine.facts.token_bytes,
                "transforms": engine.coders.own.transforms.digest if engine.coders.has_own else "",
            }

    # The calls that a part answers alone. Ray calls them here by these names.
    create = _called(Creations.create, "creations")
    watch = _streamed(Creations.watch, "creations")
    append = _called(Creations.append, "creations")
    estimate = _called(Creations.estimate, "creations")
    query = _called(Questions.query, "questions")
    stream = _streamed(Questions.stream, "questions")
    hint = _called(Questions.hint, "questions")
    count = _called(Questions.count, "questions")
    prompt = _called(Questions.prompt, "questions")
    search = _called(Searches.search, "searches")

    async def warm(self, keys: Sequence[tuple[str, str]], *, caller: Caller) -> api.WarmedReplica:
        warmed = await self.questions.warm(keys, caller=caller)
        return api.WarmedReplica(
            replica=self.name,
            caches=warmed.caches,
            bytes=warmed.nbytes,
            read_bytes=warmed.read_bytes,
            left_out=list(warmed.left_out),
        )

    async def inspect(self, cache_id: str, body: KeptOf | None, *, caller: Caller, first_layer: int = 0) -> KeptTokens:
        """Which tokens of its document a cache kept, see `kvshelf.workers.replica.inspect`. body: the
        caller's own copy of it; None stands for the kept source."""
        with called_by(caller):
            document = None if body is None else document_of(body)
            options: dict[str, Any] = {"tenant": caller.tenant, "first_layer": first_layer}
            return await self._threads.compute(kept_tokens, self.engine, self.store, cache_id, document, **options)

    async def export(
        self, cache_id: str, to: ExportTo, dtype: ExportDtype | None, engine_model: str | None, *, caller: Caller
    ) -> AsyncIterator[bytes]:
        """The file of another engine, piece by piece, see `kvshelf.workers.replica.reading`."""
        with called_by(caller):
            options: dict[str, Any] = {"dtype": dtype, "engine_model": engine_model}
            file = exported(self.engine, self.store, cache_id, to, tenant=caller.tenant, **options)
            while piece := await self._threads.compute(next, file, b""):
                yield piece

    async def require_source(self, identity: Identity, source: str, *, caller: Caller) -> None:
        """Whether a text is a cache's document, see `kvshelf.workers.replica.inspect`."""
        with called_by(caller):
            await self._threads.compute(require_source, self.engine, identity, source)
