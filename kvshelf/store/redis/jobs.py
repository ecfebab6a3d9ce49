"""The job table of a Redis home: a hash for each item, changed by `jobs.lua`, which the server runs as one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pydantic import TypeAdapter

from kvshelf.errors import StoreUnavailable
from kvshelf.store.redis.link import RedisLink, Script, Value
from kvshelf.store.table import Item, JobTable, Kind, overtaken, too_many, too_slow

_FIELDS: Final = (
    *("kind", "id", "tenant", "text", "version", "open", "due", "held", "owner", "after_s"),
    *("term", "holder", "lease_until", "created_at", "updated_at"),
)
"""In the order in which `jobs.lua` shows an item."""

_REPLIES: Final = {
    **dict.fromkeys(("none", "too_many", "too_slow", "leased", "appended", "erased"), 0),
    **dict.fromkeys(("item", "items", "ids", "removed", "taken", "lines"), 1),
    "forgotten": 2,
}
"""The first word of each kind of reply, and how many parts follow it."""

_OPTIONAL: Final = ("due", "held", "owner", "after_s")

_ITEM: Final = TypeAdapter(Item)

_BATCH: Final = 500

_ARGUMENT_BYTES: Final = 4 << 20
"""Most argument bytes per call: a script copies its arguments, which blocks the server."""


class RedisJobs(JobTable):
    """See `JobTable`. Leases are on the server's clock."""

    def __init__(self, link: RedisLink, prefix: str) -> None:
        self._run = Script(link, "jobs.lua", f"{{{prefix}}}:jobs", _REPLIES).run

    def add(self, item: Item, *, most_open: int | None = None) -> Item | None:
        reply = self._run("add", kind=item.kind, tenant=item.tenant, most_open=most_open, **_changing(item))
        if reply[0] == "too_many":
            raise too_many(item, most_open)
        return _stored(reply)

    def find(self, item_id: str, tenant: str | None) -> Item | None:
        return _stored(self._run("find", id=item_id, tenant=tenant))

    def owned(self, owner: str, tenant: str) -> list[Item]:
        items = map(_item, self._run("owned", owner=owner)[1])
        return [item for item in items if item.tenant == tenant]

    def listing(self, kind: Kind, tenant: str, after: str | None, limit: int) -> list[Item]:
        return [_item(shown) for shown in self._run("listing", kind=kind, tenant=tenant, after=after, limit=limit)[1]]

    def change(self, item: Item, *, term: int | None = None, release: bool = False) -> Item | None:
        return _stored(self._run("change", version=item.version, term=term, release=release, **_changing(item)))

    def remove(self, item_id: str) -> bool:
        return bool(self._run("remove", id=item_id)[1] == b"1")

    def forget(self, kind: Kind, now: float) -> int:
        count, looked_at = 0, _BATCH
        while looked_at == _BATCH:
            _, removed, due = self._run("forget", kind=kind, now=now, limit=_BATCH)
            count, looked_at = count + int(removed), int(due)
        return count

    def due_items(self, kind: Kind, now: float) -> list[Item]:
        items = self._items(self._run("due", kind=kind, now=now)[1])
        return [item for item in items if item.due is not None and item.due <= now]

    def _items(self, ids: Sequence[bytes]) -> list[Item]:
        items: list[Item] = []
        for start in range(0, len(ids), _BATCH):
            items += map(_item, self._run("items", ids=b"\0".join(ids[start : start + _BATCH]))[1])
        return items

    def open_items(self, kind: Kind, limit: int | None = None) -> list[Item]:
        ids: list[bytes] = self._run("open", kind=kind, last=-1 if limit is None else limit - 1)[1]
        return [item for item in self._items(ids) if item.open]  # an item may have ended since its id was read

    def take(self, item_id: str, *, lease_s: float, holder: str = "") -> int | None:
        reply = self._run("take", id=item_id, holder=holder, lease_s=lease_s)
        return int(reply[1]) if reply[0] == "taken" else None

    def renew(self, item_id: str, term: int, *, lease_s: float) -> None:
        if self._run("lease", id=item_id, term=term, lease_s=lease_s) == ["none"]:
            raise overtaken(item_id, term)

    def release(self, item_id: str, term: int) -> None:
        self._run("lease", id=item_id, term=term, lease_s=0)

    def append(self, item_id: str, term: int, lines: Sequence[bytes]) -> None:
        for part in _parts(lines):
            numbered = {str(number): line for number, line in enumerate(part, 1)}
            if self._run("append", id=item_id, term=term, count=len(part), **numbered) == ["none"]:
                raise overtaken(item_id, term)

    def lines(self, item_id: str, start: int, limit: int) -> list[bytes]:
        return list(self._run("lines", id=item_id, start=start, limit=limit)[1])

    def erase_lines(self, item_id: str, numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), _BATCH):
            self._run("erase_lines", id=item_id, numbers=",".join(map(str, numbers[start : start + _BATCH])))


def _parts(lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Lines in portions for one call each."""
    start, size = 0, 0
    for end, line in enumerate(lines):
        if end > start and (size + len(line) > _ARGUMENT_BYTES or end - start >= _BATCH):
            yield lines[start:end]
            start, size = end, 0
        size += len(line)
    if lines:
        yield lines[start:]


def _changing(item: Item) -> dict[str, Value]:
    names = ("id", "text", "open", "due", "held", "owner", "after_s")
    return {name: getattr(item, name) for name in names}


def _stored(reply: Sequence[Any]) -> Item | None:
    if reply[0] == "too_slow":
        raise too_slow()
    return _item(reply[1]) if reply[0] == "item" else None


def _item(shown: Sequence[Any]) -> Item:
    try:
        fields = zip(_FIELDS, shown, strict=True)
        return _ITEM.validate_python({name: value.decode() for name, value in fields if value or name not in _OPTIONAL})
    except (AttributeError, TypeError, ValueError) as wrong:
        raise StoreUnavailable(f"an item in Redis is not what kvshelf wrote there: {wrong!s:.200}") from wrong
