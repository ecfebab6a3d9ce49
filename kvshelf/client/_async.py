"""The client for asyncio: the calls of `_sync`, awaited."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

import httpx

from kvshelf.api.batches import BatchObject
from kvshelf.client import _batch_calls, _calls, _failures, _record_calls
from kvshelf.client._config import Connection, Retries, Timeouts
from kvshelf.client._exchange import HttpAttempts, HttpCall, ResultPage, method_of
from kvshelf.client._stream import BREAKS_OFF, AnswerReader, AnswerT, BatchReader, CreationEvent, CreationReader

P = ParamSpec("P")
T = TypeVar("T")


class _AsyncSender:
    def __init__(self, http: httpx.AsyncClient, connection: Connection) -> None:
        self.http = http
        self.connection = connection

    async def send(self, call: HttpCall[T]) -> T:
        with call.upload:
            return call.parse(await self.exchange(call, stream=False))

    async def exchange(self, call: HttpCall[Any], *, stream: bool) -> httpx.Response:
        attempts = HttpAttempts(call, self.connection)
        while True:
            try:
                request = self.http.build_request(**call.httpx_options(self.connection))
                response = await self.http.send(request, stream=stream)
                if call.is_answer(response):
                    return response
                await response.aread()
            except httpx.HTTPError as error:
                pause_s = attempts.pause_after_error(error)
            else:
                pause_s = attempts.pause_after_response(response)
            await asyncio.sleep(pause_s)


class _AsyncGroup:
    def __init__(self, sender: _AsyncSender) -> None:
        self._sender = sender


class AsyncAnswerStream(Generic[AnswerT]):
    """The pieces of a streamed answer, in order (`async for`). `await stream.final()` gives the whole answer.

    Closing it early, or leaving its `async with` block, hangs up, and the service stops generating.
    """

    def __init__(self, response: httpx.Response, url: httpx.URL, answer_type: type[AnswerT]) -> None:
        self._response = response
        self._url = url
        self._reader = AnswerReader(answer_type)
        self._pieces = self._read()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def final(self) -> AnswerT:
        """The whole answer; what has not been read yet is read first."""
        async for _ in self._pieces:
            pass
        return self._reader.close()

    async def aclose(self) -> None:
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _read(self) -> AsyncIterator[str]:
        try:
            async for line in self._response.aiter_lines():
                if text := self._reader.feed(line):
                    yield text
            self._reader.close()
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _failures.from_httpx(error, self._url) from error
        finally:
            await self._response.aclose()


def _awaited(build: Callable[P, HttpCall[T]]) -> Callable[Concatenate[_AsyncGroup, P], Awaitable[T]]:
    """The method that sends what `build` builds. It has the overloads, the arguments and the docstring of `build`."""

    @method_of(build)
    async def method(self: _AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._sender.send(build(*args, **kwargs))

    return method


def _listed(build: Callable[P, HttpCall[ResultPage[T]]]) -> Callable[Concatenate[_AsyncGroup, P], AsyncIterator[T]]:
    """The method that reads a listing page by page. Bad arguments are refused at once, not with the first page."""

    @method_of(build)
    def method(self: _AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return pages(self._sender, build(*args, **kwargs), functools.partial(build, *args, **kwargs))

    async def pages(
        sender: _AsyncSender, call: HttpCall[ResultPage[T]], following: Callable[..., HttpCall[ResultPage[T]]]
    ) -> AsyncIterator[T]:
        while True:
            page = await sender.send(call)
            for item in page.data:
                yield item
            if not page.has_more:
                return
            call = following(after=page.last_id)

    return method


def _streamed(
    build: Callable[P, HttpCall[type[AnswerT]]],
) -> Callable[Concatenate[_AsyncGroup, P], Awaitable[AsyncAnswerStream[AnswerT]]]:
    """The method that sends what `build` builds and reads the answer piece by piece."""

    @method_of(build)
    async def method(self: _AsyncGroup, /, *args: P.args, **kwargs: P.kwargs) -> AsyncAnswerStream[AnswerT]:
        call = build(*args, **kwargs)
        response = await self._sender.exchange(call, stream=True)
        return AsyncAnswerStream(response, self._sender.connection.base_url, call.parse(response))

    return method


class AsyncCaches(_AsyncGroup):
    create = _awaited(_calls.create_cache)
    append = _awaited(_calls.append_cache)
    remake = _awaited(_calls.remake_cache)
    turns = _awaited(_calls.list_turns)
    retrieve = _awaited(_calls.retrieve_cache)
    list = _listed(_calls.list_caches)
    update = _awaited(_calls.update_cache)
    warm = _awaited(_calls.warm_caches)
    delete = _awaited(_calls.delete_cache)
    search = _awaited(_calls.search_caches)
    query = _awaited(_calls.query_cache)
    stream = _streamed(_calls.stream_query)
    download = _awaited(_calls.download_cache)
    export = _awaited(_calls.export_cache)
    import_blob = _awaited(_calls.import_blob)
    verify = _awaited(_calls.verify_cache)
    kept = _awaited(_calls.kept_tokens)
    prompt = _awaited(_calls.built_prompt)

    async def create_events(self, **fields: Unpack[_calls.WatchFields]) -> AsyncIterator[CreationEvent]:
        """As `create`, with `CreationProgress` while it goes on, and last its answer: a cache, or a list of them.

        Where the events break off, an ordinary `create` gives the answer. Raises as `create` does.
        """
        reader = CreationReader()
        response = await self._sender.exchange(_calls.watched_creation(fields), stream=True)
        with suppress(*BREAKS_OFF):
            async with aclosing(response):
                async for line in response.aiter_lines():
                    if (event := reader.feed(line)) is not None:
                        yield event
        if not reader.ended:
            yield await self._sender.send(_calls.creation(fields))


class AsyncFiles(_AsyncGroup):
    create = _awaited(_batch_calls.create_file)
    retrieve = _awaited(_batch_calls.retrieve_file)
    list = _listed(_batch_calls.list_files)
    delete = _awaited(_batch_calls.delete_file)
    content = _awaited(_batch_calls.file_content)


class AsyncBatches(_AsyncGroup):
    create = _awaited(_batch_calls.create_batch)
    retrieve = _awaited(_batch_calls.retrieve_batch)
    list = _listed(_batch_calls.list_batches)
    cancel = _awaited(_batch_calls.cancel_batch)
    pause = _awaited(_batch_calls.pause_batch)
    resume = _awaited(_batch_calls.resume_batch)
    retry = _awaited(_batch_calls.retry_batch)

    async def events(self, id: str) -> AsyncIterator[BatchObject]:
        """A batch now, then after each change, and last at its end. Broken connections are renewed, after a pause.

        Raises `BatchNotFound`, `ConnectionFailed`.
        """
        reader = BatchReader(self._sender.connection.retries)
        while True:
            call = _batch_calls.batch_events(id, reader.last_event_id)
            response = await self._sender.exchange(call, stream=True)
            with suppress(httpx.HTTPError, httpx.StreamError):
                async with aclosing(response):
                    async for line in response.aiter_lines():
                        if (batch := reader.feed(line)) is not None:
                            yield batch
            if reader.ended:
                return
            await asyncio.sleep(reader.pause_after_break())


class AsyncCertificates(_AsyncGroup):
    keep = _awaited(_record_calls.keep_certificate)
    list = _awaited(_record_calls.list_certificates)
    retrieve = _awaited(_record_calls.retrieve_certificate)
    delete = _awaited(_record_calls.delete_certificate)


class AsyncWorkflows(_AsyncGroup):
    keep = _awaited(_record_calls.keep_workflow)
    list = _awaited(_record_calls.list_workflows)
    retrieve = _awaited(_record_calls.retrieve_workflow)
    delete = _awaited(_record_calls.delete_workflow)


class AsyncErasures(_AsyncGroup):
    create = _awaited(_record_calls.create_erasure)


class AsyncRequests(_AsyncGroup):
    retrieve = _awaited(_calls.retrieve_request)


class AsyncModels(_AsyncGroup):
    list = _awaited(_calls.list_models)


class AsyncPolicies(_AsyncGroup):
    list = _awaited(_calls.list_policies)


class AsyncSelectors(_AsyncGroup):
    list = _awaited(_calls.list_selectors)


class AsyncSuffixPolicies(_AsyncGroup):
    list = _awaited(_calls.list_suffix_policies)


class AsyncClient(_AsyncGroup):
    """`Client`, awaited: `await AsyncClient().caches.create(document=...)`. Close it, or use it in `async with`."""

    ready = _awaited(_calls.readiness)
    estimate = _awaited(_calls.estimate)
    usage = _awaited(_calls.usage)
    limits = _awaited(_calls.limits)

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        connection = Connection.resolve(url, api_key, timeouts, retries)
        self._http = httpx.AsyncClient(**connection.httpx_options(), transport=transport)
        super().__init__(_AsyncSender(self._http, connection))
        self.caches = AsyncCaches(self._sender)
        self.requests = AsyncRequests(self._sender)
        self.files = AsyncFiles(self._sender)
        self.batches = AsyncBatches(self._sender)
        self.erasures = AsyncErasures(self._sender)
        self.certificates = AsyncCertificates(self._sender)
        self.workflows = AsyncWorkflows(self._sender)
        self.models = AsyncModels(self._sender)
        self.policies = AsyncPolicies(self._sender)
        self.selectors = AsyncSelectors(self._sender)
        self.suffix_policies = AsyncSuffixPolicies(self._sender)

    async def aclose(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
