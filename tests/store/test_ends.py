"""The table of docs/internals/attacks.md, walked: everything that has text, and every way to its end, on every home.

Each text holds a word of its own. After an end and one sweep, no byte of the home or of a tier before it may hold a
word that the table does not allow: not the folder, nor its WAL, nor a value in Redis, nor an object of the bucket, nor
a copy in memory.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from kvshelf.corpus.row import Row
from kvshelf.corpus.run.stored import StoredJournal
from kvshelf.errors import CacheCorrupt, CacheNotFound
from kvshelf.service.jobs.batch_files import write_results
from kvshelf.store import housekeeping
from kvshelf.store.jobs import sources
from kvshelf.store.shelf import Shelf
from kvshelf.store.tiers.disk import DiskTier
from kvshelf.store.tiers.ram import RamTier
from kvshelf.store.tiers.tiered import TieredStore
from tests.amounts import few
from tests.store.caches import extended, make_cache
from tests.store.places import Clock, DiskPlace, Place, flip, remove_late_arrivals

DAY_S: Final = 86_400.0
TTL_S: Final = 7 * DAY_S


def word_of(text: str) -> bytes:
    return f"heliotrope-{text}-heliotrope".encode()


ROOT = make_cache(expected_questions=(word_of("question").decode(),))
TURN = extended(ROOT)


@dataclass
class Things:
    """What a home holds. words: a part of each text, by what it is of."""

    root: str = ""
    turn: str = ""
    file: str = ""
    batch: str = ""
    words: dict[str, bytes] = field(default_factory=dict)

    def word(self, of: str) -> str:
        self.words[of] = word_of(of)
        return self.words[of].decode()

    def left(self, place: Place, *before: Copies) -> set[str]:
        """before: copies in front of the place."""
        contents = [data for home in (place, *before) for data in home.contents()]
        return {of for of, word in self.words.items() if any(word in data for data in contents)}


@dataclass
class Copies:
    """Tiers of one machine before a home: memory, and a folder, which stays when the process ends."""

    folder: DiskPlace
    ram: RamTier

    def contents(self) -> Iterator[bytes]:
        if self.folder.folder.exists():
            yield from self.folder.contents()
        for copy in self.ram.copies.values():
            yield copy.manifest.model_dump_json().encode()
            yield repr(copy.summary.header).encode()
            yield bytes(copy.body)


@contextmanager
def with_tiers(place: Place, folder: Path, clock: Clock) -> Iterator[tuple[TieredStore, Shelf, Copies]]:
    """A store with tiers before a home, its home, and what the tiers have."""
    home, ram = place.open(now=clock), RamTier(1 << 24, now=clock)
    with TieredStore(home, [ram, DiskTier.open(folder, 1 << 24, key=home.key, now=clock)]) as store:
        yield store, home, Copies(DiskPlace(folder), ram)


Filled = Shelf | TieredStore


def upload(shelf: Filled, word: str, cache_id: str = "", ttl_s: float = TTL_S) -> str:
    with tempfile.TemporaryFile() as file:
        about = {"cache_id": cache_id, "messages": [{"role": "user", "content": word}]}
        file.write(json.dumps({"custom_id": "row-1", "body": about}).encode())
        return shelf.files.create(file, tenant="default", filename="in.jsonl", purpose="batch", ttl_s=ttl_s).id


def run_batch(shelf: Filled, things: Things, now: float) -> None:
    """A batch of one question that is answered, through the journal that the service writes."""
    body = {"endpoint": "/v1/chat/completions", "input_file_id": things.file, "options": {}, "output_keep_s": TTL_S}
    things.batch = shelf.batches.create("default", body, now=now, expires_at=now + DAY_S).id
    term = shelf.batches.table.take(things.batch, lease_s=1e6)
    assert term is not None
    answer = {"choices": [{"message": {"content": things.word("journal and results")}}]}
    StoredJournal(shelf.batches, things.batch, term).append([Row("in.jsonl", 1, custom_id="row-1", answer=answer)])
    record = shelf.batches.get(things.batch, tenant="default")
    write_results(shelf, record.model_copy(update={"counts": record.counts.model_copy(update={"total": 1})}), term)
    shelf.batches.update(things.batch, lambda record: record.entered("completed", now), tenant="default", term=term)


def fill(shelf: Filled, *, ttl_s: float | None = TTL_S) -> Things:
    """A put, a turn behind it, its response, a file and a batch of it."""
    things, now = Things(), shelf.now()
    things.word("question")
    about = {"name": things.word("name"), "labels": {"subject": things.word("label")}}
    things.root = shelf.put(ROOT, ttl_s=ttl_s, source=things.word("source"), **about).id
    turn = json.dumps([{"role": "user", "content": things.word("turn")}])
    things.turn = shelf.put(TURN, ttl_s=ttl_s, source=turn, parent_id=things.root, labels={"resp_1": ""}).id
    said = json.dumps({"text": things.word("response")}).encode()
    shelf.responses.keep("resp_1", said, tenant="default", cache_id=things.turn)
    things.file = upload(shelf, things.word("file"), things.root)
    run_batch(shelf, things, now)
    return things


# How things end


def expire(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:  # noqa: ARG001
    clock.time += TTL_S + 1


def evict(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:  # noqa: ARG001
    for cache_id in (things.turn, things.root):
        entry = shelf.index.find(cache_id, "default")
        assert entry is not None
        assert housekeeping.bury(shelf.index, shelf.blobs, entry, "evicted", clock.time)


def delete(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:  # noqa: ARG001
    for cache_id in (things.turn, things.root):
        shelf.delete(cache_id)


def cascade(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:  # noqa: ARG001
    shelf.delete(things.root, cascade=True)


def relabel(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:
    for cache_id in (things.turn, things.root):
        shelf.update(cache_id, labels={}, name="")
    cascade(shelf, place, things, clock)


def relabel_and_expire(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:
    for cache_id in (things.turn, things.root):
        shelf.update(cache_id, labels={}, name="")
    expire(shelf, place, things, clock)


def corrupt(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:
    for cache_id in (things.turn, things.root):
        place.change(shelf.stat(cache_id), flip)
        with pytest.raises(CacheCorrupt):
            shelf.get(cache_id)
    expire(shelf, place, things, clock)


def put_again(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:
    """The same caches, after theirs have expired and before a sweep came; then these are deleted."""
    expire(shelf, place, things, clock)
    shelf.put(ROOT)
    shelf.put(TURN, parent_id=things.root)
    cascade(shelf, place, things, clock)


def delete_files(shelf: Shelf, place: Place, things: Things, clock: Clock) -> None:  # noqa: ARG001
    record = shelf.batches.get(things.batch, tenant="default")
    for file_id in filter(None, (record.output_file_id, record.error_file_id, things.file)):
        shelf.files.delete(file_id, tenant="default")


OF_CACHES: Final = {"name", "label", "question", "source", "turn", "response"}
OF_FILES: Final = {"file", "journal and results"}
KEPT: Final = {"name", "label", "question", "source"}
"""What a source without a time of its own has: the user asked to keep it beyond the end of its cache."""

ENDS: Final[dict[str, tuple[Callable[..., None], set[str]]]] = {
    "expiry": (expire, KEPT),
    "eviction": (evict, KEPT | OF_FILES),
    "deletion": (delete, OF_FILES),
    "cascade": (cascade, OF_FILES),
    "labels replaced, deletion": (relabel, OF_FILES),
    "labels replaced, expiry": (relabel_and_expire, {"question", "source"}),
    "corruption, expiry": (corrupt, KEPT),
    "put again, cascade": (put_again, set()),
    "deletion of files": (delete_files, OF_CACHES),
}


def found_after(place: Place, clock: Clock, end: str) -> tuple[set[str], set[str]]:
    """The words that are there after an end and a sweep, and those after 40 days of sweeps."""
    with place.open(now=clock) as shelf:
        things = fill(shelf)
        ENDS[end][0](shelf, place, things, clock)
        shelf.sweep()
        soon = things.left(place)
        for _ in range(8):
            clock.time += 5 * DAY_S
            shelf.sweep()
        assert place.names() == set(), "no blob is left, nor the summary in it"
        return soon, things.left(place)


@pytest.mark.parametrize("end", ENDS)
def test_every_text_ends(place: Place, clock: Clock, end: str, soak: bool) -> None:
    if place.kind == "objects" and end not in ("expiry", "cascade") and not soak:
        pytest.skip("its index is that of a folder, and two ends show that its bytes go")
    soon, late = found_after(place, clock, end)
    assert soon == ENDS[end][1]
    assert late == set()


@pytest.mark.parametrize("end", ENDS)
def test_every_copy_in_a_tier_ends(place: Place, clock: Clock, tmp_path: Path, end: str, soak: bool) -> None:
    """Another machine ends it in the home; the next sweep of this one drops what its tiers have."""
    if end not in ("expiry", "cascade") and not soak:
        pytest.skip("for other ends the same copies are dropped by the same comparison")
    with with_tiers(place, tmp_path / "near", clock) as (store, home, copies):
        things = fill(store)
        for cache_id in (things.root, things.turn):
            assert store.get(cache_id).num_tokens
            assert word_of("source" if cache_id == things.root else "turn") in str(store.source(cache_id)).encode()
        assert things.left(copies) >= {"name", "label", "question", "source", "turn"}  # type: ignore[arg-type]
        ENDS[end][0](home, place, things, clock)
        store.sweep()
        assert things.left(place, copies) == ENDS[end][1]
        assert things.left(copies) <= (OF_CACHES if end == "deletion of files" else set())  # type: ignore[arg-type]
        for _ in range(8):
            clock.time += 5 * DAY_S
            store.sweep()
        assert things.left(place, copies) == set()
        assert place.names() | copies.folder.names() == set()
        assert home.check() == []


# kill -9

_CHANGING: Final = {
    "_index": ("begin", "abandon", "abandoned", "publish", "swap", "bury", "forget"),
    "_blobs": ("write", "keep_until", "remove", "set_aside"),
    "jobs": ("add", "change", "remove", "forget", "take", "append"),
}


def die_after(count: int, *shelves: Shelf) -> None:
    """Kill this process once so many steps were taken on these that change anything."""
    left = count

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*args: Any, **options: Any) -> Any:
            nonlocal left
            done = step(*args, **options)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return taken

    for shelf in shelves:
        parts = {"_index": shelf.index, "_blobs": shelf.blobs, "jobs": shelf.index.jobs}
        for part, names in _CHANGING.items():
            for name in names:
                setattr(parts[part], name, counted(getattr(parts[part], name)))


def filled(place: Place, clock: Clock, things: Things, count: int) -> None:  # noqa: ARG001
    with place.open(now=clock) as shelf:
        die_after(count, shelf)
        fill(shelf)


def cascaded(place: Place, clock: Clock, things: Things, count: int) -> None:
    with place.open(now=clock) as shelf:
        die_after(count, shelf)
        cascade(shelf, place, things, clock)


def swept(place: Place, clock: Clock, things: Things, count: int) -> None:  # noqa: ARG001
    clock.time += TTL_S + 1
    with place.open(now=clock) as shelf:
        die_after(count, shelf)
        shelf.sweep()


def kept_again(place: Place, clock: Clock, things: Things, count: int) -> None:
    """Another response of the turn, and a source that takes the place of another."""
    with place.open(now=clock) as shelf:
        die_after(count, shelf)
        said = things.words["response"]
        shelf.responses.keep("resp_2", said, tenant="default", cache_id=things.turn)
        shelf.update(things.root, name="another", labels={})
        shelf.keep_source(things.root, things.words["source"].decode() * 2, ttl_s=90 * DAY_S)


KILLED: Final = {"filled": filled, "cascaded": cascaded, "swept": swept, "kept again": kept_again}
SOME: Final = {"filled": (3, 9, 17, 26), "cascaded": (1, 2, 4), "swept": (2, 5), "kept again": (3, 5)}


def killed_at(place: Place, clock: Clock, work: str, count: int) -> bool:
    """Whether the process was killed, after so many steps of `work`; then nothing may stay beyond its time."""
    with place.open(now=clock) as shelf:
        things = Things(words={of: word_of(of) for of in OF_CACHES | OF_FILES})
        if work != "filled":
            things = fill(shelf)
    killed = place.start(partial(KILLED[work], place, clock, things, count)).wait() == -signal.SIGKILL
    place.let_leases_run_out(clock)
    with place.open(now=clock) as shelf:
        clock.time += sources.UNCLAIMED_S + 1
        shelf.sweep()
        with suppress(CacheNotFound):
            shelf.delete(shelf.cache_id(ROOT.identity), cascade=True)
        with suppress(CacheNotFound):
            shelf.delete(shelf.cache_id(TURN.identity))
        shelf.sweep()
        if place.kind == "objects":
            remove_late_arrivals(shelf)
        assert things.left(place) <= OF_FILES
        for record in shelf.batches.unfinished():
            shelf.batches.update(record.id, lambda record: record.entered("expired", clock.time), tenant="default")
        for _ in range(8):
            clock.time += 5 * DAY_S
            shelf.sweep()
        assert things.left(place) == set()
        assert shelf.check() == []
    return killed


@pytest.mark.parametrize(
    ("work", "count"), few(5, [(work, count) for work, counts in SOME.items() for count in counts])
)
def test_a_kill_between_two_steps_leaves_no_text(place: Place, clock: Clock, work: str, count: int) -> None:
    if place.kind == "objects":
        pytest.skip("in a folder the same steps are taken")
    assert killed_at(place, clock, work, count)


@pytest.mark.faults
@pytest.mark.parametrize("work", KILLED)
def test_a_kill_between_any_two_steps_leaves_no_text(place: Place, clock: Clock, work: str, soak: bool) -> None:
    count = 1
    while killed_at(place, clock, work, count):
        count += 1 if soak or place.kind == "disk" else 5
    assert count > 4


def tiers_swept(place: Place, clock: Clock, folder: Path, count: int) -> None:
    with with_tiers(place, folder, clock) as (store, home, _):
        die_after(count, home, store.tiers.all[1].store)  # type: ignore[attr-defined]
        store.sweep()


@pytest.mark.faults
def test_a_kill_of_a_sweep_of_tiers_leaves_no_copy(place: Place, clock: Clock, tmp_path: Path, soak: bool) -> None:
    """What its home has ended goes from a machine's folder with the next sweep, wherever one was killed before."""
    near, count, killed = tmp_path / "near", 1, True
    while killed:
        with with_tiers(place, near, clock) as (store, home, copies):
            things = fill(store)
            for cache_id in (things.root, things.turn):
                store.get(cache_id)
                store.source(cache_id)
            assert things.left(copies) >= {"name", "question", "source", "turn"}  # type: ignore[arg-type]
            cascade(home, place, things, clock)
        killed = place.start(partial(tiers_swept, place, clock, near, count)).wait() == -signal.SIGKILL
        place.let_leases_run_out(clock)
        with with_tiers(place, near, clock) as (store, home, copies):
            store.sweep()
            assert things.left(copies) == set(), count  # type: ignore[arg-type]
            assert things.left(place) <= OF_FILES, count
            assert [*home.check(), *store.check()] == []
        count += 1 if soak or place.kind == "disk" else 3
    assert count > 4
