"""Answering questions from stored caches, several at once, whole or piece by piece."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import structlog

from kvshelf.api import Asking, JointQuery, ReadShares, Source
from kvshelf.api.shapes import param_of
from kvshelf.api.texts import texts_of
from kvshelf.api.tools import ToolAsking
from kvshelf.errors import CacheError, CacheNotFound, DeadlineExceeded, KvshelfError
from kvshelf.store.artifact.identity import Boundary
from kvshelf.store.base import Store
from kvshelf.store.jobs.meter import Meter
from kvshelf.workers.engine.attention.attachment import Attached, Attachment
from kvshelf.workers.engine.decode.generation import Answer, Sampling
from kvshelf.workers.engine.decode.grammar import Grammar
from kvshelf.workers.engine.decode.reduction import SuffixReducer
from kvshelf.workers.engine.decode.selection import Selection
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.engine.inputs.counting import count
from kvshelf.workers.engine.inputs.tools import HeldPieces, ToolFormat
from kvshelf.workers.replica.calls import Threads, called_as
from kvshelf.workers.replica.conversations import Conversations, Said, prompt_of, said_in
from kvshelf.workers.replica.residents import Resident, Residents
from kvshelf.workers.replica.results import Phase, Reply, rounded
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.ticket import Ticket
from kvshelf.workers.selectors.registry import reads_by_index

log = structlog.get_logger("kvshelf.workers")


@dataclass(eq=False)
class Questions:
    """The questions to one replica."""

    engine: Engine
    store: Store
    scheduler: Scheduler
    threads: Threads
    residents: Residents
    conversations: Conversations
    meter: Meter
    _housekeeping: list[asyncio.Task[NoReturn]] = field(default_factory=list, init=False)

    def stop(self) -> None:
        for task in self._housekeeping:
            task.cancel()
        self.residents.close()

    async def hint(self, cache_id: str, next_use_s: float | None, *, tenant: str, origin: str = "") -> dict[str, int]:
        """The next question on a cache comes in so many seconds, see `Residents.hint`; returns its `take_counts`."""
        with called_as(origin, tenant):
            self._keep_house()
            self.residents.hint(cache_id, tenant, next_use_s)
            return self.residents.take_counts()

    async def count(
        self, query: Asking, document: str | None, boundary: Boundary | None, *, tenant: str, origin: str = ""
    ) -> int:
        """As `kvshelf.workers.engine.inputs.counting.count`. Refuses what a question with these tools and this shape
        refuses, and more than the model takes."""
        with called_as(origin, tenant):
            said = [*texts_of(query), *([] if document is None else [document])]
            await self.threads.run(self.engine.require_askable, said, "messages")
            tools, _ = await self.threads.run(self._shape, query)
            form = self.engine.require_text("messages")
            return await self.threads.run(count, form, tools, query, document, boundary)

    async def query(
        self,
        caches: str | Sequence[str],
        query: Asking,
        *,
        of_batch: bool = False,
        tenant: str,
        deadline_s: float | None = None,
        origin: str = "",
    ) -> Reply:
        """Answer the one prompt of a query about a cache, or about several together: callers ask several prompts one by
        one, so that tenants take turns. of_batch: whether users' questions go before it."""
        with called_as(origin, tenant):
            async with self._loaded(caches, query, tenant, deadline_s) as loaded:
                ticket = await self._begun(loaded, of_batch=of_batch, tenant=tenant, deadline_s=deadline_s)
                try:
                    answer = await asyncio.wrap_future(ticket.future)
                    return await self._kept(loaded, answer, self._counted(loaded, answer, ticket, tenant), tenant)
                finally:
                    ticket.cancel()

    async def stream(
        self,
        caches: str | Sequence[str],
        query: Asking,
        *,
        tenant: str,
        deadline_s: float | None = None,
        origin: str = "",
    ) -> AsyncIterator[str | Reply]:
        """Pieces of the answer to the prompt as they become final, then the answer. Closing the iterator cancels it."""
        with called_as(origin, tenant):
            async with self._loaded(caches, query, tenant, deadline_s) as loaded:
                pieces: asyncio.Queue[str | None] = asyncio.Queue()
                loop = asyncio.get_running_loop()

                def put(piece: str | None) -> None:
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)

                held = HeldPieces(loaded.settled)
                ticket = await self._begun(loaded, on_text=put, tenant=tenant, deadline_s=deadline_s)
                ticket.future.add_done_callback(lambda _: put(None))
                try:
                    while (piece := await pieces.get()) is not None:
                        for text in held.push(piece):
                            yield text
                    answer = ticket.future.result()
                    reply = await self._kept(loaded, answer, self._counted(loaded, answer, ticket, tenant), tenant)
                    for text in held.rest(reply.text):
                        yield text
                    yield reply
                finally:
                    ticket.cancel()

    @asynccontextmanager
    async def _loaded(
        self, caches: str | Sequence[str], query: Asking, tenant: str, deadline_s: float | None
    ) -> AsyncIterator[_Loaded]:
        self._keep_house()
        started = time.monotonic()
        asked = [caches] if isinstance(caches, str) else list(caches)
        routed = isinstance(query, JointQuery) and query.route is not None
        cache_ids = [await self._nearest(asked, query, tenant)] if routed else asked
        tools, grammar = await self.threads.run(self._shape, query)  # refused before any work
        if query.store:
            self.engine.require_turns()
            await self.threads.run(self.store.admit, tenant)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(deadline_s):
                    cache_ids, query, held = await self._held(stack, cache_ids, query, tools, tenant)
            except TimeoutError as exc:
                raise DeadlineExceeded(
                    f"the cache could not be had within {deadline_s} s: the store is slow, or the memory for caches is "
                    "full of others that are being asked; try again"
                ) from exc
            except KvshelfError as error:
                if routed:
                    error.details["cache_id"] = cache_ids[0]
                raise
            for cache_id in cache_ids:
                self.threads.submit(_touch, self.store, cache_id, tenant)
            document = self.engine.joined([resident.document for resident, _ in held])
            found = dict(zip(cache_ids, held, strict=True))
            found_s, counts = time.monotonic() - started, self.residents.take_counts()
            named = asked if routed else cache_ids
            loaded = _Loaded(named, found, document, query, tools, grammar, started, found_s, counts)
            try:
                yield loaded
            except KvshelfError as error:
                if (failed := loaded.failed) is not None:
                    error.details["cache_id"] = failed
                raise

    async def _nearest(self, cache_ids: Sequence[str], query: Asking, tenant: str) -> str:
        """Of these caches of episodes the one that the question is about. Errors of the store name their cache."""

        def params(cache_id: str) -> dict[str, Any]:
            try:
                return self.store.stat(cache_id, tenant=tenant).policy_params
            except KvshelfError as error:
                error.details["cache_id"] = cache_id
                raise

        def nearest() -> str:
            return cache_ids[self.engine.nearest(list(map(params, cache_ids)), prompt_of(query, None))]

        return await self.threads.run(nearest)

    def _keep_house(self) -> None:
        """Begun by the first call: its event loop is the one that will run it."""
        if not self._housekeeping:
            forever = self.residents.evict_idle_forever(), self.residents.read_ahead_forever()
            self._housekeeping += map(asyncio.ensure_future, forever)

    async def _held(
        self, stack: AsyncExitStack, cache_ids: list[str], query: Asking, tools: ToolFormat | None, tenant: str
    ) -> tuple[list[str], Asking, list[tuple[Resident, bool]]]:
        """The caches to ask, with what is left to ask of them: of a conversation about one, what follows the turns that
        are on the shelf. The first of these turns has the tools' text."""
        if len(cache_ids) == 1 and query.messages is not None and len(query.messages) > 1:
            shelved = self.conversations.shelved
            cache_id, left = await self.threads.run(shelved, cache_ids[0], said_in(query, tools), tenant)
            if cache_id != cache_ids[0]:
                told = {"told": True} if tools is not None else {}
                rest = query.model_copy(update={"messages": query.messages[-len(left) :]} | told)
                # A turn that cannot be read is a longer prefill, and no error.
                with suppress(CacheError, CacheNotFound):
                    return [cache_id], rest, await self._entered(stack, [cache_id], query, tenant)
        return cache_ids, query, await self._entered(stack, cache_ids, query, tenant)

    async def _entered(
        self, stack: AsyncExitStack, cache_ids: list[str], query: Asking, tenant: str
    ) -> list[tuple[Resident, bool]]:
        part = query.select is not None and reads_by_index(query.select.method)
        using = self.residents.using_all(cache_ids, tenant, part=part, tool=query.tool)
        return await stack.enter_async_context(using)

    async def _begun(self, loaded: _Loaded, **options: Any) -> Ticket[Answer]:
        """The queued answer. options: of `Scheduler.generate`."""
        document, query = loaded.document, loaded.query
        ids = await self.threads.run(self._encoded, loaded)
        passages = query.select is not None and query.select.passages
        options |= {"passages": passages, "reducer": self._bound(query, ids)}
        selection = await self._selected(document, query, ids)
        if query.store:
            assert isinstance(document, Attachment)
            options["turn_of"] = partial(self._turn_ids, document, loaded)
        return self.scheduler.generate(document, ids, _sampling(query, loaded.grammar), selection, **options)

    def _turn_ids(self, document: Attachment, loaded: _Loaded, text: str, token_ids: Sequence[int]) -> list[int]:
        return self.engine.turn_ids(document, loaded.prompt, loaded.sent_back(text), token_ids)

    def _encoded(self, loaded: _Loaded) -> list[int]:
        query, boundary = loaded.query, loaded.document.identity.boundary
        if isinstance(query, ToolAsking) and loaded.tools is not None:
            return loaded.tools.encoded(boundary, query.messages, told=query.told)
        return self.engine.encode_query(loaded.document, loaded.prompt)

    def _shape(self, query: Asking) -> tuple[ToolFormat | None, Grammar | None]:
        """How the model writes a question's tools, and what the answer must be. Raises `InvalidRequest` for tools that
        the model's template has no room for, and as `Guide.constraint`."""
        self.engine.require_askable(texts_of(query), "prompt" if query.messages is None else "messages")
        wanted = None if query.response_format is None else query.response_format.model_dump()
        shape = {"response_format": wanted, "grammar": query.grammar, "choices": query.choices}
        grammar = Grammar.of(shape, param_of(query, "response_format"))
        tools = None
        if isinstance(query, ToolAsking):
            tools = ToolFormat.of(self.engine.require_text("tools"), query.tools)
            if query.callable:
                lark = tools.grammar(query.callable, several=query.parallel_tool_calls)
                grammar = Grammar.of_lark(lark, "tools")
        if grammar is not None:
            self.engine.guide.constraint(grammar, query.max_tokens)
        return tools, grammar

    def _counted(self, loaded: _Loaded, answer: Answer, ticket: Ticket[Answer], tenant: str) -> Reply:
        """The reply, counted for the tenant."""
        usage = answer.usage
        self.meter.add(
            tenant,
            answers=1,
            cache_read_tokens=usage.cache_read_tokens,
            prefill_tokens=usage.prefill_tokens,
            completion_tokens=usage.completion_tokens,
        )
        self.threads.submit(self._count_saved, loaded.held, tenant)
        return loaded.reply(answer, ticket)

    def _count_saved(self, held: Mapping[str, tuple[Resident, bool]], tenant: str) -> None:
        for cache_id, (resident, _) in held.items():
            if resident.prefill_s is None:
                resident.prefill_s = _prefill_s(self.store, cache_id, tenant)
        self.meter.add(tenant, saved_s=sum(resident.prefill_s or 0.0 for resident, _ in held.values()))

    async def _kept(self, loaded: _Loaded, answer: Answer, reply: Reply, tenant: str) -> Reply:
        """The reply, once its turn is stored if the query asks for that. What keeps a turn from being stored is no
        error of the answer. Of a question with tools, the reply has the calls beside its text."""
        if isinstance(loaded.query, ToolAsking) and loaded.tools is not None:
            text, calls = loaded.tools.answered(reply.text, loaded.query)
            reply = reply.model_copy(update={"text": text, "tool_calls": calls})
        if not loaded.query.store:
            return reply
        document, keep = loaded.document, self.conversations.keep
        answer = replace(answer, text=loaded.sent_back(answer.text))
        assert isinstance(document, Attachment)
        try:
            kept = await self.threads.run(keep, reply.cache_id, document, loaded.query, loaded.prompt, answer, tenant)
        except KvshelfError as error:
            log.warning("a turn was not stored", cache_id=reply.cache_id, reason=error.message)
            return reply.model_copy(update={"not_stored": error.message})
        stored = kept.manifest
        if kept.document is not None:
            await self.residents.hold(stored.id, tenant, kept.document, stored.blob_digest)
        return reply.model_copy(update={"stored_cache_id": stored.id})

    def _bound(self, query: Asking, ids: Sequence[int]) -> SuffixReducer | None:
        """What bounds the answer's memory."""
        if query.suffix is None:
            return None
        return self.engine.bound(
            query.suffix.policy, question_tokens=len(ids), budget=query.suffix.budget, params=query.suffix.params
        )

    async def _selected(self, document: Attached, query: Asking, ids: Sequence[int]) -> Selection | None:
        """What the answer reads, on a thread: it waits for all layers of a cache that is arriving."""
        if (chosen := query.select) is None:
            return None
        more = {"tokens": chosen.tokens, "params": chosen.params}
        return await self.threads.run(self.engine.select, document, chosen.method, question_tokens=len(ids), **more)


@dataclass(frozen=True)
class _Loaded:
    """The caches to query, by id, each with whether it was in memory. They may still be arriving; every answer waits
    for all of them.

    asked: the ids in the answer, of which a route may have chosen one to hold. document: they, as the question sees
    them. query: what is asked of them. tools, grammar: as of `Questions._shape`. started: the time of the request, of
    `time.monotonic`. found_s: seconds until the caches were found in memory or began to arrive. counts: of
    `Residents.take_counts`.
    """

    asked: Sequence[str]
    held: dict[str, tuple[Resident, bool]]
    document: Attached
    query: Asking
    tools: ToolFormat | None
    grammar: Grammar | None
    started: float
    found_s: float
    counts: dict[str, int]

    @property
    def prompt(self) -> str | list[Said]:
        """What is asked, with the text of tools: a text, or a conversation."""
        return prompt_of(self.query, self.tools)

    def sent_back(self, text: str) -> str:
        """An answer as a client's next request has it: the calls in it may be written otherwise."""
        if isinstance(self.query, ToolAsking) and self.tools is not None:
            return self.tools.written(*self.tools.answered(text, self.query))
        return text

    @property
    def settled(self) -> Callable[[str], int]:
        """How much of a beginning of the answer is text and no call, whatever follows it."""
        calls = isinstance(self.query, ToolAsking) and self.query.tool_choice != "none"
        return self.tools.settled if calls and self.tools is not None else len

    @property
    def failed(self) -> str | None:
        """Of several caches, one that could not be read."""
        unread = (cache_id for cache_id, (resident, _) in self.held.items() if resident.document.failed)
        return next(unread, None) if len(self.asked) > 1 else None

    def reply(self, answer: Answer, ticket: Ticket[Answer]) -> Reply:
        """The reply for an answer that has just ended."""
        identity = self.document.identity
        read = [resident for resident, was_there in self.held.values() if not was_there]
        slowest = max(read, key=lambda resident: resident.read_s, default=None)
        read_from, read_s = ("memory", 0.0) if slowest is None else (slowest.place, slowest.read_s)
        load_s = self.found_s + read_s
        asked_s = ticket.submitted - self.started
        begun_s, first_s = asked_s + ticket.queue_s, asked_s + ticket.first_s
        phases = (
            Phase("load", 0.0, load_s),
            Phase("queue", asked_s, ticket.queue_s),
            Phase("prefill", begun_s, first_s - begun_s),
            Phase("decode", first_s, time.monotonic() - self.started - first_s),
        )
        shares = dict(zip(self.held, answer.sources, strict=True))
        longest = next(id for id, (resident, _) in self.held.items() if resident.document.identity is identity)
        several = {"caches": len(shares)} if len(shares) > 1 else {}
        log.info("answered", cache_id=longest, read_from=read_from, **several, **dict(answer.usage), **rounded(phases))
        return Reply(
            id="ans_" + secrets.token_hex(12),
            cache_id=longest,
            text=answer.text,
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            load_ms=round(load_s * 1000, 3),
            policy=identity.policy,
            compression_ratio=identity.compression_ratio,
            token_ids=answer.token_ids,
            read_from=read_from,
            phases=phases,
            memory=self.counts,
            suffix_bytes=ticket.suffix_bytes,
            stop=answer.stop,
            sources=tuple(Source(cache_id=id, share=shares.get(id, 0.0)) for id in self.asked),
            passages=None if answer.passages is None else list(map(ReadShares.of, self.held, answer.passages)),
            logprobs=None if answer.logprobs is None else list(answer.logprobs),
        )


def _sampling(query: Asking, grammar: Grammar | None) -> Sampling:
    stop = (query.stop,) if isinstance(query.stop, str) else tuple(query.stop or ())
    logprobs = (query.top_logprobs or 0) if query.logprobs else None
    return Sampling(query.max_tokens, query.temperature, query.top_p, query.seed, stop, grammar, logprobs)


def _prefill_s(store: Store, cache_id: str, tenant: str) -> float:
    """Seconds of the prefills that made a cache and those that it grew from, as far as the shelf knows them."""
    seconds = 0.0
    at: str | None = cache_id
    try:
        while at is not None:
            manifest = store.stat(at, tenant=tenant)
            seconds, at = seconds + manifest.timings.prefill_s, manifest.parent_id
    except KvshelfError as error:
        log.info("what a cache saves is known in part", cache_id=cache_id, reason=error.message)
    return seconds


def _touch(store: Store, cache_id: str, tenant: str) -> None:
    """Record a use. Turns that uses renew are used with those behind them, which are found through them."""
    try:
        store.touch(cache_id, tenant=tenant)
        while (parent_id := store.stat(cache_id, tenant=tenant).parent_id) is not None:
            if store.stat(parent_id, tenant=tenant).ttl_renew_s is None:
                return
            store.touch(cache_id := parent_id, tenant=tenant)
    except KvshelfError:
        log.warning("a use could not be recorded", cache_id=cache_id, exc_info=True)
