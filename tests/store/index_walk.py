"""A random walk through the operations of an index, beside a model of it in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvshelf.store.index import Entry, Index, Query, Quota, Writing
from kvshelf.store.manifest import Manifest, Usage
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
            *[self._abandon, self._rewrite, self._set_source, self._replace, self._touch, self._mark_corrupt],
            *[self._bury, self._sweep, self._forget, self._look],
        ]
        self._chance.choice(actions)()

    def end(self) -> None:
        """Leave the home empty."""
        for entry in list(self._index.stored()):
            assert self._index.bury(entry, "deleted", self._now)
        for _, write in self._open:
            self._index.abandon(write.name)
        for write in self._index.abandoned():
            self._index.abandon(write.name)
        self._index.forget(self._now * 2)
        assert self._index.problems() == []

    def check(self) -> None:
        """Every id and every sum is as the model has it."""
        for number in range(_IDS):
            self._check_entry(number)
        for tenant in (*_TENANTS, None):
            assert self._index.usage(tenant) == self._usage(tenant)
        assert [entry.id for entry in self._index.stored()] == [cache_id(number) for number in self._order]
        for tenant in _TENANTS:
            self._check_listing(Query(tenant))
            self._check_listing(Query(tenant, model="m1", labels={"a": "1"}))
            self._check_listing(Query(tenant, name="n1"))
            self._check_listing(Query(tenant, name="n1", id_prefix="kvs_0000"))
        unpinned = {n for n, k in self._known.items() if k.state == "ready" and not k.manifest.pinned}
        assert {entry.id for entry in self._index.victims(100)} == {cache_id(number) for number in unpinned}
        assert self._index.problems() == []

    # What a caller does

    def _begin(self) -> None:
        number = self._chance.randrange(_IDS)
        made = writing(number, self._chance.randint(1, 99), self._chance.choice([0, 7]), _tenant(number))
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
        published, other = self._index.publish(write, made, over=over, cost_s=1.0, now=self._now)
        live = known is not None and known.state == "ready" and not self._is_expired(known)
        stands = live and over is None
        assert published != stands
        assert (other.id if other else None) == (cache_id(number) if number in self._order else None)
        if published:
            self._known[number] = _Known("ready", write, made)
            self._order = [each for each in self._order if each != number] + [number]
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

    def _set_source(self) -> None:
        number, known, entry = self._pick()
        write = writing(number, 0, self._chance.randint(1, 9), _tenant(number))
        write = replace(write, name=write.source)
        self._index.begin(write, Quota())
        if entry is not None and self._index.swap(entry, entry_manifest(entry), write):
            assert known is not None
            assert known.state == "ready"
            known.writing = replace(known.writing, source=write.source, source_bytes=write.source_bytes)
        else:
            assert known is None or known.state != "ready"
            self._index.abandon(write.name)

    def _replace(self) -> None:
        number, known, entry = self._pick()
        write = writing(number, self._chance.randint(1, 99), self._chance.choice([0, 7]), _tenant(number))
        self._index.begin(write, Quota())
        if entry is not None and entry.stored:
            assert self._index.swap(entry, entry.manifest(), write)
            assert known is not None
            known.state, known.writing = "ready", write
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
        allowed = {
            "deleted": known.state != "deleted",
            "evicted": known.state == "ready" and not known.manifest.pinned,
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
        ended = [number for number in self._known if number not in self._order]
        assert self._index.forget(self._now + 1) == len(ended)
        for number in ended:
            del self._known[number]

    def _look(self) -> None:
        self._check_entry(self._chance.randrange(_IDS))
        self._check_listing(Query(self._chance.choice(_TENANTS), model=self._chance.choice([None, "m0", "m1"])))

    # The model

    def _pick(self) -> tuple[int, _Known | None, Entry | None]:
        number = self._chance.randrange(_IDS)
        return number, self._known.get(number), self._index.find(cache_id(number), _tenant(number))

    def _manifest(self, number: int) -> Manifest:
        fields: dict[str, Any] = {
            "model": self._chance.choice(["m0", "m1"]),
            "name": self._chance.choice(["", "n1"]),
            "labels": self._chance.choice([{}, {"a": "1"}, {"a": "1", "b": "2"}]),
            "pinned": self._chance.random() < 0.2,
            "expires_at": self._chance.choice([None, None, self._now + 5, self._now + 40]),
        }
        if number in self._known and self._known[number].state == "ready":
            fields["model"] = self._known[number].manifest.model
        return manifest(number, tenant=_tenant(number), **fields)

    def _is_expired(self, known: _Known) -> bool:
        return known.manifest.expires_at is not None and known.manifest.expires_at <= self._now

    def _end(self, number: int, state: str) -> None:
        self._known[number].state = state
        self._order = [each for each in self._order if each != number]

    def _usage(self, tenant: str | None) -> Usage:
        ready = [
            known
            for known in self._known.values()
            if known.state == "ready" and tenant in (None, known.manifest.tenant)
        ]
        nbytes = sum(known.writing.nbytes + known.writing.source_bytes for known in ready)
        return Usage(caches=len(ready), bytes=nbytes)

    def _check_entry(self, number: int) -> None:
        known, entry = self._known.get(number), self._index.find(cache_id(number), _tenant(number))
        if known is None:
            assert entry is None
            return
        assert entry is not None
        assert entry.state == known.state
        if entry.stored:
            assert (entry.name, entry.source) == (known.writing.name, known.writing.source)
            assert (entry.uses, entry.pinned) == (known.uses, known.manifest.pinned)
            assert all(self._index.knows(name) for name, _ in entry.names())

    def _check_listing(self, query: Query) -> None:
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


def _matches(made: Manifest, query: Query) -> bool:
    return (
        made.tenant == query.tenant
        and query.model in (None, made.model)
        and query.name in (None, made.name)
        and made.id.startswith(query.id_prefix or "")
        and query.labels.items() <= made.labels.items()
    )
