"""Several processes and threads on one shelf."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshelf.errors import CacheNotFound, StateConflict
from kvshelf.store.index import Quota
from kvshelf.store.rules import Rules
from kvshelf.store.shelf import Shelf
from tests.amounts import amount
from tests.store.caches import make_cache, require_equal
from tests.store.places import Place


class Gate:
    """Lets children that wait at it go at the same moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)

    def wait(self) -> None:
        while not self._path.exists():
            time.sleep(0.0005)

    def open(self) -> None:
        self._path.touch()


def at_once(place: Place, folder: Path, count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)`, `work(1)`, ... in processes of their own, started at the same moment."""
    gate = Gate(folder / "gate")

    def child(number: int) -> Callable[[], None]:
        def run() -> None:
            gate.wait()
            work(number)

        return run

    children = [place.start(child(number)) for number in range(count)]
    gate.open()
    assert [process.wait() for process in children] == [0] * count


@pytest.mark.parametrize("attempt", range(amount(3, 5)))
def test_a_new_home_gets_one_key(tmp_path: Path, place: Place, attempt: int) -> None:
    identity = make_cache(attempt).identity

    def work(number: int) -> None:
        with place.open() as store:
            (tmp_path / f"id{number}").write_text(store.cache_id(identity))

    at_once(place, tmp_path, 4, work)
    assert len({(tmp_path / f"id{number}").read_text() for number in range(4)}) == 1


@pytest.mark.parametrize("attempt", range(amount(1, 5)))
def test_two_writers_of_one_cache_agree(tmp_path: Path, place: Place, attempt: int) -> None:
    cache = make_cache(attempt, num_tokens=512, lengths=((256, 256),), dims=(64, 64))
    place.open().close()

    def work(number: int) -> None:
        with place.open() as store:
            (tmp_path / f"manifest{number}").write_text(store.put(cache, name=f"writer {number}").model_dump_json())
            require_equal(cache, store.get(store.cache_id(cache.identity)))

    at_once(place, tmp_path, 2, work)
    assert (tmp_path / "manifest0").read_text() == (tmp_path / "manifest1").read_text()
    assert len(place.names()) == 1, "the loser's bytes are gone"
    with place.open() as store:
        assert store.check() == []


def test_a_reader_beside_a_writer_that_deletes_and_puts_again(place: Place, tmp_path: Path) -> None:
    """Every read gives the right cache or says that there is none; both must have happened."""
    cache = make_cache(num_tokens=512, lengths=((256, 256),), dims=(64, 64))
    with place.open() as store:
        cache_id = store.cache_id(cache.identity)
    enough = tmp_path / "enough"

    def work() -> None:
        with place.open() as store:
            while not enough.exists():
                store.put(cache)
                store.delete(cache_id)

    writer = place.start(work)
    present = missing = 0
    with place.open() as store:
        soon, late = time.monotonic() + 1.5, time.monotonic() + 60
        try:
            while time.monotonic() < (soon if min(present, missing) > 0 else late):
                try:
                    require_equal(cache, store.get(cache_id))
                    present += 1
                except CacheNotFound:
                    missing += 1
        finally:
            enough.touch()
        assert writer.wait() == 0
        assert store.check() == []
    assert min(present, missing) > 0


def test_writers_on_a_full_shelf_evict_and_none_is_refused(place: Place, tmp_path: Path, soak: bool) -> None:
    """There is room for three times as many caches as are written at once."""
    rules = Rules(quota=Quota(budget_bytes=12 * len(make_cache().to_bytes())))
    place.open().close()

    def work(number: int) -> None:
        with place.open(rules=rules) as store:
            for seed in range(number, 400 if soak else 80, 4):
                store.put(make_cache(seed))

    at_once(place, tmp_path, 4, work)
    with place.open() as store:
        assert store.usage().caches == len(place.names()) == 12
        assert store.check() == []


def test_threads_share_a_store(place: Place) -> None:
    caches = [make_cache(seed) for seed in range(8)]
    problems: list[BaseException] = []

    def work(store: Shelf, first: int) -> None:
        try:
            for step in range(10):
                cache = caches[(first + step) % len(caches)]
                manifest = store.put(cache)
                require_equal(cache, store.get(manifest.id))
                store.touch(manifest.id)
        except BaseException as problem:
            problems.append(problem)

    with place.open() as store:
        threads = [threading.Thread(target=work, args=(store, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert store.usage().caches == len(caches)
        assert store.check() == []


def test_one_of_many_gets_the_lease(place: Place, tmp_path: Path) -> None:
    with place.open() as store:
        store.requests.open("req_1", tenant="me", body=b"x")

    def work(number: int) -> None:
        with place.open() as store:
            try:
                store.requests.start("req_1", worker=f"w{number}", lease_s=60)
                (tmp_path / f"won{number}").touch()
            except StateConflict:
                pass

    at_once(place, tmp_path, 6, work)
    assert len(list(tmp_path.glob("won*"))) == 1
    with place.open() as store:
        assert store.requests.get("req_1", tenant="me").attempts == 1
