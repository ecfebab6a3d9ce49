"""A kvshelf service in place of a store: what the connector asks of it, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from kvshelf.artifact import blob
from kvshelf.artifact.blob.frame import TRAILER
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.client import Client, Retries, Timeouts
from kvshelf.errors import BlobError, ConnectionFailed, StoreUnavailable
from kvshelf.integrations.vllm.request import ServiceCache
from kvshelf.store import checks

T = TypeVar("T")

SILENCE_S: Final = 10.0
"""How long the service may send nothing. vLLM stands still meanwhile. It is also the time in which the service checks a
whole blob before it sends the first byte."""

_REST_S: Final = 1.0


class ServiceShelf:
    """The methods of a `Store` that the connector calls, with its errors. The key of `KVSHELF_API_KEY` says whose
    caches there are; `tenant` only names it. Raises `InvalidRequest` for what is no URL of a service."""

    transforms: Mapping[str, bytes] = {}
    """None, because the API does not give them."""

    def __init__(self, url: str) -> None:
        timeouts = Timeouts(connect_s=2.0, read_s=SILENCE_S)
        # Repeated at once, for a kept connection that was just closed, and never later: vLLM would stand still.
        self._client = Client(url, timeouts=timeouts, retries=Retries(max_retries=1, backoff_s=0, max_wait_s=0))
        self._rests_until = 0.0

    def stat(self, cache_id: str, *, tenant: str) -> ServiceCache:
        return ServiceCache(cache_id, self._ask(self._client.caches.retrieve, cache_id).tokens.kept, tenant)

    def open_cache(self, cache_id: str, *, tenant: str) -> ArrivingCache:  # noqa: ARG002
        """Downloads the whole blob; its layers are checked when they are read. That it is the cache of this id is for
        the service to check, because ids are keyed by its shelf."""
        data = memoryview(self._ask(self._client.caches.download, cache_id))
        with _store_errors(cache_id):
            summary = blob.inspect(data)
        body = data[len(data) - TRAILER.size - summary.header.body_bytes : -TRAILER.size]
        return ArrivingCache(summary, body, partial(_store_errors, cache_id))

    def touch(self, cache_id: str, *, tenant: str) -> None:
        """Nothing, because the API has no call that only counts a use."""

    def close(self) -> None:
        self._client.close()

    def _ask(self, call: Callable[[str], T], cache_id: str) -> T:
        """Asks nothing for a second after the service did not answer: every request in vLLM would wait as long."""
        if time.monotonic() < self._rests_until:
            raise StoreUnavailable("the service did not answer a moment ago; try again in a second")
        try:
            with _store_errors(cache_id):
                return call(checks.require_id(cache_id))
        except StoreUnavailable:
            self._rests_until = time.monotonic() + _REST_S
            raise


@contextmanager
def _store_errors(cache_id: str) -> Iterator[None]:
    """The errors that a store has."""
    try:
        yield
    except BlobError as error:
        raise checks.corrupt(cache_id, error.message, error.reason) from error
    except ConnectionFailed as error:
        raise StoreUnavailable(error.message) from error
