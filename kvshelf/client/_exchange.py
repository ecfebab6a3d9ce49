"""One exchange with the service, without any input or output: its request, the meaning of its answer, its repeats."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from kvshelf.client import _failures
from kvshelf.client._config import Connection
from kvshelf.errors import KvshelfError

T_co = TypeVar("T_co", covariant=True)
MethodT = TypeVar("MethodT", bound=Callable[..., Any])
ModelT = TypeVar("ModelT", bound=BaseModel)

_RETRIED_STATUSES = frozenset({429, 503})

# Waiting a few seconds does not free a quota. A call is repeated after a worker's crash: most calls that fail with a
# worker did not cause the crash, and the service gives up a document after a few crashes.
_FINAL_CODES = frozenset({"quota_exceeded"})

# Refused before any work. A store or a worker that failed may have done the work before.
_NOTHING_DONE = frozenset({"rate_limited", "queue_full", "service_busy", "no_worker"})

# The request never reached the service: the repeat is the first one that arrives.
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout)


@dataclass(frozen=True)
class HttpCall(Generic[T_co]):
    """One call of the API: the request, and how its answer is read.

    `repeatable`: the call may be sent again even if the service may have carried out the first one. Creations are
    idempotent by content, reads and changes by nature; deletions, new files and new batches are not. `extra_read_s`
    lengthens the read timeout by the time that the service waits before it answers. `accepts` are statuses that carry
    an answer besides the successful ones. `upload` is the file of an upload, closed after the exchange.
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], T_co]
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    extra_read_s: float = 0.0
    accepts: frozenset[int] = frozenset()
    upload: AbstractContextManager[object] = field(default_factory=nullcontext)

    def is_answer(self, response: httpx.Response) -> bool:
        """Whether `response` carries the answer; otherwise it carries an error."""
        return response.is_success or response.status_code in self.accepts

    def httpx_options(self, connection: Connection) -> dict[str, Any]:
        """Keywords of `httpx.Client.request` and `.stream`. `body` holds `json`, `content`, or `files` and `data`."""
        return {
            "method": self.method,
            "url": self.path,
            "params": {key: value for key, value in self.params.items() if value is not None},
            "headers": dict(self.headers),
            "timeout": connection.timeouts.to_httpx(extra_read_s=self.extra_read_s),
            **self.body,
        }


class ResultPage(Protocol[T_co]):
    """One page of a listing; `last_id` is where the next one begins."""

    @property
    def data(self) -> Sequence[T_co]: ...
    @property
    def has_more(self) -> bool: ...
    @property
    def last_id(self) -> str | None: ...


@dataclass
class HttpAttempts:
    """Decides after each failed attempt of one call: the pause before the next one (seconds), or the error."""

    call: HttpCall[Any]
    connection: Connection
    repeats: int = 0

    def pause_after_response(self, response: httpx.Response) -> float:
        """The pause after an error response, already read; or raises the error that the response carries."""
        error = _failures.from_response(response)
        passing = response.status_code in _RETRIED_STATUSES and error.code not in _FINAL_CODES
        if not passing or not (self.call.repeatable or error.code in _NOTHING_DONE):
            raise error
        return self._pause(error, error.details.get("retry_after_s"))

    def pause_after_error(self, error: httpx.HTTPError | httpx.StreamError) -> float:
        """The pause after an exception of httpx, or raises its translation."""
        translated = _failures.from_httpx(error, self.connection.base_url)
        broken = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
        if not (isinstance(error, _NEVER_SENT) or (broken and self.call.repeatable)):
            raise translated from error
        return self._pause(translated, None)

    def _pause(self, error: KvshelfError, retry_after_s: float | None) -> float:
        retries = self.connection.retries
        too_long = retry_after_s is not None and retry_after_s > retries.max_wait_s
        if self.repeats >= retries.max_retries or too_long:
            raise error
        self.repeats += 1
        return retries.pause_s(self.repeats - 1) if retry_after_s is None else retry_after_s


def parse_as(cls: type[ModelT]) -> Callable[[httpx.Response], ModelT]:
    """Reads a response's JSON as the API type `cls`."""

    def parse(response: httpx.Response) -> ModelT:
        try:
            return cls.model_validate_json(response.content)
        except ValidationError as error:
            raise _failures.not_kvshelf(response) from error

    return parse


def method_of(build: Callable[..., Any]) -> Callable[[MethodT], MethodT]:
    """Give a client's method the name, the docstring and the signature of the function that builds its call."""

    def decorate(method: MethodT) -> MethodT:
        functools.update_wrapper(method, build)
        built = inspect.signature(build)
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = built.replace(parameters=[this, *built.parameters.values()])  # type: ignore[attr-defined]
        return method

    return decorate
