"""Job table: versioned items with leases and journals; their texts are opaque.

A change compares versions: of two writers that saw the same version of an item, one succeeds. A lease says which worker
works on an open item. Its term counts the attempts and is the fence: a holder whose lease ran out, and whose item
another worker took, holds an old term and can change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar

from kvshelf.errors import InvalidRequest, QuotaExceeded, StateConflict, StoreUnavailable
from kvshelf.store.manifest import StoredRecord

Kind = Literal[
    "file",
    "batch",
    "request",
    "response",
    "source",
    "transforms",
    "usage",
    "clock",
    "erasure",
    "certificate",
    "workflow",
    "ladder",
    "link",
]

RecordT = TypeVar("RecordT", bound=StoredRecord)

HOME: Final = "kvshelf"
"""The tenant of items that belong to the home. A real tenant of this name sees none: it has no ids of these kinds."""


@dataclass(frozen=True)
class Item:
    """One item of one tenant. Times are Unix seconds on the home's clock.

    text: JSON. version: counts the changes of the item, not its leases. open: whether there is work to do; sources and
    usage are always open, so that those of all tenants are found. due: when to forget the item, None: never. held: the
    name in `Blobs` of bytes that belong to the item. owner: the id of the cache that the item is derived from, and with
    which it ends; of a result file, the id of its batch. after_s: for how long it outlives a cache that expires or is
    evicted, None: until `due`. It never outlives a deletion.

    The table sets the rest. term: number of the newest lease, 0 before the first. holder: the worker that took it.
    lease_until: its end, 0 if it was released. updated_at: the last change or lease.
    """

    kind: Kind
    id: str
    tenant: str
    text: str
    version: int = 0
    open: bool = False
    due: float | None = None
    held: str | None = None
    owner: str | None = None
    after_s: float | None = None
    term: int = 0
    holder: str = ""
    lease_until: float = 0.0
    created_at: float = 0.0
    updated_at: float = 0.0


class JobTable(Protocol):
    """The items of one home. Unless a method says otherwise, it is one atomic step, even while others work on the home,
    and durable when it returns. All users of the home share the clock of its leases.

    `held` of an item names a write in progress (`Index.begin`). Storing the item makes that write's lease endless, so
    that its bytes stay and count for their tenant; `StoreUnavailable` if the lease has run out. When the item drops
    `held`, or is removed, the write becomes one of `Index.abandoned`.

    An item whose cache has ended is due, by the step of the index that ends the cache and by every step that stores the
    item afterwards: no moment is between them, and no caller can forget it. So what is derived from a cache goes with
    it, whatever ends the cache. The journal of an ended batch goes in the step that removes one of its result files,
    which have the same text.

    Methods raise `StoreUnavailable` and `StorageFull` when the home does not work.
    """

    def add(self, item: Item, *, most_open: int | None = None) -> Item | None:
        """Store a new item; returns it as stored. None if the id is taken. Raises `QuotaExceeded` if the tenant has
        `most_open` open items of this kind."""

    def find(self, item_id: str, tenant: str | None) -> Item | None:
        """The item of an id, if it is this tenant's. tenant None: any tenant's, for the home's own work."""

    def owned(self, owner: str, tenant: str) -> list[Item]:
        """The items of an owner."""

    def listing(self, kind: Kind, tenant: str, after: str | None, limit: int) -> list[Item]:
        """A tenant's items, newest first, starting after the item `after`; empty if there is no such item."""

    def change(self, item: Item, *, term: int | None = None, release: bool = False) -> Item | None:
        """Replace text, `open`, `due`, `held`, `owner` and `after_s`, if the stored version is `item.version`; returns
        the next version. release: end the lease too. None, and nothing is changed, if the item was changed or removed
        since, or if `term` is given and not the newest."""

    def remove(self, item_id: str) -> bool:
        """Forget an item with its journal. False if there is none."""

    def forget(self, kind: Kind, now: float) -> int:
        """Remove the items that are due by now, in several steps if they are many; returns how many."""

    def due_items(self, kind: Kind, now: float) -> list[Item]:
        """The items that `forget` would remove, read in several steps if they are many."""

    def open_items(self, kind: Kind, limit: int | None = None) -> list[Item]:
        """Open items of all tenants, oldest first; read in several steps if they are many. limit: at most so many."""

    # Leases

    def take(self, item_id: str, *, lease_s: float, holder: str = "") -> int | None:
        """Lease an open item; returns the term. None if another lease lives, or if there is no such open item."""

    def renew(self, item_id: str, term: int, *, lease_s: float) -> None:
        """Extend the lease from now. Raises `StateConflict` if the term is not the newest or was released. Need not
        survive a power cut, which ends the holder too."""

    def release(self, item_id: str, term: int) -> None:
        """Let others take the item at once. Nothing happens if the term is not the newest. Durable as `renew` is."""

    # Journals

    def append(self, item_id: str, term: int, lines: Sequence[bytes]) -> None:
        """Add lines to the end of an item's journal. Raises `StateConflict` if the term is not the newest. No line is
        torn, but after an error the first ones may be there."""

    def lines(self, item_id: str, start: int, limit: int) -> list[bytes]:
        """Lines of a journal, from number `start` (counted from 0)."""

    def erase_lines(self, item_id: str, numbers: Sequence[int]) -> None:
        """Empty these lines of a journal, whoever holds the item; ignores numbers that it does not have."""


def read(item: Item, record: type[RecordT], **fields: Any) -> RecordT:
    """The record in an item's text, with the given `fields` added. Raises `StoreUnavailable` for any other text."""
    try:
        return record.model_validate(json.loads(item.text) | fields)
    except (ValueError, TypeError) as wrong:
        text = f"{item.kind} {item.id!r:.80} is not what kvshelf wrote there: {wrong!s:.200}"
        raise StoreUnavailable(text) from wrong


def require_after(table: JobTable, tenant: str, after: str | None) -> None:
    """Raise `InvalidRequest` if `after` is not an item: a listing from there would be empty, and look complete."""
    if after is not None and table.find(after, tenant) is None:
        raise InvalidRequest(f"after: there is no {after[:80]!r} to continue from", param="after")


def overtaken(item_id: str, term: int) -> StateConflict:
    return StateConflict(f"term {term} of {item_id!r:.80} is over: it has ended, or another worker took it")


def too_many(item: Item, most_open: int | None) -> QuotaExceeded:
    return QuotaExceeded(
        f"{most_open} {item.kind} items of this tenant have not ended, as many as may be; wait for some"
    )


def too_slow() -> StoreUnavailable:
    return StoreUnavailable("the bytes took longer to write than a writer may be silent; send them again")
