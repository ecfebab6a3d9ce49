"""The client that blocks. Its methods are the calls of `_calls` and `_batch_calls`, sent."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

import httpx

from kvshelf.api.batches import BatchObject
from kvshelf.client import _batch_calls, _calls, _failures, _record_calls
from kvshelf.client._config import Connection, Retries, Timeouts
from kvshelf.client._exchange import HttpAttempts, HttpCall, ResultPage, method_of
from kvshelf.client._stream import BREAKS_OFF, AnswerReader, AnswerT, BatchReader, CreationEvent, CreationReader

P = ParamSpec("P")
T = TypeVar("T")


class _Sender:
    """Sends calls, and repeats them where `HttpAttempts` says so."""

    def __init__(self, http: httpx.Client, connection: Connection) -> None:
        self.http = http
        self.connection = connection

    def send(self, call: HttpCall[T]) -> T:
        with call.upload:
            return call.parse(self.exchange(call, stream=False))

    def exchange(self, call: HttpCall[Any], *, stream: bool) -> httpx.Response:
        attempts = HttpAttempts(call, self.connection)
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


class AnswerStream(Generic[AnswerT]):
    """The pieces of a streamed answer, in order. Once they are read, `answer` holds the whole.

    Closing it early, or leaving its `with` block, hangs up, and the service stops generating.
    """

    def __init__(self, response: httpx.Response, url: httpx.URL, answer_type: type[AnswerT]) -> None:
        self._response = response
        self._url = url
        self._reader = AnswerReader(answer_type)
        self._pieces = self._read()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> AnswerT:
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


def _sent(build: Callable[P, HttpCall[T]]) -> Callable[Concatenate[_Group, P], T]:
    """The method that sends what `build` builds. It has the overloads, the arguments and the docstring of `build`."""

    @method_of(build)
    def method(self: _Group, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._sender.send(build(*args, **kwargs))

    return method


def _listed(build: Callable[P, HttpCall[ResultPage[T]]]) -> Callable[Concatenate[_Group, P], Iterator[T]]:
    """The method that reads a listing page by page. Bad arguments are refused at once, not with the first page."""

    @method_of(build)
    def method(self: _Group, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return pages(self._sender, build(*args, **kwargs), functools.partial(build, *args, **kwargs))

    def pages(
        sender: _Sender, call: HttpCall[ResultPage[T]], following: Callable[..., HttpCall[ResultPage[T]]]
    ) -> Iterator[T]:
        while True:
            page = sender.send(call)
            yield from page.data
            if not page.has_more:
                return
            call = following(after=page.last_id)

    return method


def _streamed(build: Callable[P, HttpCall[type[AnswerT]]]) -> Callable[Concatenate[_Group, P], AnswerStream[AnswerT]]:
    """The method that sends what `build` builds and reads the answer piece by piece."""

    @method_of(build)
    def method(self: _Group, /, *args: P.args, **kwargs: P.kwargs) -> AnswerStream[AnswerT]:
        call = build(*args, **kwargs)
        response = self._sender.exchange(call, stream=True)
        return AnswerStream(response, self._sender.connection.base_url, call.parse(response))

    return method


class Caches(_Group):
    """The shelf: `client.caches`."""

    create = _sent(_calls.create_cache)
    append = _sent(_calls.append_cache)
    remake = _sent(_calls.remake_cache)
    turns = _sent(_calls.list_turns)
    retrieve = _sent(_calls.retrieve_cache)
    list = _listed(_calls.list_caches)
    update = _sent(_calls.update_cache)
    warm = _sent(_calls.warm_caches)
    delete = _sent(_calls.delete_cache)
    search = _sent(_calls.search_caches)
    query = _sent(_calls.query_cache)
    stream = _streamed(_calls.stream_query)
    download = _sent(_calls.download_cache)
    export = _sent(_calls.export_cache)
    import_blob = _sent(_calls.import_blob)
    verify = _sent(_calls.verify_cache)
    kept = _sent(_calls.kept_tokens)
    prompt = _sent(_calls.built_prompt)

    def create_events(self, **fields: Unpack[_calls.WatchFields]) -> Iterator[CreationEvent]:
        """As `create`, with `CreationProgress` while it goes on, and last its answer: a cache, or a list of them.

        Where the events break off, an ordinary `create` gives the answer. Raises as `create` does.
        """
        reader = CreationReader()
        response = self._sender.exchange(_calls.watched_creation(fields), stream=True)
        with suppress(*BREAKS_OFF), closing(response):
            for line in response.iter_lines():
                if (event := reader.feed(line)) is not None:
                    yield event
        if not reader.ended:
            yield self._sender.send(_calls.creation(fields))


class Files(_Group):
    """The inputs and outputs of batches: `client.files`."""

    create = _sent(_batch_calls.create_file)
    retrieve = _sent(_batch_calls.retrieve_file)
    list = _listed(_batch_calls.list_files)
    delete = _sent(_batch_calls.delete_file)
    content = _sent(_batch_calls.file_content)


class Batches(_Group):
    """Files compressed row by row in the background: `client.batches`."""

    create = _sent(_batch_calls.create_batch)
    retrieve = _sent(_batch_calls.retrieve_batch)
    list = _listed(_batch_calls.list_batches)
    cancel = _sent(_batch_calls.cancel_batch)
    pause = _sent(_batch_calls.pause_batch)
    resume = _sent(_batch_calls.resume_batch)
    retry = _sent(_batch_calls.retry_batch)

    def events(self, id: str) -> Iterator[BatchObject]:
        """A batch now, then after each change, and last at its end. Broken connections are renewed, after a pause.

        Raises `BatchNotFound`, `ConnectionFailed`.
        """
        reader = BatchReader(self._sender.connection.retries)
        while True:
            call = _batch_calls.batch_events(id, reader.last_event_id)
            response = self._sender.exchange(call, stream=True)
            with suppress(httpx.HTTPError, httpx.StreamError), closing(response):
                for line in response.iter_lines():
                    if (batch := reader.feed(line)) is not None:
                        yield batch
            if reader.ended:
                return
            time.sleep(reader.pause_after_break())


class Certificates(_Group):
    """Bounds of the answers that compressed caches lose: `client.certificates`."""

    keep = _sent(_record_calls.keep_certificate)
    list = _sent(_record_calls.list_certificates)
    retrieve = _sent(_record_calls.retrieve_certificate)
    delete = _sent(_record_calls.delete_certificate)


class Workflows(_Group):
    """Which caches the steps of an agent workflow ask: `client.workflows`."""

    keep = _sent(_record_calls.keep_workflow)
    list = _sent(_record_calls.list_workflows)
    retrieve = _sent(_record_calls.retrieve_workflow)
    delete = _sent(_record_calls.delete_workflow)


class Erasures(_Group):
    """Everything of a subject goes, with a receipt: `client.erasures`."""

    create = _sent(_record_calls.create_erasure)


class Requests(_Group):
    """Creations in the background: `client.requests`."""

    retrieve = _sent(_calls.retrieve_request)


class Models(_Group):
    list = _sent(_calls.list_models)


class Policies(_Group):
    list = _sent(_calls.list_policies)


class Selectors(_Group):
    list = _sent(_calls.list_selectors)


class SuffixPolicies(_Group):
    list = _sent(_calls.list_suffix_policies)


class Client(_Group):
    """A kvshelf service: `Client().caches.create(document=...)`. Close it, or use it in a `with` block.

    `url` falls back to KVSHELF_URL, then to the local default port; `api_key` to KVSHELF_API_KEY. Calls that meet a
    busy or unreachable service are repeated (`retries`); creation is idempotent by content, so nothing is done twice.
    Errors are those of `kvshelf.errors`: the service's, and `ConnectionFailed`. `transport` replaces the network.
    """

    ready = _sent(_calls.readiness)
    estimate = _sent(_calls.estimate)
    usage = _sent(_calls.usage)
    limits = _sent(_calls.limits)

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
        self.erasures = Erasures(self._sender)
        self.certificates = Certificates(self._sender)
        self.workflows = Workflows(self._sender)
        self.models = Models(self._sender)
        self.policies = Policies(self._sender)
        self.selectors = Selectors(self._sender)
        self.suffix_policies = SuffixPolicies(self._sender)

    def close(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
