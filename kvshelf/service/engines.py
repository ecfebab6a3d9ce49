"""A model's replicas as routes call them, and which served model can answer from stored caches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from opentelemetry.trace import Status, StatusCode, Tracer

from kvshelf.api import (
    AppendCache,
    Asking,
    CreateCache,
    CreationProgress,
    Estimate,
    EstimateObject,
    SearchCaches,
    WarmedReplica,
)
from kvshelf.api.answers import Answer, Phase, Piece
from kvshelf.api.queries import AskShelf
from kvshelf.artifact.identity import Boundary, ModelIdentity
from kvshelf.errors import InvalidRequest, KvshelfError, ModelMismatch, RequestTimeout
from kvshelf.service.observe.logs import note
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.observe.questions import result_of
from kvshelf.service.observe.tracing import add_phases
from kvshelf.service.settings import Settings
from kvshelf.store.manifest import Manifest
from kvshelf.workers.cluster.remote import RemoteEngine
from kvshelf.workers.cluster.served import ServedModel, served_model
from kvshelf.workers.replica.api import Created, ReplicaApi, SearchResult
from kvshelf.workers.replica.calls import Caller, relayed
from kvshelf.workers.replica.fair_queue import FairQueue
from kvshelf.workers.replica.memory.retention import Hint

log = logging.getLogger("kvshelf.service")

Trace = Callable[[Sequence[Phase]], None]

CREATIONS_PER_REPLICA = 2
"""One document is being prefilled while the next is tokenized and the last one stored."""

ESTIMATES_PER_REPLICA = 2
"""One document is being tokenized while the next is on its way."""

HINT_S = 2.0
"""How long the answer to a request waits for replicas to take a hint."""

MAX_UNREAD_PIECES = 1024
"""Pieces of a streamed answer that may wait for a slow client before its question is given up."""


@dataclass(eq=False)
class EngineClient:
    """Calls the replicas of one model in fair turns of tenants; a caller's deadline includes the waiting.

    There are as many slots as requests that the replicas can work on at once. Requests queue here, so that
    tenants take turns over all replicas. Each call is counted, timed, traced, and noted for the log;
    `spend` receives the number of tokens that were prefilled and generated for a tenant.
    """

    remote: RemoteEngine
    settings: InitVar[Settings]
    metrics: Metrics
    tracer: Tracer
    spend: Callable[[str, int], None] = lambda *_: None

    def __post_init__(self, settings: Settings) -> None:
        self.model, self.parent = self.remote.model, self.remote.parent
        self._hinting: set[asyncio.Task[None]] = set()
        replicas, waiting = settings.replicas, settings.max_queued_requests
        questions = replicas * min(settings.max_open_generations, settings.max_ongoing_requests)
        self._queues = {
            "question": FairQueue(f"questions to {self.model!r}", questions, waiting),
            "creation": FairQueue(f"creations by {self.model!r}", CREATIONS_PER_REPLICA * replicas, waiting),
            "estimate": FairQueue(f"estimates by {self.model!r}", ESTIMATES_PER_REPLICA * replicas, waiting),
        }

    @property
    def waiting(self) -> dict[str, int]:
        return {kind: queue.waiting for kind, queue in self._queues.items()}

    async def estimate(self, spec: Estimate, *, caller: Caller) -> EstimateObject:
        """Costs the document's tokens, as its tokens are made."""
        self.remote.require_bounded(spec)
        async with self._queued("estimate", caller) as left_s:
            estimated = await self.remote.call_within(left_s, ReplicaApi.estimate, spec, caller=caller)
        self.spend(caller.tenant, estimated.tokens)
        return estimated

    async def count(
        self,
        query: Asking,
        document: str | None,
        boundary: Boundary | None,
        cached: Mapping[str, Any],
        *,
        caller: Caller,
    ) -> int:
        """As `kvshelf.engine.tools.tools.count`; takes the turn of a question, and costs what it counts."""
        self.remote.require_bounded(query, document)
        async with self._queued("question", caller) as left_s:
            counted = await self.remote.call_within(
                left_s, ReplicaApi.count, query, document, boundary, cached, caller=caller
            )
        self.spend(caller.tenant, counted)
        return counted

    async def create(self, spec: CreateCache, *, caller: Caller, **recorded: Any) -> Created:
        """A recorded request (`request_id`, `max_attempts`) skips the queue: it has waited in the background."""
        self.remote.require_bounded(spec)
        turn = nullcontext(caller.deadline_s) if recorded else self._queued("creation", caller)
        async with turn as left_s:
            with self.metrics.creating(self.model, spec.policy), self._observed("create") as trace:
                created = await self.remote.call(ReplicaApi.create, spec, caller=caller.within(left_s), **recorded)
                trace(created.phases)
        self._created(created, spec.policy, caller.tenant)
        return created

    async def append(self, cache_id: str, spec: AppendCache, policy: str, *, caller: Caller) -> Created:
        """policy: that reduces what is appended, for the metrics."""
        self.remote.require_bounded(spec)
        async with self._queued("creation", caller) as left_s:
            with self.metrics.creating(self.model, policy), self._observed("append") as trace:
                created = await self.remote.call(ReplicaApi.append, cache_id, spec, caller=caller.within(left_s))
                trace(created.phases)
        self._created(created, policy, caller.tenant)
        return created

    def watch(self, spec: CreateCache, *, caller: Caller) -> AsyncGenerator[CreationProgress | Created, None]:
        """As `create`, with events while it goes on, and last the creation. A slow reader holds no slot."""
        self.remote.require_bounded(spec)

        async def fetch(events: asyncio.Queue[CreationProgress | Created | None]) -> None:
            async with self._queued("creation", caller) as left_s:
                with self.metrics.creating(self.model, spec.policy), self._observed("create") as trace:
                    progress = self.remote.stream(ReplicaApi.watch, spec, caller=caller.within(left_s))
                    async with aclosing(progress):
                        async for event in progress:
                            if isinstance(event, Created):
                                trace(event.phases)
                                self._created(event, spec.policy, caller.tenant)
                            events.put_nowait(event)

        return relayed(fetch)

    def _created(self, created: Created, policy: str, tenant: str) -> None:
        self.metrics.created(self.model, policy, created)
        note(cache_id=created.manifest.id, tokens=created.manifest.num_tokens, existing=created.existing)
        if len(created.caches) > 1:
            note(caches=len(created.caches))
        self.spend(tenant, created.prefilled_tokens)

    async def hint(self, hints: Sequence[Hint], *, caller: Caller) -> None:
        """Tell every replica when the next questions on caches come. A replica that cannot be told reads a cache with
        its question, as without a hint."""
        try:
            replica_counts = await self.remote.broadcast(HINT_S, ReplicaApi.hint, hints, caller=caller)
        except KvshelfError as error:
            note(hint=error.code)
            return
        for counts in replica_counts:
            self.metrics.remembered(self.model, counts)

    def foretell(self, hints: Sequence[Hint], *, caller: Caller) -> None:
        """As `hint`, in the background: no answer waits for it or fails with it."""
        task = asyncio.ensure_future(self.hint(hints, caller=caller))
        self._hinting.add(task)
        task.add_done_callback(self._end_hint)

    def _end_hint(self, task: asyncio.Task[None]) -> None:
        self._hinting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("replicas of %s could not be told of the next questions", self.model, exc_info=error)

    async def warm(self, keys: Sequence[tuple[str, str]], *, caller: Caller) -> list[WarmedReplica]:
        """Have caches, by tenant and id, in the memory of every replica, see `Residents.warm`."""
        assert caller.deadline_s is not None
        warmed = await self.remote.broadcast(caller.deadline_s, ReplicaApi.warm, keys, caller=caller)
        return [replica.model_copy(update={"model": self.model}) for replica in warmed]

    async def search(self, spec: SearchCaches, *, caller: Caller) -> SearchResult:
        """Which documents hold the words of a question; takes the turn of one."""
        self.remote.require_bounded(spec)
        with self.metrics.searching(self.model):
            async with self._turn("search", caller) as (left_s, trace):
                hits = await self.remote.call(ReplicaApi.search, spec, caller=caller.within(left_s))
                trace(hits.phases)
        self.metrics.searched(self.model, hits)
        self.spend(caller.tenant, hits.prefill_tokens)
        note(searched=hits.searched, prefill_tokens=hits.prefill_tokens)
        return hits

    async def query(
        self, caches: str | Sequence[str], query: Asking, *, caller: Caller, on_turn: Callable[[], None] = lambda: None
    ) -> list[Answer]:
        """The answers of a cache, or of several together: `query.n` to each prompt, in their order. Each answer takes a
        turn of its own. An answer begins to wait for its turn when the one before has its own: a long list has one
        place in the queue. The first error ends all. on_turn: is called when the first answer has its turn."""
        tasks: list[asyncio.Task[Answer]] = []
        with self.metrics.asking():
            try:
                async with asyncio.TaskGroup() as group:
                    for single in each_alone(query):
                        begun = asyncio.Event()
                        first = on_turn if not tasks else lambda: None
                        tasks.append(group.create_task(self._ask(caches, single, caller, begun, first)))
                        await begun.wait()
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            answers = [task.result() for task in tasks]
            self._answered(answers, query.conversation)
        return answers

    async def _ask(
        self,
        caches: str | Sequence[str],
        query: Asking,
        caller: Caller,
        begun: asyncio.Event,
        on_turn: Callable[[], None],
    ) -> Answer:
        """begun: is set when it has its turn, or has failed."""
        try:
            self.remote.require_bounded(query)
            async with self._turn("query", caller, query.program) as (left_s, trace):
                begun.set()
                on_turn()
                answer = await self.remote.call(ReplicaApi.query, caches, query, caller=caller.within(left_s))
                trace(answer.served.phases)
        finally:
            begun.set()
        self.spend(caller.tenant, _used(answer))
        return answer

    def stream(
        self, caches: str | Sequence[str], query: Asking, *, caller: Caller, on_turn: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Piece | Answer, None]:
        """The pieces as they come. A slow reader holds no slot; it gets `RequestTimeout` for too many unread pieces.
        on_turn: is called when the question has its turn."""
        self.remote.require_bounded(query)

        async def fetch(pieces: asyncio.Queue[Piece | Answer | None]) -> None:
            used = 0  # a reader that leaves early has used one token for each piece, as far as is known
            async with (
                self._turn("stream", caller, query.program) as (left_s, trace),
                aclosing(self.remote.stream(ReplicaApi.stream, caches, query, caller=caller.within(left_s))) as events,
            ):
                on_turn()
                try:
                    async for piece in events:
                        used = used + 1 if isinstance(piece, Piece) else _used(piece)
                        if pieces.qsize() >= MAX_UNREAD_PIECES:
                            raise RequestTimeout(
                                f"{MAX_UNREAD_PIECES} pieces of the answer wait to be read, as many as may; read the "
                                "stream faster, or ask without streaming"
                            )
                        if isinstance(piece, Answer):
                            trace(piece.served.phases)
                            self._answered([piece], query.conversation)
                        pieces.put_nowait(piece)
                finally:
                    self.spend(caller.tenant, used)

        async def counted(pieces: asyncio.Queue[Piece | Answer | None]) -> None:
            with self.metrics.asking():
                await fetch(pieces)

        return relayed(counted)

    def _queued(self, kind: str, caller: Caller, program: str | None = None) -> AbstractAsyncContextManager[float]:
        """The turn of a caller for work of a kind; gives the seconds that are left of its deadline."""
        assert caller.deadline_s is not None
        return self._queues[kind].turn(caller.tenant, caller.deadline_s, program)

    @asynccontextmanager
    async def _turn(self, name: str, caller: Caller, program: str | None = None) -> AsyncIterator[tuple[float, Trace]]:
        """Holds a slot for a question; gives the seconds left after the wait for the slot, and as `_observed`."""
        async with self._queued("question", caller, program) as left_s:
            with self._observed(name) as trace:
                yield left_s, trace

    def _answered(self, answers: Sequence[Answer], conversation: str | None) -> None:
        self.metrics.answered(self.model, answers, of_conversation=conversation is not None)
        if conversation is not None:
            note(conversation=conversation)
        if len(answers[0].sources) > 1:
            note(caches=len(answers[0].sources))
        note(
            model=self.model,
            cache_id=answers[0].served.cache_id,
            read_from=answers[0].served.read_from,
            cache_read_tokens=sum(answer.usage.cache_read_tokens for answer in answers),
            read_tokens=sum(answer.usage.read_tokens for answer in answers),
            prefill_tokens=sum(answer.usage.prefill_tokens for answer in answers),
            completion_tokens=sum(answer.usage.completion_tokens for answer in answers),
            suffix_tokens=sum(answer.usage.suffix_tokens or 0 for answer in answers),
        )

    @contextmanager
    def _observed(self, name: str) -> Iterator[Trace]:
        """One call, in flight for the length of the block. Gives what adds the phases of its answer to its span.

        The span is not made the current one: a stream may end in another context than it began in.
        """
        span = self.tracer.start_span(name, attributes={"kvshelf.model": self.model})
        with self.metrics.in_flight.labels(self.model, name).track_inprogress():
            try:
                yield partial(add_phases, self.tracer, span, time.time_ns())
            except BaseException as exc:
                span.set_status(Status(StatusCode.ERROR))
                span.set_attribute("error.type", result_of(exc))
                raise
            finally:
                span.end()


def each_alone(query: Asking) -> Iterator[Asking]:
    """A query for each answer of one."""
    for prompt in query.prompt if isinstance(query.prompt, list) else [query.prompt]:
        for number in range(query.n):
            seed = None if query.seed is None else (query.seed + number + 2**63) % 2**64 - 2**63
            yield query.model_copy(update={"prompt": prompt, "n": 1, "seed": seed})


def _used(answer: Answer) -> int:
    """Tokens that went through the model for an answer, and those that came out."""
    return answer.usage.prefill_tokens + answer.usage.completion_tokens


def serving(identities: Mapping[str, ModelIdentity], made_under: ModelIdentity) -> str:
    """The name of a served model that can use caches made under this one: that model before any that is linked to it.
    Raises `ModelMismatch` if none can."""
    refusals: dict[str, ModelMismatch] = {}
    for name, identity in sorted(identities.items(), key=lambda item: item[1].links(made_under)):
        try:
            identity.require_match(made_under)
        except ModelMismatch as error:
            refusals[name] = error
        else:
            return name
    raise refusals.get(made_under.name, next(iter(refusals.values())))


def require_adapter(
    engines: Mapping[str, ServedModel],
    identities: Mapping[str, ModelIdentity],
    asking: AskShelf,
    cache_id: str,
    model: str,
) -> None:
    """Raise `InvalidRequest` for a question that names an adapter under which its caches were not made: one that is not
    served, or another one than that of `model`, which is to answer. Names of the same weights are one adapter."""
    if asking.adapter is None:
        return
    ours, theirs = identities[served_model(engines, None, asking.adapter)], identities[model]
    if ours.fingerprint() != theirs.fingerprint():
        raise InvalidRequest(
            f"cache {cache_id} is of {model!r}, not of the adapter {asking.adapter!r}; leave adapter out, or put the "
            "document under that one",
            param="adapter",
        )


def serving_all(
    identities: Mapping[str, ModelIdentity],
    manifests: Sequence[Manifest],
    successor: Callable[[Manifest], str | None] = lambda _: None,
) -> str:
    """The name of the served model for caches that are asked together. Raises `InvalidRequest` for caches of several
    models.

    successor: names the served model for a cache of a model that nobody runs. Where it names none, raises
    `ModelMismatch`; of several caches, `details["cache_id"]` is the one.
    """
    of: dict[str, str] = {}  # by served model, a cache
    for manifest in manifests:
        try:
            name = serving(identities, ModelIdentity(**manifest.identity["model"]))
        except ModelMismatch as error:
            if (named := successor(manifest)) is None:
                if len(manifests) > 1:
                    error.details["cache_id"] = manifest.id
                raise
            name = named
        of.setdefault(name, manifest.id)
    if len(of) > 1:
        caches = ", ".join(f"{cache_id} of {model!r}" for model, cache_id in of.items())
        raise InvalidRequest(
            f"the caches are of several models ({caches}); ask those of one model together", param="cache_ids"
        )
    return next(iter(of))
