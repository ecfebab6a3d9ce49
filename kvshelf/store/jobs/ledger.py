"""Requests in flight, written down: what was asked, how often it was tried, who is at it, and how it ended.

An attempt is counted before its work begins, so a document that kills its worker is counted too. The attempt's number
is the fence: a holder whose lease ran out and whose request was taken over holds an old number and can do nothing with
it.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvshelf.errors import RequestNotFound, StateConflict
from kvshelf.store.manifest import Record

RequestState = Literal["queued", "running", "done", "failed"]


class RequestError(Record):
    """Why an attempt failed, in the words of the wire. `details` as those of a `KvshelfError`: JSON types only."""

    code: str
    message: str
    param: str | None = None
    details: dict[str, Any] | None = None


class RequestRecord(Record):
    """One request. Times are Unix seconds. `error` is the last attempt's, also while another one is to come.

    attempts: the number of the last attempt. Numbers never begin anew, also when the request is queued again after it
    had ended: `attempts_before` says how many of them belong to the time before that, or were not to be counted.
    """

    id: str
    tenant: str
    state: RequestState
    attempts: int
    attempts_before: int
    worker: str | None
    lease_until: float | None
    cache_ids: tuple[str, ...]
    error: RequestError | None
    created_at: float
    updated_at: float

    @property
    def tries(self) -> int:
        """Attempts that count, since the request was last queued anew."""
        return self.attempts - self.attempts_before


class Ledger(abc.ABC):
    """The requests of one home. Durable when a method returns. Leases are on the clock that all of the home's users
    share: the wall clock of a machine, or the server's."""

    @abc.abstractmethod
    def open_request(self, request_id: str, *, tenant: str, body: bytes, again: bool = False) -> RequestRecord:
        """Write a request down as queued. Durable when it returns; asking twice changes nothing.

        A failed request is queued anew. A finished one is returned as it is, unless `again` says that its caches are
        gone and it is to be done once more. Raises `StateConflict` for an id that another tenant holds: ids must be
        hashes that include the tenant.
        """

    @abc.abstractmethod
    def start_attempt(self, request_id: str, *, worker: str, lease_s: float) -> int:
        """Count an attempt and take the lease; returns the attempt's number, 1 for the first.

        A running request whose lease ran out is taken over. Raises `StateConflict` when another holder's lease lives
        or the request has ended, `RequestNotFound`.
        """

    @abc.abstractmethod
    def renew(self, request_id: str, attempt: int, *, lease_s: float) -> None:
        """Extend the lease from now. Raises `StateConflict` when the attempt no longer holds the request."""

    @abc.abstractmethod
    def finish(self, request_id: str, attempt: int, *, cache_ids: Sequence[str]) -> None:
        """The work is done, its caches are stored; the body is dropped. Raises `StateConflict` for a stale holder."""

    @abc.abstractmethod
    def fail(
        self,
        request_id: str,
        attempt: int,
        *,
        code: str,
        message: str,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        final: bool,
        counted: bool = True,
    ) -> None:
        """The attempt failed. `final`: for good, the body is dropped; otherwise the request is queued again.

        `counted` False: the request was not to blame, so `tries` is as if there had been no such attempt. Raises
        `StateConflict` for a stale holder.
        """

    @abc.abstractmethod
    def get_request(self, request_id: str, *, tenant: str) -> RequestRecord:
        """Raises `RequestNotFound` for an unknown id and for another tenant's, with the same message."""

    @abc.abstractmethod
    def body(self, request_id: str) -> bytes:
        """The request as it was given to `open_request`. Raises `StateConflict` once it was dropped."""

    @abc.abstractmethod
    def unfinished(self) -> list[RequestRecord]:
        """Requests queued or running, of all tenants, oldest first; bodies are fetched one by one with `body`."""

    @abc.abstractmethod
    def forget(self, before: float) -> int:
        """Drop requests that ended before a time (Unix seconds); returns how many."""


def not_found(request_id: str) -> RequestNotFound:
    return RequestNotFound(f"there is no request {request_id[:80]!r}", param="request_id")


def taken(request_id: str) -> StateConflict:
    return StateConflict(f"request id {request_id!r} is taken", param="request_id")


def ended(request_id: str, state: str) -> StateConflict:
    return StateConflict(f"request {request_id!r} has ended ({state}); there is nothing to do")


def at_work(request_id: str, worker: str, seconds: float) -> StateConflict:
    return StateConflict(
        f"request {request_id!r} is being worked on by {worker!r} for another {seconds:.1f} s at least"
    )


def stale(request_id: str, attempt: int, state: str, newest: int) -> StateConflict:
    return StateConflict(
        f"attempt {attempt} no longer holds request {request_id!r} (state {state}, attempt {newest}); its result is "
        "not needed"
    )


def dropped(request_id: str) -> StateConflict:
    return StateConflict(f"request {request_id!r} has ended and its body was dropped")
