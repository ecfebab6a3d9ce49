"""Responses that can be asked for again: what each said, sealed, and the cache of its turn.

A response is owned by the cache of its turn (`Item.owner`), with which it ends, at the latest after `KEEP_ENDED_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvshelf.errors import BlobError, ResponseNotFound
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.jobs.bodies import Bodies
from kvshelf.store.manifest import StoredBody, StoredRecord
from kvshelf.store.rules import Rules
from kvshelf.store.table import Item, JobTable, read

RESPONSE_PREFIX: Final = "response:"
"""Tells a sealed response from a sealed cache or file."""


class ResponseRecord(StoredRecord):
    """One response. cache_id: of its stored turn."""

    id: str
    tenant: str
    cache_id: str
    body: StoredBody


class Responses:
    """The responses of one home. Two tenants see nothing of each other. Raises as `JobTable` and `Blobs` do."""

    def __init__(self, table: JobTable, bodies: Bodies, rules: Rules, now: Callable[[], float]) -> None:
        self._table = table
        self._bodies = bodies
        self._keep_s = min(KEEP_ENDED_S, rules.max_ttl_s or KEEP_ENDED_S)
        self._now = now

    def keep(self, response_id: str, content: bytes, *, tenant: str, cache_id: str) -> None:
        """Keep the content of a response. It counts for the tenant's quota. Raises `QuotaExceeded`, `StorageFull`."""

        def store(body: StoredBody | None) -> Item | None:
            assert body is not None, "a response says something"
            record = ResponseRecord(id=response_id, tenant=tenant, cache_id=cache_id, body=body)
            place, due = (response_id, tenant, record.model_dump_json()), self._now() + self._keep_s
            return self._table.add(Item("response", *place, due=due, held=body.name, owner=cache_id, after_s=0.0))

        stored = self._bodies.write(tenant, RESPONSE_PREFIX + response_id, memoryview(content), store)
        assert stored is not None, "no other response has this id"

    def get(self, response_id: str, *, tenant: str, param: str = "response_id") -> ResponseRecord:
        """Raises `ResponseNotFound` for an unknown id, one whose time is over, and another tenant's. param: the field
        of the request that has the id."""
        item = self._table.find(response_id, tenant)
        if item is None or item.kind != "response" or (item.due is not None and item.due <= self._now()):
            raise not_found(response_id, param)
        return read(item, ResponseRecord)

    def read(self, record: ResponseRecord) -> bytes:
        """The content. Raises `ResponseNotFound` if it is lost or damaged."""
        try:
            return self._bodies.read(record.body, record.tenant, RESPONSE_PREFIX + record.id)
        except BlobError as error:
            raise not_found(record.id) from error

    def remove(self, record: ResponseRecord) -> None:
        # The item first: from then on nobody finds the bytes, and a sweep removes them if this process dies here.
        if self._table.remove(record.id):
            self._bodies.remove(record.body)

    def of_cache(self, cache_id: str, *, tenant: str) -> list[ResponseRecord]:
        """The responses whose turn is in a cache: equal answers share one."""
        items = self._table.owned(cache_id, tenant)
        return [read(item, ResponseRecord) for item in items if item.kind == "response"]


def not_found(response_id: str, param: str = "response_id") -> ResponseNotFound:
    return ResponseNotFound(
        f"there is no response {response_id[:80]!r}: it was not stored, or it has expired; send the whole conversation "
        "with cache_id",
        param=param,
    )
