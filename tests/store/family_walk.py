"""A random walk through the life of caches that extend each other, beside a model of it in plain Python."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from kvshelf.artifact.cache import CompressedCache
from kvshelf.errors import CacheExpired, CacheHasChildren, CacheNotFound
from kvshelf.store import housekeeping
from kvshelf.store.index import Entry
from kvshelf.store.shelf import Shelf
from tests.store.caches import extended, make_cache, require_equal
from tests.store.places import Clock, Place

_ROOTS = 2
_BRANCHES = 2  # caches that extend one cache
_DEPTH = 11

Line = tuple[int, ...]
"""The number of a root, then the branch taken at each step."""


@dataclass
class _Known:
    state: str  # ready | expired | evicted | deleted
    name: str
    bases: tuple[str, ...]
    expires_at: float | None = None


class FamilyWalk:
    """One caller, who keeps the store to himself. Every file and every reference to it is as the model has it."""

    def __init__(self, place: Place, store: Shelf, clock: Clock, chance: random.Random) -> None:
        self._place = place
        self._store = store
        self._clock = clock
        self._chance = chance
        self._known: dict[Line, _Known] = {}
        self._caches: dict[Line, CompressedCache] = {}
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        self._clock.time += self._chance.choice([0, 0, 1])
        actions: list[Callable[[], None]] = [
            *[self._append] * 8,
            *[self._put, self._read, self._delete, self._cascade, self._let_expire, self._evict, self._swap],
            *[self._compact, self._sweep],
        ]
        act = self._chance.choice(actions)
        self.done[act.__name__.removeprefix("_")] += 1
        act()

    def check(self) -> None:
        """Reference counts, names, bytes and victims."""
        index = self._store.index
        owned = {known.name: line for line, known in self._known.items() if known.state == "ready"}
        references = Counter(base for line in owned.values() for base in self._known[line].bases)
        entries = {entry.name: entry for entry in index.stored()}
        assert entries.keys() == owned.keys()
        for name, entry in entries.items():
            assert tuple(base for base, _ in entry.bases) == self._known[owned[str(name)]].bases
        for name in owned.keys() | references.keys():
            assert index.is_base(name) == (references[name] > 0)
            assert index.knows(name)
        assert {entry.name for entry in index.victims(1000)} == owned.keys() - references.keys()
        assert self._place.names() == owned.keys() | references.keys()
        assert self._store.usage().bytes == sum(entry.nbytes for entry in entries.values())
        assert self._store.check() == []

    # What a caller does

    def _append(self) -> None:
        """Extend a cache that is there, or one that has ended."""
        line = self._pick(lambda known: known.state != "deleted" or self._chance.random() < 0.1)
        if line is None or len(line) == _DEPTH:
            return self._put()
        child = (*line, self._chance.randrange(_BRANCHES))
        if any(self._state(child[:depth]) == "deleted" for depth in range(1, len(child))):
            with pytest.raises(CacheNotFound):
                self._store.put(self._cache(child), parent_id=self._id(line))
            return None
        return self._store_anew(child, line)

    def _put(self) -> None:
        self._store_anew((self._chance.randrange(_ROOTS),), None)

    def _store_anew(self, line: Line, parent: Line | None) -> None:
        if self._is_live(line):
            return
        ttl_s = self._chance.choice([None, None, 5, 60])
        parent_id = None if parent is None else self._id(parent)
        self._store.put(self._cache(line), parent_id=parent_id, ttl_s=ttl_s)
        bases: tuple[str, ...] = ()
        if parent is not None and self._is_live(parent):
            above = self._known[parent]
            bases = (above.name, *above.bases)
        entry = self._entry(line)
        assert {base for base, _ in entry.bases} == set(bases)
        expires_at = None if ttl_s is None else self._clock.time + ttl_s
        self._known[line] = _Known("ready", str(entry.name), tuple(base for base, _ in entry.bases), expires_at)

    def _read(self) -> None:
        line = self._pick()
        if line is None:
            return
        state = "expired" if self._is_due(line) else self._state(line)
        if state == "ready":
            require_equal(self._cache(line), self._store.get(self._id(line)))
        else:
            with pytest.raises(CacheNotFound if state == "deleted" else CacheExpired):
                self._store.get(self._id(line))

    def _delete(self) -> None:
        line = self._pick(lambda known: known.state != "deleted")
        if line is None:
            return
        below = [other for other in self._below(line) if self._is_live(other)]
        if below:
            with pytest.raises(CacheHasChildren, match=f"^{len(below)} cache"):
                self._store.delete(self._id(line))
        else:
            self._store.delete(self._id(line))
            self._known[line].state = "deleted"
        self._bury_due(self._below(line))

    def _cascade(self) -> None:
        line = self._pick(lambda known: known.state != "deleted" and self._chance.random() < 0.3)
        if line is None:
            return
        self._bury_due(self._below(line))
        receipt = self._store.delete(self._id(line), cascade=True)
        gone = [other for other in self._below(line) if self._state(other) == "ready"]
        assert sorted(receipt.descendants) == sorted(map(self._id, gone))
        for other in (line, *gone):
            self._known[other].state = "deleted"

    def _let_expire(self) -> None:
        self._clock.time += self._chance.choice([3, 20])

    def _evict(self) -> None:
        victims = self._store.index.victims(1)
        if victims:
            assert housekeeping.make_room(self._store.index, self._store.blobs, 1, self._clock.time)
            line = next(line for line, known in self._known.items() if known.name == victims[0].name)
            self._known[line].state = "evicted"

    def _swap(self) -> None:
        """The cache is written whole again, as when it is mended."""
        line = self._pick(lambda known: known.state == "ready")
        if line is not None and self._is_live(line):
            self._store.mend(self._cache(line), self._id(line), tenant="default")
            self._known[line].name, self._known[line].bases = str(self._entry(line).name), ()

    def _compact(self) -> None:
        long = [line for line, known in self._known.items() if known.state == "ready" and len(known.bases) >= 8]
        live = [line for line in long if self._is_live(line)]
        assert self._store.compact() == len(live)
        for line in live:
            self._known[line].name, self._known[line].bases = str(self._entry(line).name), ()

    def _sweep(self) -> None:
        self._store.sweep()
        self._bury_due(self._known)

    # The model

    def _pick(self, wanted: Callable[[_Known], bool] = lambda _: True) -> Line | None:
        lines = [line for line, known in self._known.items() if wanted(known)]
        return self._chance.choice(lines) if lines else None

    def _cache(self, line: Line) -> CompressedCache:
        if line not in self._caches:
            if len(line) == 1:
                self._caches[line] = make_cache(line[0], num_tokens=32, lengths=((16,),), dims=(64, 64))
            else:
                self._caches[line] = extended(self._cache(line[:-1]), line[-1] + 1, entries=16, tokens=32)
        return self._caches[line]

    def _id(self, line: Line) -> str:
        return self._store.cache_id(self._cache(line).identity)

    def _entry(self, line: Line) -> Entry:
        entry = self._store.index.find(self._id(line), "default")
        assert entry is not None
        return entry

    def _state(self, line: Line) -> str:
        return self._known[line].state if line in self._known else "none"

    def _is_due(self, line: Line) -> bool:
        known = self._known[line]
        return known.state == "ready" and known.expires_at is not None and known.expires_at <= self._clock.time

    def _is_live(self, line: Line) -> bool:
        return self._state(line) == "ready" and not self._is_due(line)

    def _below(self, line: Line) -> list[Line]:
        return [other for other in self._known if len(other) > len(line) and other[: len(line)] == line]

    def _bury_due(self, lines: Iterable[Line]) -> None:
        for line in lines:
            if self._is_due(line):
                self._known[line].state = "expired"
