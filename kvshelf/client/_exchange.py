"""One exchange with the service, without doing any input or output: what to send, what an answer means, when to repeat.

Both clients are thin loops around this module, so a rule that holds for one of them holds for the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from kvshelf.client import _failures
from kvshelf.client._config import Connection, Retries
from kvshelf.errors import KvshelfError

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)

_RETRIED_STATUSES = frozenset({429, 503})

# A quota is not freed by waiting a few seconds. After a worker's crash a call is repeated on purpose: most of those
# that it took with it were innocent, and one that is to blame is given up after as many attempts as the service makes.
_FINAL_CODES = frozenset({"quota_exceeded"})

# Refused before anything was done. That a store or a worker failed says nothing of what it had done by then.
_NOTHING_DONE = frozenset({"rate_limited", "queue_full", "no_worker"})

# The request never reached the service, so that repeating it repeats nothing.
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout)


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call of the API: the request, and how its answer is read.

    `repeatable` says that the call may be sent again although the first one may have been carried out. That is so for
    creations, which are idempotent by content, and for what only reads or changes; not for deletion, nor for new files
    and batches. `extra_read_s` lengthens the read timeout by what the
    service was asked to wait. `accepts` are statuses that carry an answer besides the successful ones.
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    extra_read_s: float = 0.0
    accepts: frozenset[int] = frozenset()

    def is_answer(self, response: httpx.Response) -> bool:
        """Whether `response` is what was asked for; otherwise it carries an error."""
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


@dataclass
class Attempts:
    """Decides after each failed attempt of one call: the pause before the next one (seconds), or the error."""

    call: Call[Any]
    connection: Connection
    made: int = 0

    def pause_after_response(self, response: httpx.Response) -> float:
        """`response` has been read and is no success. Returns the pause, or raises the error that it carries."""
        error = _failures.from_response(response)
        passing = response.status_code in _RETRIED_STATUSES and error.code not in _FINAL_CODES
        if not passing or not (self.call.repeatable or error.code in _NOTHING_DONE):
            raise error
        return self._pause(error, asked_s=error.details.get("retry_after_s"))

    def pause_after_error(self, error: httpx.HTTPError | httpx.StreamError) -> float:
        """httpx raised `error`. Returns the pause, or raises what the error is translated to."""
        translated = _failures.from_httpx(error, self.connection.base_url)
        broken = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
        if not (isinstance(error, _NEVER_SENT) or (broken and self.call.repeatable)):
            raise translated from error
        return self._pause(translated, asked_s=None)

    def _pause(self, error: KvshelfError, *, asked_s: float | None) -> float:
        retries = self.connection.retries
        if self.made >= retries.max_retries or (asked_s is not None and asked_s > retries.max_wait_s):
            raise error
        self.made += 1
        return backoff_s(retries, self.made - 1) if asked_s is None else asked_s


def backoff_s(retries: Retries, repeat: int) -> float:
    """The pause before repeat number `repeat`, counted from 0: exponential, up to a quarter less by chance."""
    return min(retries.backoff_s * 2.0**repeat, retries.max_backoff_s) * random.uniform(0.75, 1.0)


def parse_as(cls: type[ModelT]) -> Callable[[httpx.Response], ModelT]:
    """Reads a response's JSON as the API type `cls`."""

    def parse(response: httpx.Response) -> ModelT:
        try:
            return cls.model_validate_json(response.content)
        except ValidationError as error:
            raise _failures.not_kvshelf(response) from error

    return parse
