"""Responses that can be asked for again: what each said, sealed, and the cache of its turn.

A response is deleted with the cache of its turn, which names it in a label, or after `KEEP_ENDED_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvshelf.errors import BlobError, ResponseNotFound
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.jobs.bodies import Bodies
from kvshelf.store.jobs.table import Item, JobTable, read
from kvshelf.store.manifest import Body, Record

RESPONSE_ID: Final = "resp_"
"""Begins the ids of responses."""

RESPONSE_PREFIX: Final = "response:"
"""Tells a sealed response from a sealed cache or file."""


class ResponseRecord(Record):
    """One response. cache_id: of its stored turn."""

    id: str
    tenant: str
    cache_id: str
    body: Body


class Responses:
    """The responses of one home. Two tenants see nothing of each other. Raises as `JobTable` and `Blobs` do."""

    def __init__(self, table: JobTable, bodies: Bodies, now: Callable[[], float]) -> None:
        self._table = table
        self._bodies = bodies
        self._now = now

    def keep(self, response_id: str, said: bytes, *, tenant: str, cache_id: str) -> None:
        """Keep what a response said. It counts for the tenant's quota. Raises `QuotaExceeded`, `StorageFull`."""

        def store(body: Body | None) -> Item | None:
            assert body is not None, "a response says something"
            record = ResponseRecord(id=response_id, tenant=tenant, cache_id=cache_id, body=body)
            due = self._now() + KEEP_ENDED_S
            return self._table.add(
                Item("response", response_id, tenant, record.model_dump_json(), due=due, held=body.name)
            )

        stored = self._bodies.write(tenant, RESPONSE_PREFIX + response_id, memoryview(said), store)
        assert stored is not None, "no other response has this id"

    def get(self, response_id: str, *, tenant: str, param: str = "response_id") -> ResponseRecord:
        """Raises `ResponseNotFound` for an unknown id, one whose time is over, and another tenant's. param: the field
        of the request that has the id."""
        item = self._table.find(response_id, tenant)
        if item is None or item.kind != "response" or (item.due is not None and item.due <= self._now()):
            raise not_found(response_id, param)
        return read(item, ResponseRecord)

    def read(self, record: ResponseRecord) -> bytes:
        """What it said. Raises `ResponseNotFound` where that is lost or damaged."""
        try:
            return self._bodies.read(record.body, record.tenant, RESPONSE_PREFIX + record.id)
        except BlobError as error:
            raise not_found(record.id) from error

    def remove(self, response_ids: Iterable[str], *, tenant: str) -> None:
        """Forget those of these that are there."""
        for response_id in response_ids:
            item = self._table.find(response_id, tenant)
            # The item first: from then on nobody finds the bytes, and a sweep removes them if this process dies here.
            if item is not None and item.kind == "response" and self._table.remove(response_id):
                self._bodies.remove(read(item, ResponseRecord).body)


def is_response(label: str) -> bool:
    """Whether a label of a cache names a response."""
    return label.startswith(RESPONSE_ID)


def not_found(response_id: str, param: str = "response_id") -> ResponseNotFound:
    return ResponseNotFound(
        f"there is no response {response_id[:80]!r}: it was not stored, or it has expired; send the whole conversation "
        "with cache_id",
        param=param,
    )
