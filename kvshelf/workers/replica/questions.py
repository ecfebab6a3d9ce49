"""Answering questions from stored caches, several at once, whole or piece by piece."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import structlog

from kvshelf.api import Asking, JointQuery, Query
from kvshelf.api.answers import Answer, Phase, Piece, Served, rounded
from kvshelf.api.inspect import BuiltPrompt
from kvshelf.api.queries import Linked, Route
from kvshelf.api.shapes import Logprob, param_of
from kvshelf.api.texts import texts_of
from kvshelf.api.tools import ToolAsking, ToolCall, ToolTurn
from kvshelf.artifact.identity import Boundary, Identity
from kvshelf.engine.attention.attachment import Attached, Attachment
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.decode.passages import Narrowing
from kvshelf.engine.engine import Engine
from kvshelf.engine.tools.pieces import HeldPieces, ThoughtStream, behind, told_apart
from kvshelf.engine.tools.tools import ToolFormat, count
from kvshelf.engine.turns import Dialogue, Said
from kvshelf.errors import CacheError, CacheNotFound, DeadlineExceeded, InvalidRequest, KvshelfError
from kvshelf.methods.selectors.registry import reads_by_index
from kvshelf.model.templates.thoughts import Thoughts
from kvshelf.model.text import Broken, TemplateOptions
from kvshelf.store.base import Store, lineage
from kvshelf.store.jobs.metering import Meter
from kvshelf.workers.replica.calls import Caller, ReplicaThreads, called_by
from kvshelf.workers.replica.conversations import Conversations, Line
from kvshelf.workers.replica.guard import AnswerToCheck, Guard
from kvshelf.workers.replica.inspect import shown_prompt
from kvshelf.workers.replica.memory.residents import Resident, Residents, Warmed
from kvshelf.workers.replica.memory.retention import Hint, Key
from kvshelf.workers.replica.queues import AnswerOrder
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.ticket import Ticket

log = structlog.get_logger("kvshelf.workers")


@dataclass(eq=False)
class Questions:
    """The questions to one replica."""

    engine: Engine
    store: Store
    scheduler: Scheduler
    threads: ReplicaThreads
    residents: Residents
    conversations: Conversations
    meter: Meter
    guard: Guard
    _housekeeping: list[asyncio.Task[NoReturn]] = field(default_factory=list, init=False)

    def stop(self) -> None:
        for task in self._housekeeping:
            task.cancel()
        self.residents.close()

    async def hint(self, hints: Sequence[Hint], *, caller: Caller) -> dict[str, int]:
        """When the next questions on caches come, see `Residents.hint`; returns its `take_counts`."""
        with called_by(caller):
            self._keep_house()
            for hint in hints:
                self.residents.hint(hint, caller.tenant)
            return self.residents.take_counts()

    async def warm(self, keys: Sequence[Key], *, caller: Caller) -> Warmed:
        """See `Residents.warm`."""
        with called_by(caller):
            self._keep_house()
            return await self.residents.warm(keys)

    async def count(
        self,
        query: Asking,
        document: str | None,
        boundary: Boundary | None,
        cached: Mapping[str, Any],
        *,
        caller: Caller,
    ) -> int:
        """As `kvshelf.engine.tools.tools.count`. Refuses what a question with these tools and this shape
        refuses, and more than the model takes."""
        with called_by(caller):
            texts = [*texts_of(query), *([] if document is None else [document])]
            await self.threads.compute(self.engine.encoder.require_askable, texts, "messages")
            shape = await self.threads.compute(self._shape, query)
            form = self.engine.encoder.require_text("messages")
            return await self.threads.compute(
                count, form, shape.tools, shape.variables, query, document, boundary, cached
            )

    async def prompt(self, cache_id: str, query: Query, *, caller: Caller) -> BuiltPrompt:
        """The prompt that a question builds, without an answer to it. Raises as a question does."""
        with called_by(caller):
            shape = await self.threads.compute(self._shape, query)
            return await self.threads.compute(self._prompt, cache_id, query, shape, caller.tenant)

    def _prompt(self, cache_id: str, query: Query, shape: _Shape, tenant: str) -> BuiltPrompt:
        manifest = self.store.stat(cache_id, tenant=tenant)
        identity = Identity.from_dict(manifest.identity)
        if identity.boundary == "text":
            ids = self.engine.encoder.behind(identity, prompt_of(query))
            return shown_prompt(self.engine, self.store, manifest, ids, texts_of(query), 0, cache_id)
        line = self.conversations.line(cache_id, messages_of(query), tenant, shape.variables, shape.intro)
        root, ids = self.store.stat(line.root_id, tenant=tenant), line.dialogue.prompt.token_ids
        texts = [message["content"] for message in line.dialogue.messages]
        return shown_prompt(self.engine, self.store, root, ids, texts, line.read, line.cache_id)

    async def query(
        self, caches: str | Sequence[str], query: Asking, *, caller: Caller, of_batch: bool = False
    ) -> Answer:
        """Answer the one prompt of a query about a cache, or about several together: callers ask several prompts one by
        one, so that tenants take turns. of_batch: whether users' questions go before it."""
        with called_by(caller):
            async with self._load(caches, query, caller) as loaded:
                ids, ticket = await self._begin(loaded, caller, AnswerOrder(of_batch=of_batch))
                try:
                    answer = await asyncio.wrap_future(ticket.future)
                    return await self._finish(loaded, ids, answer, ticket, caller.tenant)
                finally:
                    ticket.cancel()

    async def stream(
        self, caches: str | Sequence[str], query: Asking, *, caller: Caller
    ) -> AsyncGenerator[Piece | Answer, None]:
        """Pieces of the answer to the prompt as they become final, then the answer. Closing the iterator cancels it."""
        with called_by(caller):
            async with self._load(caches, query, caller) as loaded:
                pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
                loop = asyncio.get_running_loop()

                def put(piece: Piece | None) -> None:
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)

                thoughts = ThoughtStream(loaded.shape.thoughts, opened=loaded.shape.opened)
                unsettled = HeldPieces(loaded.settled)
                ids, ticket = await self._begin(loaded, caller, AnswerOrder(on_text=put))
                ticket.future.add_done_callback(lambda _: put(None))
                try:
                    while (piece := await pieces.get()) is not None:
                        for part in unsettled.among(thoughts.push(piece)):
                            yield part
                    answer = ticket.future.result()
                    for part in unsettled.among(thoughts.rest()):
                        yield part
                    answer = await self._finish(loaded, ids, answer, ticket, caller.tenant)
                    for part in unsettled.rest(answer.text):
                        yield part
                    yield answer
                finally:
                    ticket.cancel()

    @asynccontextmanager
    async def _load(self, caches: str | Sequence[str], query: Asking, caller: Caller) -> AsyncIterator[_Loaded]:
        self._keep_house()
        tenant, deadline_s = caller.tenant, caller.deadline_s
        started = time.monotonic()
        requested = [caches] if isinstance(caches, str) else list(caches)
        route = query.route if isinstance(query, JointQuery) else None
        self.engine.asker.require_asked(query, len(requested))
        cache_ids = [await self._nearest(requested, query, tenant)] if route == "nearest" else requested
        param = "prompt" if query.messages is None else "messages"
        await self.threads.compute(lambda: self.engine.encoder.require_askable(texts_of(query), param))
        shape = await self.threads.compute(self._shape, query)  # refused before any work
        if query.store:
            self.engine.turns.require()
            await self.threads.run(self.store.admit, tenant)
        async with AsyncExitStack() as stack:
            narrowed_by = None if route == "nearest" else route
            # The tool is of those that answer.
            loading = query if narrowed_by is None else query.model_copy(update={"tool": None})
            of_all = await stack.enter_async_context(AsyncExitStack())  # left once a route has chosen among them
            try:
                async with asyncio.timeout(deadline_s):
                    line, residents = await self._take(of_all, cache_ids, loading, shape, tenant)
            except TimeoutError as exc:
                raise DeadlineExceeded(
                    f"the cache could not be had within {deadline_s} s: the store is slow, or the memory for caches is "
                    "full of others that are being asked; try again"
                ) from exc
            except KvshelfError as error:
                if route == "nearest":
                    error.details["cache_id"] = cache_ids[0]
                raise
            cache_ids = cache_ids if line is None else [line.cache_id]
            for cache_id in cache_ids:
                self.threads.submit(_touch, self.store, cache_id, tenant)
            document = self.engine.joined([resident.document for resident, _ in residents])
            if document.identity.variables:
                shape = await self.threads.run(self._shape, query, document.identity.variables)
            loaded = _Loaded(
                cache_ids=cache_ids if route is None else requested,
                residents=dict(zip(cache_ids, residents, strict=True)),
                document=document,
                query=query,
                shape=shape,
                line=line,
                started=started,
                take_s=time.monotonic() - started,
                counts=self.residents.take_counts(),
            )
            try:
                if narrowed_by is not None:
                    loaded = await self._narrow(stack, loaded, narrowed_by, caller)
                    await of_all.aclose()
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
            return cache_ids[self.engine.asker.nearest(list(map(params, cache_ids)), prompt_of(query))]

        return await self.threads.compute(nearest)

    async def _narrow(self, stack: AsyncExitStack, loaded: _Loaded, route: Route, caller: Caller) -> _Loaded:
        """Of several caches those that the question is about, as the model's reading of it says. They are in use until
        the stack is closed."""
        documents = [resident.document for resident, _ in loaded.residents.values()]
        ids = await self.threads.compute(self._encoded, loaded)
        narrowing = self.engine.asker.narrowing(route, documents, ids)
        await self.threads.run(_wait_for, documents)
        while readings := narrowing.readings:
            narrowing.take([await self._read(loaded, documents, places, ids, caller) for places in readings])
        residents: dict[str, tuple[Resident, bool]] = {}
        for place in narrowing.places:  # not `using_all`: who is taking several may wait for the room that these are in
            cache_id = list(loaded.residents)[place]
            query = loaded.query
            using = self.residents.using(cache_id, caller.tenant, tool=query.tool, program=query.program)
            resident, _ = await stack.enter_async_context(using)
            residents[cache_id] = resident, loaded.residents[cache_id][1]
        return replace(
            loaded,
            residents=residents,
            document=self.engine.joined([resident.document for resident, _ in residents.values()]),
            narrowing=narrowing,
            route_s=time.monotonic() - loaded.started - loaded.take_s,
        )

    async def _read(
        self,
        loaded: _Loaded,
        documents: Sequence[Attachment],
        places: Sequence[int],
        ids: Sequence[int],
        caller: Caller,
    ) -> Answer:
        """One reading of a `Narrowing`: a pass between the steps of answers. An error of one cache names it."""
        run = partial(self.engine.asker.read, documents, places, ids)
        ticket = self.scheduler.pass_of(run, tenant=caller.tenant, deadline_s=loaded.left_s(caller))
        try:
            return await asyncio.wrap_future(ticket.future)
        except KvshelfError as error:
            if len(places) == 1:
                error.details.setdefault("cache_id", list(loaded.residents)[places[0]])
            raise
        finally:
            ticket.cancel()

    def _keep_house(self) -> None:
        """Begin the housekeeping, with the first call: its event loop is the one that will run it."""
        if not self._housekeeping:
            forever = [self.residents.evict_idle_forever(), self.residents.read_ahead_forever()]
            if self.guard.rules.share:
                forever.append(self.guard.run_forever())
            self._housekeeping += map(asyncio.ensure_future, forever)

    async def _take(
        self, stack: AsyncExitStack, cache_ids: list[str], query: Asking, shape: _Shape, tenant: str
    ) -> tuple[Line | None, list[tuple[Resident, bool]]]:
        """The caches to ask. Of one alone the conversation behind it; the cache to ask is then the one with most of
        it."""

        async def enter(*cache_ids: str) -> list[tuple[Resident, bool]]:
            part = query.select is not None and reads_by_index(query.select.method)
            using = self.residents.using_all(cache_ids, tenant, part=part, tool=query.tool, program=query.program)
            return await stack.enter_async_context(using)

        if len(cache_ids) > 1 or self.engine.encoder.default_layout == "plain":
            return None, await enter(*cache_ids)
        (cache_id,), messages = cache_ids, messages_of(query)
        if len(messages) == 1:  # most questions are; only of a turn is there more to know
            residents = await enter(cache_id)
            identity = residents[0][0].document.identity
            if identity.boundary == "text":
                return None, residents
            if not identity.parent:
                return Line(self._dialogue(identity, messages, shape), cache_id, cache_id), residents
        line = await self.threads.compute(
            self.conversations.line, cache_id, messages, tenant, shape.variables, shape.intro
        )
        if line.dialogue.boundary == "text":
            return None, await enter(cache_id)
        try:
            return line, await enter(line.cache_id)
        except (CacheError, CacheNotFound):  # a turn that cannot be read is a longer prefill, and no error
            if line.cache_id == cache_id:
                raise
            return line.from_root, await enter(line.root_id)

    def _dialogue(self, identity: Identity, messages: list[Said], shape: _Shape) -> Dialogue:
        form = self.engine.encoder.require_text("messages")
        options = TemplateOptions.behind(identity, shape.variables)
        return Dialogue(form, identity.boundary, messages, options, shape.intro)

    async def _begin(self, loaded: _Loaded, caller: Caller, order: AnswerOrder) -> tuple[list[int], Ticket[Answer]]:
        """The token ids of the question, and the queued answer. order: without what question and caller say of it."""
        document, query = loaded.document, loaded.query
        ids = await self.threads.compute(self._encoded, loaded)
        deadline_s = caller.deadline_s if loaded.narrowing is None else loaded.left_s(caller)
        order = replace(order, tenant=caller.tenant, program=query.program, deadline_s=deadline_s)
        # On a thread: they wait for all layers of a cache that is arriving.
        asker, reducer = self.engine.asker, None
        if query.suffix is not None:
            reducer = await self.threads.run(asker.reducer, query.suffix, len(ids), document)
        selection = await self.threads.run(asker.selection, document, query.select, len(ids), query.suffix)
        if query.store:
            assert isinstance(document, Attachment)
            order = replace(order, turn_of=partial(self._turn_ids, document, loaded))
        logprobs = (query.top_logprobs or 0) if query.logprobs else None
        sampling = Sampling(query.max_tokens, query, loaded.shape.grammar, logprobs)
        passages = query.select is not None and query.select.passages
        generate = partial(self.scheduler.generate, passages=passages, reducer=reducer, order=order)
        # On a thread: its grammar may have to be compiled again.
        beginning = asyncio.ensure_future(self.threads.run(generate, document, ids, sampling, selection))

        def abandon(beginning: asyncio.Future[Ticket[Answer]]) -> None:
            if not beginning.cancelled() and beginning.exception() is None:
                beginning.result().cancel()

        try:
            return ids, await asyncio.shield(beginning)
        except asyncio.CancelledError:  # the caller left while the question was being queued
            beginning.add_done_callback(abandon)
            raise

    def _turn_ids(self, document: Attachment, loaded: _Loaded, text: str, token_ids: Sequence[int]) -> list[int]:
        """The tokens of a turn, as `Turns.ids` has them."""
        if loaded.line is None:
            return self.engine.turns.ids(document, prompt_of(loaded.query), text, token_ids)
        turn = loaded.read(text)
        if not turn.content and not turn.tool_calls:
            raise InvalidRequest("the answer is empty, and a turn of a conversation needs some text", param="store")
        ids, _ = loaded.line.turn(loaded.message_of(text), self.engine.turns.without_end(token_ids))
        return self.engine.turns.bounded(document, ids)

    def _encoded(self, loaded: _Loaded) -> list[int]:
        if loaded.line is not None:
            return loaded.line.query_ids
        identity = loaded.document.identity
        if identity.boundary == "text":
            return self.engine.encode_query(loaded.document, prompt_of(loaded.query))
        return self._dialogue(identity, messages_of(loaded.query), loaded.shape).prompt.token_ids

    def _shape(self, query: Asking, cached: Mapping[str, Any] | None = None) -> _Shape:
        """How the model writes a question's tools, what its template is told, and what the answer must be. cached: the
        variables that the document was written with. Raises `InvalidRequest` for tools that the model's template has no
        room for, for what it is not told, and as `Guide.constraint`."""
        response_format = None if query.response_format is None else query.response_format.model_dump()
        limits = {"response_format": response_format, "grammar": query.grammar, "choices": query.choices}
        grammar = Grammar.of(limits, param_of(query, "response_format"))
        tools, variables = None, dict[str, Any]()
        form = self.engine.text
        if query.chat_template_kwargs or query.reasoning_effort:
            template = self.engine.encoder.require_text("chat_template_kwargs").template
            variables = template.choose_variables(query.chat_template_kwargs or {}, query.reasoning_effort)
        if isinstance(query, ToolAsking):
            tools = ToolFormat.of(self.engine.encoder.require_text("tools"), query.tools)
            if query.callable:
                lark = tools.grammar(query.callable, several=query.parallel_tool_calls)
                grammar = Grammar.of_lark(lark, "tools")
        options = TemplateOptions({**(cached or {}), **variables})
        last = messages_of(query)[-1]["role"] if query.messages is not None else "user"
        opened = form is not None and form.has_template and form.opens_thought(options, last)
        if grammar is not None:
            if opened and form is not None and form.thoughts is not None:
                closing = form.thoughts.closing
                grammar = grammar.behind(closing, form.tokens.literal(closing))
            self.engine.asker.guide.constraint(grammar, query.max_tokens)
        return _Shape(tools, grammar, variables, form.thoughts if form is not None else None, opened)

    def _count(self, loaded: _Loaded, answer: Answer, tenant: str) -> None:
        usage = answer.usage
        self.meter.add(
            tenant,
            loaded.query.conversation,
            answers=1,
            cache_read_tokens=usage.cache_read_tokens,
            prefill_tokens=usage.prefill_tokens,
            completion_tokens=usage.completion_tokens,
        )
        self.threads.submit(self._count_saved, loaded.residents, tenant, loaded.query.conversation)

    def _count_saved(
        self, residents: Mapping[str, tuple[Resident, bool]], tenant: str, conversation: str | None
    ) -> None:
        saved_s = 0.0
        for cache_id, (resident, _) in residents.items():
            if resident.prefill_s is None:
                resident.prefill_s = _prefill_s(self.store, cache_id, tenant)
            saved_s += resident.prefill_s
        self.meter.add(tenant, conversation, saved_s=saved_s)

    async def _finish(
        self, loaded: _Loaded, ids: Sequence[int], answer: Answer, ticket: Ticket[Answer], tenant: str
    ) -> Answer:
        """The answer to these tokens, once its turn is stored if the query asks for that. What keeps a turn from being
        stored is no error of the answer."""
        if loaded.narrowing is not None:
            answer = replace(answer, usage=loaded.narrowing.counted(answer.usage))
        self._count(loaded, answer, tenant)
        if self.guard.wants:
            self.guard.add(AnswerToCheck(tuple(loaded.residents), tenant, tuple(ids), tuple(answer.token_ids)))
        made_under, readable, linked = loaded.document.identity.model, self.engine.attachments.readable, None
        if readable.links(made_under):
            linked = Linked(linked_from=made_under.name, agreement=readable.linked[made_under.fingerprint()])
        text = answer.text
        answer = loaded.served(answer, ticket).also(guarded=self.guard.take_results(), linked=linked)
        if not loaded.query.store:
            return answer
        message = loaded.message_of(text)
        cache_id = answer.served.cache_id
        assert isinstance(loaded.document, Attachment)
        try:
            manifest, document = await self.threads.run(
                self.conversations.keep,
                cache_id,
                loaded.document,
                loaded.query,
                loaded.line,
                message,
                ticket.turn,
                tenant,
                loaded.residents[cache_id][0].digest,
            )
        except KvshelfError as error:
            log.warning("a turn was not stored", cache_id=cache_id, reason=error.message)
            return answer.also(not_stored=error.message)
        if document is not None:
            await self.residents.hold(manifest.id, tenant, document, manifest.blob_digest)
        return answer.also(stored_cache_id=manifest.id)


class _Shape(NamedTuple):
    """What a question asks of the answer. tools: as the model writes them. grammar: that the answer fits. variables:
    that the chat template is told. thoughts: the marks of the model's, and whether the prompt has `opened` them."""

    tools: ToolFormat | None
    grammar: Grammar | None
    variables: dict[str, Any]
    thoughts: Thoughts | None
    opened: bool

    @property
    def intro(self) -> Callable[[Broken], str] | None:
        """What the template says before the question."""
        return None if self.tools is None else self.tools.intro


@dataclass(frozen=True)
class _Loaded:
    """A question and its caches in memory. They may still be arriving; the answer waits for all of them.

    cache_ids: in the answer. residents: the caches that answer, all of these or those that a route chose, by id, each
    with whether it was in memory before. document: the residents as the question sees them. line: the conversation
    behind one cache. started: the time of the request, of `time.monotonic`. take_s: seconds until the caches were in
    memory or began to arrive. counts: of `Residents.take_counts`. narrowing: what chose the residents, in `route_s`
    seconds.
    """

    cache_ids: Sequence[str]
    residents: dict[str, tuple[Resident, bool]]
    document: Attached
    query: Asking
    shape: _Shape
    line: Line | None
    started: float
    take_s: float
    counts: dict[str, int]
    narrowing: Narrowing | None = None
    route_s: float = 0.0
    _read: dict[str, ToolTurn] = field(default_factory=dict)

    def left_s(self, caller: Caller) -> float | None:
        """Seconds that the caller has left, at least 0."""
        return None if caller.deadline_s is None else max(0.0, self.started + caller.deadline_s - time.monotonic())

    def read(self, text: str) -> ToolTurn:
        """What an answer says: its thoughts, its text, and the calls behind it. The same each time: calls get their ids
        here."""
        if text not in self._read:
            thought, content = told_apart(self.shape.thoughts, text, opened=self.shape.opened)
            calls: list[ToolCall] = []
            if isinstance(self.query, ToolAsking) and self.shape.tools is not None:
                content, calls = self.shape.tools.answered(content, self.query)
            self._read[text] = ToolTurn.model_construct(
                role="assistant", content=content, tool_calls=calls, reasoning_content=thought
            )
        return self._read[text]

    def _of_text(self, text: str, logprobs: Sequence[Logprob]) -> tuple[Logprob, ...]:
        """The logprobs of an answer's tokens behind its thoughts, those of calls, too."""
        _, said = told_apart(self.shape.thoughts, text, opened=self.shape.opened)
        return tuple(behind(logprobs, len(text.encode()) - len(said.encode())))

    def message_of(self, text: str) -> Said:
        """An answer as the message that a client's next request has."""
        return {"role": "assistant", "content": text} if self.line is None else self.read(text).template_fields

    @property
    def settled(self) -> Callable[[str], int]:
        """Tells how much of a beginning of the answer is text and no call, whatever follows it."""
        calls = isinstance(self.query, ToolAsking) and self.query.tool_choice != "none"
        return self.shape.tools.settled if calls and self.shape.tools is not None else len

    @property
    def failed(self) -> str | None:
        """The id of one of several caches that could not be read."""
        unread = (cache_id for cache_id, (resident, _) in self.residents.items() if resident.document.failed)
        return next(unread, None) if len(self.cache_ids) > 1 else None

    def served(self, answer: Answer, ticket: Ticket[Answer]) -> Answer:
        """An answer that has just ended, its thoughts and calls told apart, with how it was served."""
        identity = self.document.identity
        read = [resident for resident, in_memory in self.residents.values() if not in_memory]
        slowest = max(read, key=lambda resident: resident.read_s, default=None)
        read_from, read_s = ("memory", 0.0) if slowest is None else (slowest.place, slowest.read_s)
        load_s = self.take_s + read_s
        asked_s = ticket.submitted - self.started
        begun_s, first_s = asked_s + ticket.queue_s, asked_s + ticket.first_s
        phases = (
            Phase("load", 0.0, load_s),
            *([Phase("route", self.take_s, self.route_s)] if self.narrowing is not None else []),
            Phase("queue", asked_s, ticket.queue_s),
            Phase("prefill", begun_s, first_s - begun_s),
            Phase("decode", first_s, time.monotonic() - self.started - first_s),
        )
        shares = dict(zip(self.residents, answer.sources, strict=True))
        longest = next(id for id, (resident, _) in self.residents.items() if resident.document.identity is identity)
        several = {"caches": len(shares)} if len(shares) > 1 else {}
        log.info("answered", cache_id=longest, read_from=read_from, **several, **dict(answer.usage), **rounded(phases))
        turn = self.read(answer.text)
        return replace(
            answer,
            text=turn.content,
            thought=turn.reasoning_content,
            tool_calls=tuple(turn.tool_calls),
            sources=tuple(shares.get(id, 0.0) for id in self.cache_ids),
            logprobs=answer.logprobs and self._of_text(answer.text, answer.logprobs),
            served=Served(
                id="ans_" + secrets.token_hex(12),
                cache_ids=tuple(self.cache_ids),
                read_ids=tuple(self.residents),
                cache_id=longest,
                policy=identity.policy,
                compression_ratio=identity.compression_ratio,
                load_ms=round(load_s * 1000, 3),
                read_from=read_from,
                phases=phases,
                memory=self.counts,
                suffix_bytes=ticket.suffix_bytes,
            ),
        )


def messages_of(query: Asking) -> list[Said]:
    """The messages of a query, as a chat template reads them."""
    if isinstance(query, ToolAsking):
        return [turn.template_fields for turn in query.messages]
    if query.messages is not None:
        return [message.model_dump() for message in query.messages]
    return [{"role": "user", "content": prompt_of(query)}]


def prompt_of(query: Asking) -> str | list[Said]:
    """The one prompt of a query, or its messages."""
    if query.prompt is None:  # the type asks for exactly one of the two
        return messages_of(query)
    (prompt,) = query.prompt if isinstance(query.prompt, list) else [query.prompt]
    return prompt


def _prefill_s(store: Store, cache_id: str, tenant: str) -> float:
    """Seconds of the prefills that made a cache and those that it grew from, as far as the shelf knows them."""
    try:
        first = store.stat(cache_id, tenant=tenant)
    except KvshelfError as error:
        log.info("what a cache saves is not known", cache_id=cache_id, reason=error.message)
        return 0.0
    return sum(manifest.timings.prefill_s for manifest in lineage(store, first))


def _wait_for(documents: Sequence[Attachment]) -> None:
    """Wait until all layers have arrived. Raises the error of one that could not be read."""
    for document in documents:
        for layer in range(document.num_layers):
            document.outlines(layer)


def _touch(store: Store, cache_id: str, tenant: str) -> None:
    """Record a use. Turns that uses renew are used with those behind them, which are found through them."""
    try:
        store.touch(cache_id, tenant=tenant)
        before = itertools.islice(lineage(store, store.stat(cache_id, tenant=tenant)), 1, None)
        for manifest in itertools.takewhile(lambda manifest: manifest.ttl_renew_s is not None, before):
            store.touch(manifest.id, tenant=tenant)
    except KvshelfError:
        log.warning("a use could not be recorded", cache_id=cache_id, exc_info=True)
