"""The docket of a Redis home: a hash for each item, changed by `docket.lua`, which the server runs as one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from kvshelf.errors import StoreUnavailable
from kvshelf.store.jobs.table import Docket, Item, Kind, overtaken
from kvshelf.store.redis.link import RedisLink
from kvshelf.store.redis.script import Script, Value

_REPLIES: Final = {
    **dict.fromkeys(("done", "changed", "lapsed"), 0),
    **dict.fromkeys(("item", "items", "ids", "taken", "lines"), 1),
}
"""What replies of the script begin with, and how many parts follow."""

_BATCH: Final = 500

_ARGUMENT_BYTES: Final = 4 << 20
"""Of one call: a script copies its arguments, and the server does nothing else meanwhile."""


class RedisDocket(Docket):
    """See `Docket`. Leases are on the server's clock."""

    def __init__(self, link: RedisLink, prefix: str) -> None:
        self._run = Script(link, "docket.lua", f"{{{prefix}}}:docket", _REPLIES).run

    def add(self, item: Item, *, hold: str | None = None) -> None:
        reply = self._run("add", kind=item.kind, tenant=item.tenant, hold=hold, **_changing(item))
        if reply[0] == "lapsed":
            raise StoreUnavailable("the file took longer to write than a writer may be silent; send it again")

    def find(self, item_id: str, tenant: str) -> Item | None:
        shown = self._run("find", id=item_id, tenant=tenant)[1]
        return _item(shown) if shown else None

    def listing(self, kind: Kind, tenant: str, after: str | None, limit: int) -> list[Item]:
        return _items(self._run("listing", kind=kind, tenant=tenant, after=after, limit=limit))

    def change(self, item: Item, *, term: int | None = None) -> bool:
        return _is_done(self._run("change", version=item.version, term=term, **_changing(item)))

    def remove(self, item_id: str, *, held: str | None = None) -> bool:
        return _is_done(self._run("remove", id=item_id, held=held))

    def due(self, kind: Kind, now: float, limit: int) -> list[Item]:
        return _items(self._run("due", kind=kind, now=now, limit=limit))

    def open_items(self) -> list[Item]:
        ids: list[bytes] = self._run("open")[1]
        found: list[Item] = []
        for start in range(0, len(ids), _BATCH):
            found += _items(self._run("items", ids=b"\0".join(ids[start : start + _BATCH])))
        return [item for item in found if item.open]  # one may have been closed since

    def take(self, item_id: str, *, lease_s: float) -> int | None:
        reply = self._run("take", id=item_id, lease_ms=round(lease_s * 1000))
        return int(reply[1]) if reply[0] == "taken" else None

    def renew(self, item_id: str, term: int, *, lease_s: float) -> None:
        if not _is_done(self._run("lease", id=item_id, term=term, lease_ms=round(lease_s * 1000))):
            raise overtaken(item_id, term)

    def release(self, item_id: str, term: int) -> None:
        self._run("lease", id=item_id, term=term, lease_ms=0)

    def append(self, item_id: str, term: int, lines: Sequence[bytes]) -> None:
        for part in _parts(lines):
            numbered = {str(number): line for number, line in enumerate(part, 1)}
            if not _is_done(self._run("append", id=item_id, term=term, count=len(part), **numbered)):
                raise overtaken(item_id, term)

    def lines(self, item_id: str, start: int, limit: int) -> list[bytes]:
        return list(self._run("lines", id=item_id, start=start, limit=limit)[1])


def _parts(lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Lines in portions that one call can carry."""
    start, size = 0, 0
    for end, line in enumerate(lines):
        if end > start and (size + len(line) > _ARGUMENT_BYTES or end - start >= _BATCH):
            yield lines[start:end]
            start, size = end, 0
        size += len(line)
    if lines:
        yield lines[start:]


def _changing(item: Item) -> dict[str, Value]:
    return {"id": item.id, "text": item.text, "open": item.open, "due": item.due}


def _is_done(reply: Sequence[Any]) -> bool:
    return bool(reply[0] == "done")


def _items(reply: Sequence[Any]) -> list[Item]:
    return [_item(shown) for shown in reply[1]]


def _item(shown: Sequence[bytes | None]) -> Item:
    names = ("kind", "id", "tenant", "text", "version", "open", "due")
    try:
        found = {name: value.decode() for name, value in zip(names, shown, strict=True) if value is not None}
        return Item(
            kind=cast(Kind, found["kind"]),
            id=found["id"],
            tenant=found["tenant"],
            text=found["text"],
            version=int(found["version"]),
            open=found["open"] == "1",
            due=float(found["due"]) if "due" in found else None,
        )
    except (KeyError, ValueError) as wrong:
        raise StoreUnavailable(f"an item in Redis is not what kvshelf wrote there: {wrong!s:.200}") from wrong
