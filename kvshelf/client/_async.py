"""The client for asyncio: the same calls as in `_sync`, awaited."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, overload

import httpx

from kvshelf.api import AnswerObject, CacheObject, RequestObject
from kvshelf.api.batches import BatchObject, FileObject
from kvshelf.client import _batch_calls, _calls, _failures
from kvshelf.client._config import Connection, Retries, Timeouts
from kvshelf.client._exchange import Attempts, Call
from kvshelf.client._stream import AnswerReader, BatchReader

P = ParamSpec("P")
T = TypeVar("T")


class _Sender:
    """Sends calls, and repeats them where `Attempts` says so."""

    def __init__(self, http: httpx.AsyncClient, connection: Connection) -> None:
        self.http = http
        self.connection = connection

    async def send(self, call: Call[T]) -> T:
        return call.parse(await self.exchange(call, stream=False))

    async def exchange(self, call: Call[Any], *, stream: bool) -> httpx.Response:
        attempts = Attempts(call, self.connection)
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


class _Group:
    """A group of calls, such as `client.caches`."""

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender

    def _all(self, build: Callable[[Any], Call[Any]], fields: Mapping[str, Any]) -> AsyncIterator[Any]:
        """What a listing holds; `build` makes the call for the page that the fields name. Bad fields are refused at
        once, not when the first page is read."""
        return self._pages(build, build(fields), fields)

    async def _pages(
        self, build: Callable[[Any], Call[Any]], call: Call[Any], fields: Mapping[str, Any]
    ) -> AsyncIterator[Any]:
        while True:
            page = await self._sender.send(call)
            for each in page.data:
                yield each
            if not page.has_more:
                return
            call = build({**fields, "after": page.last_id})


class _Method(Generic[P, T]):
    """A method made from the function that builds its call: the same arguments, and the call's answer as the result."""

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        self._build = build

    def __get__(self, group: _Group, owner: type[_Group]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(self._build)
        async def method(*args: P.args, **kwargs: P.kwargs) -> T:
            return await group._sender.send(self._build(*args, **kwargs))

        return method


class AsyncAnswerStream:
    """The pieces of a streamed answer, in order (`async for`). `await stream.final()` gives the whole answer.

    Closing it early, or leaving its `async with` block, hangs up, and the service stops generating.
    """

    def __init__(self, response: httpx.Response, url: httpx.URL) -> None:
        self._response = response
        self._url = url
        self._reader = AnswerReader()
        self._pieces = self._read()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def final(self) -> AnswerObject:
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


class AsyncCaches(_Group):
    """The shelf: `client.caches`. Arguments, results and errors are those of `Client.caches`."""

    retrieve = _Method(_calls.retrieve_cache)
    update = _Method(_calls.update_cache)
    delete = _Method(_calls.delete_cache)
    download = _Method(_calls.download_cache)
    import_blob = _Method(_calls.import_blob)
    verify = _Method(_calls.verify_cache)
    kept = _Method(_calls.kept_tokens)

    @overload
    async def create(
        self, *, levels: None = None, respond_async: Literal[False] = False, **fields: Unpack[_calls.CreateFields]
    ) -> CacheObject: ...
    @overload
    async def create(
        self,
        *,
        levels: Sequence[float],
        min_quality: float,
        respond_async: Literal[False] = False,
        **fields: Unpack[_calls.KeepFields],
    ) -> CacheObject: ...
    @overload
    async def create(
        self,
        *,
        levels: Sequence[float],
        min_quality: None = None,
        respond_async: Literal[False] = False,
        **fields: Unpack[_calls.KeepFields],
    ) -> _calls.Levels: ...
    @overload
    async def create(
        self,
        *,
        levels: Sequence[float] | None = None,
        respond_async: Literal[True],
        **fields: Unpack[_calls.CreateFields],
    ) -> RequestObject: ...
    async def create(
        self,
        *,
        levels: Sequence[float] | None = None,
        respond_async: bool = False,
        **fields: Unpack[_calls.CreateFields],
    ) -> CacheObject | _calls.Levels | RequestObject:
        """Compress a document and put it on the shelf, as `Client.caches.create` does."""
        if respond_async:
            return await self._sender.send(_calls.create_in_background({**fields, "levels": levels}))
        return await self._sender.send(_calls.create_cache({**fields, "levels": levels}))

    def list(self, **fields: Unpack[_calls.ListFields]) -> AsyncIterator[CacheObject]:
        """All caches that match, for `async for`; the arguments are those of `Client.caches.list`."""
        return self._all(_calls.list_caches, fields)

    @overload
    async def query(self, id: str, prompt: str, **fields: Unpack[_calls.QueryFields]) -> AnswerObject: ...
    @overload
    async def query(self, id: str, prompt: _calls.Prompts, **fields: Unpack[_calls.QueryFields]) -> _calls.Answers: ...
    @overload
    async def query(
        self, id: str, *, messages: _calls.Messages, **fields: Unpack[_calls.QueryFields]
    ) -> AnswerObject: ...
    async def query(
        self,
        id: str,
        prompt: str | _calls.Prompts | None = None,
        *,
        messages: _calls.Messages | None = None,
        **fields: Unpack[_calls.QueryFields],
    ) -> AnswerObject | _calls.Answers:
        """Ask one question, several (a list), or continue with chat `messages`, as `Client.caches.query` does."""
        return await self._sender.send(_calls.query_cache(id, {"prompt": prompt, "messages": messages, **fields}))

    async def stream(
        self,
        id: str,
        prompt: str | None = None,
        *,
        messages: _calls.Messages | None = None,
        **fields: Unpack[_calls.QueryFields],
    ) -> AsyncAnswerStream:
        """As `query`, with the text as it is generated. The question is on its way when this has been awaited."""
        call = _calls.stream_query(id, {"prompt": prompt, "messages": messages, **fields})
        return AsyncAnswerStream(await self._sender.exchange(call, stream=True), self._sender.connection.base_url)


class AsyncFiles(_Group):
    """The inputs and outputs of batches: `client.files`."""

    retrieve = _Method(_batch_calls.retrieve_file)
    delete = _Method(_batch_calls.delete_file)
    content = _Method(_batch_calls.file_content)

    async def create(
        self,
        *,
        file: _batch_calls.FileInput,
        purpose: str = "batch",
        expires_after: _batch_calls.ExpiresAfter | None = None,
    ) -> FileObject:
        """Upload a path, bytes, an open file, or one of these with a name, sent in pieces from where it lies.

        Raises `InvalidRequest`, `BodyTooLarge`, `QuotaExceeded`, `StorageFull`.
        """
        with _batch_calls.opened(file) as (name, content):
            call = _batch_calls.create_file(name, content, purpose=purpose, expires_after=expires_after)
            return await self._sender.send(call)

    def list(self, **fields: Unpack[_batch_calls.FileFilters]) -> AsyncIterator[FileObject]:
        """All files, newest first; `purpose` filters. They are fetched `limit` at a time as they are read."""
        return self._all(_batch_calls.list_files, fields)


class AsyncBatches(_Group):
    """Files compressed row by row in the background: `client.batches`."""

    create = _Method(_batch_calls.create_batch)
    retrieve = _Method(_batch_calls.retrieve_batch)
    cancel = _Method(_batch_calls.cancel_batch)
    pause = _Method(_batch_calls.pause_batch)
    resume = _Method(_batch_calls.resume_batch)
    retry = _Method(_batch_calls.retry_batch)

    def list(self, **fields: Unpack[_batch_calls.BatchFilters]) -> AsyncIterator[BatchObject]:
        """All batches, newest first. They are fetched `limit` at a time as they are read."""
        return self._all(_batch_calls.list_batches, fields)

    async def events(self, id: str) -> AsyncIterator[BatchObject]:
        """A batch as it is, then each time that it has changed, at last as it ended. Broken connections are renewed.

        Raises `BatchNotFound`, `ConnectionFailed`.
        """
        reader = BatchReader()
        while not reader.ended:
            response = await self._sender.exchange(_batch_calls.batch_events(id, reader.seen), stream=True)
            with suppress(httpx.HTTPError, httpx.StreamError):
                async with aclosing(response):
                    async for line in response.aiter_lines():
                        if (batch := reader.feed(line)) is not None:
                            yield batch


class AsyncRequests(_Group):
    """Creations in the background: `client.requests`."""

    retrieve = _Method(_calls.retrieve_request)


class AsyncModels(_Group):
    """`client.models`."""

    list = _Method(_calls.list_models)


class AsyncPolicies(_Group):
    """`client.policies`."""

    list = _Method(_calls.list_policies)


class AsyncClient(_Group):
    """`Client`, awaited: `await AsyncClient().caches.create(document=...)`. Close it, or use it in `async with`."""

    ready = _Method(_calls.readiness)
    estimate = _Method(_calls.estimate)

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
        super().__init__(_Sender(self._http, connection))
        self.caches = AsyncCaches(self._sender)
        self.requests = AsyncRequests(self._sender)
        self.files = AsyncFiles(self._sender)
        self.batches = AsyncBatches(self._sender)
        self.models = AsyncModels(self._sender)
        self.policies = AsyncPolicies(self._sender)

    async def aclose(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
