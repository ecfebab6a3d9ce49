"""A random walk through the operations of an index, beside a model of it in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from kvshelf.errors import CacheNotFound
from kvshelf.store.blobs import Name
from kvshelf.store.index import BasesGone, Entry, Filters, Index, Quota, Writing
from kvshelf.store.manifest import Manifest, StoredUsage
from tests.store.indexes import NOW, cache_id, manifest, writing

_IDS = 8
_TENANTS = ("me", "you")


@dataclass
class _Known:
    """What the model knows of one id."""

    state: str
    writing: Writing
    manifest: Manifest
    uses: int = 0

    @property
    def stored(self) -> bool:
        return self.state in ("ready", "corrupt")


class Walk:
    """One caller; the wall clock goes on with each step, far beyond the server's."""

    def __init__(self, index: Index, chance: random.Random) -> None:
        self._index = index
        self._chance = chance
        self._now = NOW + 10_000
        self._known: dict[int, _Known] = {}
        self._order: list[int] = []  # ready and corrupt, oldest first
        self._open: list[tuple[int, Writing]] = []

    def step(self) -> None:
        self._now += self._chance.choice([0, 0.25, 3])
        actions = [
            *([self._begin, self._publish] * 3),
            *[self._abandon, self._rewrite, self._replace, self._touch, self._mark_corrupt],
            *[self._bury, self._sweep, self._forget, self._look],
        ]
        self._chance.choice(actions)()

    def end(self) -> None:
        """Leave the home empty."""
        while entries := list(self._index.stored()):
            for entry in reversed(entries):  # whose descendants go first
                self._index.bury(entry, "deleted", self._now)
        for _, write in self._open:
            self._index.abandon(write.name)
        for write in self._index.abandoned():
            self._index.abandon(write.name)
        while self._index.forget(self._now * 2):
            pass
        assert self._index.problems() == []

    def check(self) -> None:
        """Every id and every sum is as the model has it."""
        for number in range(_IDS):
            self._check_entry(number)
        for tenant in (*_TENANTS, None):
            assert self._index.usage(tenant) == self._usage(tenant)
            assert self._index.promised(tenant) == self._usage(tenant, promised=True)
        assert [entry.id for entry in self._index.stored()] == [cache_id(number) for number in self._order]
        for tenant in _TENANTS:
            self._check_listing(Filters(tenant))
            self._check_listing(Filters(tenant, model="m1", labels={"a": "1"}))
            self._check_listing(Filters(tenant, name="n1"))
            self._check_listing(Filters(tenant, name="n1", id_prefix="kvs_0000"))
        unpinned = {n for n, k in self._known.items() if k.state == "ready" and not k.manifest.promised}
        victims = {cache_id(number) for number in unpinned if self._count(self._known[number].writing.name) == 0}
        assert {entry.id for entry in self._index.victims(100)} == victims
        over = {
            cache_id(number)
            for number, known in self._known.items()
            if known.state == "ready" and (known.manifest.guaranteed_until or math.inf) <= self._now
        }
        assert {entry.id for entry in self._index.unpromised(self._now, 100)} == over
        for name, _ in self._names():
            assert self._index.is_base(name) == (self._count(name) > 0)
            assert self._index.knows(name)
        long = {n for n, k in self._known.items() if k.state == "ready" and len(k.writing.bases) >= 2}
        assert {entry.id for entry in self._index.spliced(2, 100)} == {cache_id(number) for number in long}
        assert self._index.problems() == []

    # What a caller does

    def _begin(self) -> None:
        number = self._chance.randrange(_IDS)
        made = self._writing(number)
        self._index.begin(made, Quota())
        self._open.append((number, made))

    def _publish(self) -> None:
        if not self._open:
            return
        number, write = self._open.pop(self._chance.randrange(len(self._open)))
        made = self._manifest(number)
        known = self._known.get(number)
        over = self._index.find(cache_id(number), _tenant(number)) if self._chance.random() < 0.3 else None
        self._index.renew(write.name)
        live = known is not None and known.state == "ready" and not self._is_expired(known)
        stands = live and over is None
        disowned = self._is_disowned(write.parent_id)
        baseless = not set(write.bases) <= set(self._names(_tenant(number)))
        if not stands and (disowned or baseless):
            with pytest.raises(CacheNotFound if disowned else BasesGone):
                self._index.publish(write, made, over=over, cost_s=1.0, now=self._now)
            self._index.abandon(write.name)
            return
        published, other = self._index.publish(write, made, over=over, cost_s=1.0, now=self._now)
        assert published != stands
        assert (other.id if other else None) == (cache_id(number) if number in self._order else None)
        if published:
            self._known[number] = _Known("ready", write, made)
            self._order = [one for one in self._order if one != number] + [number]
        else:
            self._index.abandon(write.name)

    def _abandon(self) -> None:
        if self._open:
            _, write = self._open.pop()
            self._index.abandon(write.name)
            assert not self._index.knows(write.name)

    def _rewrite(self) -> None:
        number, known, entry = self._pick()
        made = self._manifest(number)
        if entry is None or not self._index.swap(entry, made):
            assert known is None or known.state != "ready"
        elif known is not None:
            known.manifest = made
            assert not self._index.swap(entry, made)

    def _replace(self) -> None:
        number, known, entry = self._pick()
        write = self._writing(number)
        self._index.begin(write, Quota())
        if entry is not None and entry.stored:
            assert self._index.swap(entry, entry.manifest(), write)
            assert known is not None
            known.state, known.writing = "ready", replace(write, parent_id=known.writing.parent_id)
            assert not self._index.swap(entry, known.manifest), "it has changed"
        else:
            assert known is None or known.state != "ready"
            self._index.abandon(write.name)

    def _touch(self) -> None:
        number, known, _ = self._pick()
        self._index.touch(cache_id(number), _tenant(number), self._now)
        if known is not None and known.state == "ready":
            known.uses += 1

    def _mark_corrupt(self) -> None:
        _, known, entry = self._pick()
        if entry is not None and self._chance.random() < 0.3 and self._index.mark_corrupt(entry, "broken"):
            assert known is not None
            assert known.state == "ready"
            known.state = "corrupt"

    def _bury(self) -> None:
        number, known, entry = self._pick()
        if entry is None or known is None:
            return
        state: Literal["expired", "evicted", "deleted"] = self._chance.choice(["expired", "evicted", "deleted"])
        is_base = self._count(known.writing.name) > 0
        allowed = {
            "deleted": known.state != "deleted" and not any(child.stored for child in self._descendants(number)),
            "evicted": known.state == "ready" and not known.manifest.promised and not is_base,
            "expired": known.state in ("ready", "corrupt") and self._is_expired(known),
        }
        assert self._index.bury(entry, state, self._now) == allowed[state]
        if allowed[state]:
            self._end(number, state)

    def _sweep(self) -> None:
        due = {n for n in self._order if self._is_expired(self._known[n])}
        entries = self._index.expired(self._now, 100)
        assert {entry.id for entry in entries} == {cache_id(number) for number in due}
        for entry in entries:
            assert self._index.bury(entry, "expired", self._now)
        for number in due:
            self._end(number, "expired")
        for write in self._index.abandoned():
            self._index.abandon(write.name)
        self._open = [(number, write) for number, write in self._open if self._index.knows(write.name)]

    def _forget(self) -> None:
        """Tombstones with children stay, and go once these are gone."""
        forgotten = 0
        while count := self._index.forget(self._now + 1):
            forgotten += count
        while ended := [n for n, known in self._known.items() if not known.stored and not any(self._children(n))]:
            for number in ended:
                del self._known[number]
            forgotten -= len(ended)
        assert forgotten == 0

    def _look(self) -> None:
        self._check_entry(self._chance.randrange(_IDS))
        self._check_listing(Filters(self._chance.choice(_TENANTS), model=self._chance.choice([None, "m0", "m1"])))

    # The model

    def _pick(self) -> tuple[int, _Known | None, Entry | None]:
        number = self._chance.randrange(_IDS)
        return number, self._known.get(number), self._index.find(cache_id(number), _tenant(number))

    def _writing(self, number: int) -> Writing:
        """A write of a cache, perhaps with bases that there are now, perhaps the child of one that there is or was."""
        made = writing(number, self._chance.randint(1, 99), _tenant(number))
        others = [name for name in self._names(_tenant(number)) if name[0][:40] != made.name[:40]]
        bases = self._chance.sample(others, min(len(others), self._chance.choice([0, 0, 1, 3])))
        older = [None, None, *range(number % 2, number, 2)]  # so that none descends from itself
        parent = self._chance.choice(older)
        return replace(made, bases=tuple(bases), parent_id=None if parent is None else cache_id(parent))

    def _names(self, tenant: str | None = None) -> Iterator[Name]:
        """Blobs of stored entries, and those that are kept."""
        stored = [k for k in self._known.values() if k.stored and tenant in (None, k.manifest.tenant)]
        yield from sorted({name for k in stored for name in ((k.writing.name, k.writing.nbytes), *k.writing.bases)})

    def _count(self, name: str) -> int:
        """References to a name."""
        return sum(name == base for k in self._known.values() if k.stored for base, _ in k.writing.bases)

    def _children(self, number: int) -> Iterator[int]:
        yield from (n for n, k in self._known.items() if k.writing.parent_id == cache_id(number))

    def _descendants(self, number: int) -> Iterator[_Known]:
        for child in self._children(number):
            yield self._known[child]
            yield from self._descendants(child)

    def _is_disowned(self, parent_id: str | None) -> bool:
        known = None if parent_id is None else self._known.get(int(parent_id[4:], 16))
        return known is not None and (known.state == "deleted" or self._is_disowned(known.writing.parent_id))

    def _manifest(self, number: int) -> Manifest:
        fields: dict[str, Any] = {
            "model": self._chance.choice(["m0", "m1"]),
            "name": self._chance.choice(["", "n1"]),
            "labels": self._chance.choice([{}, {"a": "1"}, {"a": "1", "b": "2"}]),
            "pinned": self._chance.random() < 0.2,
            "guaranteed_until": self._chance.choice([None, None, None, self._now + 20]),
            "expires_at": self._chance.choice([None, None, self._now + 5, self._now + 40]),
        }
        if number in self._known and self._known[number].state == "ready":
            fields["model"] = self._known[number].manifest.model
        return manifest(number, tenant=_tenant(number), **fields)

    def _is_expired(self, known: _Known) -> bool:
        return known.manifest.expires_at is not None and known.manifest.expires_at <= self._now

    def _end(self, number: int, state: str) -> None:
        self._known[number].state = state
        self._order = [one for one in self._order if one != number]

    def _usage(self, tenant: str | None, *, promised: bool = False) -> StoredUsage:
        ready = [
            known
            for known in self._known.values()
            if known.state == "ready"
            and tenant in (None, known.manifest.tenant)
            and (known.manifest.promised or not promised)
        ]
        nbytes = sum(known.writing.nbytes for known in ready)
        return StoredUsage(caches=len(ready), bytes=nbytes)

    def _check_entry(self, number: int) -> None:
        children = {entry.id for entry in self._index.children(cache_id(number), _tenant(number))}
        assert children == {cache_id(child) for child in self._children(number)}
        known, entry = self._known.get(number), self._index.find(cache_id(number), _tenant(number))
        if known is None:
            assert entry is None
            return
        assert entry is not None
        assert entry.state == known.state
        if entry.stored:
            assert entry.name == known.writing.name
            assert (entry.bases, entry.parent_id) == (known.writing.bases, known.writing.parent_id)
            assert (entry.uses, entry.pinned) == (known.uses, known.manifest.promised)
            assert all(self._index.knows(name) for name, _ in entry.names())

    def _check_listing(self, query: Filters) -> None:
        wanted = [
            cache_id(number)
            for number in reversed(self._order)
            if self._known[number].state == "ready"
            and not self._is_expired(self._known[number])
            and _matches(self._known[number].manifest, query)
        ]
        assert [entry.id for entry in self._index.listing(query, self._now, None, 100)] == wanted


def _tenant(number: int) -> str:
    return _TENANTS[number % 2]


def entry_manifest(entry: Entry) -> Manifest:
    """The manifest as it was stored; a tombstone has none, and any will do."""
    return manifest() if entry.text is None else Manifest.model_validate_json(entry.text)


def _matches(made: Manifest, query: Filters) -> bool:
    return (
        made.tenant == query.tenant
        and query.model in (None, made.model)
        and query.name in (None, made.name)
        and made.id.startswith(query.id_prefix or "")
        and query.labels.items() <= made.labels.items()
    )
