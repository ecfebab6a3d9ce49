"""The client that blocks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
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

    def __init__(self, http: httpx.Client, connection: Connection) -> None:
        self.http = http
        self.connection = connection

    def send(self, call: Call[T]) -> T:
        return call.parse(self.exchange(call, stream=False))

    def exchange(self, call: Call[Any], *, stream: bool) -> httpx.Response:
        attempts = Attempts(call, self.connection)
        while True:
            try:
                request = self.http.build_request(**call.httpx_options(self.connection))
                response = self.http.send(request, stream=stream)
                if call.is_answer(response):
                    return response
                response.read()
            except httpx.HTTPError as error:
                pause_s = attempts.pause_after_error(error)
            else:
                pause_s = attempts.pause_after_response(response)
            time.sleep(pause_s)


class _Group:
    """A group of calls, such as `client.caches`."""

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender

    def _all(self, build: Callable[[Any], Call[Any]], fields: Mapping[str, Any]) -> Iterator[Any]:
        """What a listing holds; `build` makes the call for the page that the fields name. Bad fields are refused at
        once, not when the first page is read."""
        return self._pages(build, build(fields), fields)

    def _pages(self, build: Callable[[Any], Call[Any]], call: Call[Any], fields: Mapping[str, Any]) -> Iterator[Any]:
        while True:
            page = self._sender.send(call)
            yield from page.data
            if not page.has_more:
                return
            call = build({**fields, "after": page.last_id})


class _Method(Generic[P, T]):
    """A method made from the function that builds its call: the same arguments, and the call's answer as the result."""

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        self._build = build

    def __get__(self, group: _Group, owner: type[_Group]) -> Callable[P, T]:
        @functools.wraps(self._build)
        def method(*args: P.args, **kwargs: P.kwargs) -> T:
            return group._sender.send(self._build(*args, **kwargs))

        return method


class AnswerStream:
    """The pieces of a streamed answer, in order. Once they are read, `answer` holds the whole.

    Closing it early, or leaving its `with` block, hangs up, and the service stops generating.
    """

    def __init__(self, response: httpx.Response, url: httpx.URL) -> None:
        self._response = response
        self._url = url
        self._reader = AnswerReader()
        self._pieces = self._read()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> AnswerObject:
        """The whole answer; what has not been read yet is read first."""
        for _ in self._pieces:
            pass
        return self._reader.close()

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self) -> Iterator[str]:
        try:
            for line in self._response.iter_lines():
                if text := self._reader.feed(line):
                    yield text
            self._reader.close()
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _failures.from_httpx(error, self._url) from error
        finally:
            self._response.close()


class Caches(_Group):
    """The shelf: `client.caches`."""

    retrieve = _Method(_calls.retrieve_cache)
    update = _Method(_calls.update_cache)
    delete = _Method(_calls.delete_cache)
    download = _Method(_calls.download_cache)
    import_blob = _Method(_calls.import_blob)
    verify = _Method(_calls.verify_cache)
    kept = _Method(_calls.kept_tokens)

    @overload
    def create(
        self, *, levels: None = None, respond_async: Literal[False] = False, **fields: Unpack[_calls.CreateFields]
    ) -> CacheObject: ...
    @overload
    def create(
        self,
        *,
        levels: Sequence[float],
        min_quality: float,
        respond_async: Literal[False] = False,
        **fields: Unpack[_calls.KeepFields],
    ) -> CacheObject: ...
    @overload
    def create(
        self,
        *,
        levels: Sequence[float],
        min_quality: None = None,
        respond_async: Literal[False] = False,
        **fields: Unpack[_calls.KeepFields],
    ) -> _calls.Levels: ...
    @overload
    def create(
        self,
        *,
        levels: Sequence[float] | None = None,
        respond_async: Literal[True],
        **fields: Unpack[_calls.CreateFields],
    ) -> RequestObject: ...
    def create(
        self,
        *,
        levels: Sequence[float] | None = None,
        respond_async: bool = False,
        **fields: Unpack[_calls.CreateFields],
    ) -> CacheObject | _calls.Levels | RequestObject:
        """Compress a document and put it on the shelf; a cache that is there already comes back with `existing` true.

        One of `document` (text), `messages`, `token_ids` and `file` (a path), and as keywords `model`, `layout`,
        `policy`, `policy_params`, `compression_ratio` (the fraction removed) or `budget_tokens`, `codec`, `ttl_s` or
        `expires_at`, `name`, `labels`, and `keep_source` to keep the text beside the cache. With `respond_async` the
        request comes back at once, for `client.requests.retrieve`.

        `levels` are several compression ratios at once, whose caches come back in a list, from one prefill. With
        `min_quality` only the smallest that agrees with the full cache so far is kept; the policy "auto" chooses
        policy, ratio and codec in the same way. What was tried is in the cache's `tried`.

        Raises `InvalidRequest`, `DocumentTooLong`, `DocumentTooShort`, `PolicyUnsupported`, `QualityBelowFloor`,
        `QueueFull`, ...
        """
        if respond_async:
            return self._sender.send(_calls.create_in_background({**fields, "levels": levels}))
        return self._sender.send(_calls.create_cache({**fields, "levels": levels}))

    def list(self, **fields: Unpack[_calls.ListFields]) -> Iterator[CacheObject]:
        """All caches that match `document_id`, `model`, `policy` and `labels`.

        They are fetched `limit` at a time as they are read; `after` is the id to go on from.
        """
        return self._all(_calls.list_caches, fields)

    @overload
    def query(self, id: str, prompt: str, **fields: Unpack[_calls.QueryFields]) -> AnswerObject: ...
    @overload
    def query(self, id: str, prompt: _calls.Prompts, **fields: Unpack[_calls.QueryFields]) -> _calls.Answers: ...
    @overload
    def query(self, id: str, *, messages: _calls.Messages, **fields: Unpack[_calls.QueryFields]) -> AnswerObject: ...
    def query(
        self,
        id: str,
        prompt: str | _calls.Prompts | None = None,
        *,
        messages: _calls.Messages | None = None,
        **fields: Unpack[_calls.QueryFields],
    ) -> AnswerObject | _calls.Answers:
        """Ask one question, several independent ones (a list), or continue with chat `messages`.

        Keywords: `max_tokens`, `temperature`, `top_p`, `seed`, `stop`, `compare`, `on_miss`. Raises `CacheNotFound`,
        `CacheExpired`, `CacheCorrupt`, `ModelMismatch`, `SourceNotKept`, ...
        """
        return self._sender.send(_calls.query_cache(id, {"prompt": prompt, "messages": messages, **fields}))

    def stream(
        self,
        id: str,
        prompt: str | None = None,
        *,
        messages: _calls.Messages | None = None,
        **fields: Unpack[_calls.QueryFields],
    ) -> AnswerStream:
        """As `query`, with the text as it is generated. The question is on its way when this returns."""
        call = _calls.stream_query(id, {"prompt": prompt, "messages": messages, **fields})
        return AnswerStream(self._sender.exchange(call, stream=True), self._sender.connection.base_url)


class Files(_Group):
    """The inputs and outputs of batches: `client.files`."""

    retrieve = _Method(_batch_calls.retrieve_file)
    delete = _Method(_batch_calls.delete_file)
    content = _Method(_batch_calls.file_content)

    def create(
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
            return self._sender.send(call)

    def list(self, **fields: Unpack[_batch_calls.FileFilters]) -> Iterator[FileObject]:
        """All files, newest first; `purpose` filters. They are fetched `limit` at a time as they are read."""
        return self._all(_batch_calls.list_files, fields)


class Batches(_Group):
    """Files compressed row by row in the background: `client.batches`."""

    create = _Method(_batch_calls.create_batch)
    retrieve = _Method(_batch_calls.retrieve_batch)
    cancel = _Method(_batch_calls.cancel_batch)
    pause = _Method(_batch_calls.pause_batch)
    resume = _Method(_batch_calls.resume_batch)
    retry = _Method(_batch_calls.retry_batch)

    def list(self, **fields: Unpack[_batch_calls.BatchFilters]) -> Iterator[BatchObject]:
        """All batches, newest first. They are fetched `limit` at a time as they are read."""
        return self._all(_batch_calls.list_batches, fields)

    def events(self, id: str) -> Iterator[BatchObject]:
        """A batch as it is, then each time that it has changed, at last as it ended. Broken connections are renewed.

        Raises `BatchNotFound`, `ConnectionFailed`.
        """
        reader = BatchReader()
        while not reader.ended:
            response = self._sender.exchange(_batch_calls.batch_events(id, reader.seen), stream=True)
            with suppress(httpx.HTTPError, httpx.StreamError), closing(response):
                for line in response.iter_lines():
                    if (batch := reader.feed(line)) is not None:
                        yield batch


class Requests(_Group):
    """Creations in the background: `client.requests`."""

    retrieve = _Method(_calls.retrieve_request)


class Models(_Group):
    """`client.models`."""

    list = _Method(_calls.list_models)


class Policies(_Group):
    """`client.policies`."""

    list = _Method(_calls.list_policies)


class Client(_Group):
    """A kvshelf service: `Client().caches.create(document=...)`. Close it, or use it in a `with` block.

    `url` falls back to KVSHELF_URL, then to the local default port; `api_key` to KVSHELF_API_KEY. Calls that meet a
    busy or unreachable service are repeated (`retries`); creation is idempotent by content, so nothing is done twice.
    Errors are those of `kvshelf.errors`: the ones the service raised, and `ConnectionFailed`. `transport` replaces the
    network.
    """

    ready = _Method(_calls.readiness)
    estimate = _Method(_calls.estimate)

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        connection = Connection.resolve(url, api_key, timeouts, retries)
        self._http = httpx.Client(**connection.httpx_options(), transport=transport)
        super().__init__(_Sender(self._http, connection))
        self.caches = Caches(self._sender)
        self.requests = Requests(self._sender)
        self.files = Files(self._sender)
        self.batches = Batches(self._sender)
        self.models = Models(self._sender)
        self.policies = Policies(self._sender)

    def close(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
