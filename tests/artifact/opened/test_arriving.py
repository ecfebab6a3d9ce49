"""Caches that arrive some layers at a time: these as soon as they are verified, and every fault where it belongs."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvshelf.artifact import blob
from kvshelf.artifact.blob.body import as_tensor
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.memory import fresh_memory
from kvshelf.artifact.opened import arriving as module
from kvshelf.artifact.opened.arriving import ArrivingCache, batches_of, portions_of
from kvshelf.artifact.records import LayerRecord
from kvshelf.errors import BlobError, CacheCorrupt, CacheExpired, CacheNotFound, StoreUnavailable
from kvshelf.store.disk import DiskStore
from tests.amounts import few
from tests.store.caches import golden_caches, make_cache, parts_of, require_equal, require_equal_records
from tests.store.disk.test_faults import DAMAGE, file_of
from tests.store.faults import CASES
from tests.store.hostile import Parts
from tests.store.places import Clock

SOON = 20.0
"""Seconds that a thread may take before a test fails."""

LAYERS = ((20, 20), (31, 9), (0, 3), (40, 40))


@pytest.fixture(params=["one thread", "one that reads ahead"])
def shelf(home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskStore]:
    """The caches of these tests are small, and would have no second thread."""
    if request.param != "one thread":
        monkeypatch.setattr(module, "_READ_AHEAD_BYTES", 0)
    with DiskStore.open(home) as store:
        yield store


class Pipe:
    """A cache that arrives as slowly as a test sends it."""

    def __init__(self, cache: CompressedCache) -> None:
        data = cache.to_bytes()
        summary = blob.inspect(data)
        self._layers = summary.header.layers
        self._body = data[len(data) - 40 - sum(layer.nbytes for layer in self._layers) : -40]
        self._sent = 0
        read, self._write = os.pipe()
        self.file = FileIO(read)
        self.arriving = ArrivingCache(summary, self.file, nullcontext)
        self._reader = threading.Thread(target=self.arriving.read, daemon=True)
        self._reader.start()

    def portions(self) -> list[range]:
        """The layers that arrive together."""
        return list(portions_of([layer.nbytes for layer in self._layers]))

    def send(self, layers: int, but: int = 0) -> None:
        """Send on until so many layers are sent, but for the last `but` bytes."""
        end = sum(layer.nbytes for layer in self._layers[:layers]) - but
        self._sent += os.write(self._write, self._body[self._sent : end])

    def join(self) -> None:
        """Wait for the reader to end."""
        self._reader.join(SOON)
        assert not self._reader.is_alive()
        assert self.file.closed

    def finish(self) -> None:
        """Send nothing more."""
        os.close(self._write)
        self.join()


def require_arrived(layer: Future[LayerRecord], expected: LayerRecord) -> None:
    for ours, theirs in zip(parts_of(layer.result(SOON)), parts_of(expected), strict=True):
        require_equal_records(ours, theirs)


def errors_of(arriving: ArrivingCache) -> list[BaseException | None]:
    return [layer.exception(SOON) for layer in arriving.layers]


def arrive(path: Path) -> CompressedCache:
    """Read a file as a store does."""
    with FileIO(path) as file:
        arriving = ArrivingCache(blob.open_file(file, path.stat().st_size), file, nullcontext)
        arriving.read()
        return arriving.cache()


def segment_offset(data: bytes | bytearray, index: int) -> int:
    """Where a layer's segment begins in a blob."""
    layers = blob.inspect(data).header.layers
    return len(data) - 40 - sum(layer.nbytes for layer in layers[index:])


# Arriving


def test_the_header_says_what_comes(store: DiskStore) -> None:
    cache = replace(make_cache(lengths=LAYERS), sentence_ends=(3, 17, 39))
    manifest = store.put(cache, codec="int4:group=8,residual=2")
    with store.open_parts(manifest.id) as parts:
        assert parts.sentence_ends == (3, 17, 39)
    with store.open_cache(manifest.id) as arriving:
        assert arriving.sentence_ends == (3, 17, 39)
        assert (arriving.identity, arriving.num_tokens, arriving.next_position) == (cache.identity, 40, 40)
        assert (arriving.num_layers, len(arriving.layers)) == (4, 4)
        assert arriving.codec == "int4:group=8,residual=2"
        assert arriving.root.hex() == manifest.blob_digest
        assert arriving.nbytes < manifest.bytes_stored
        assert not any(layer.done() for layer in arriving.layers)


@pytest.mark.parametrize("codec", ["none", "int4:group=8,residual=3"])
def test_layers_can_be_used_before_the_next_have_come(codec: str) -> None:
    cache = make_cache(lengths=LAYERS).encoded(codec)
    pipe = Pipe(cache)
    for portion in pipe.portions():
        pipe.send(portion.stop, but=1)
        waiting = wait(pipe.arriving.layers[portion.start :], timeout=0.05)
        assert waiting.done == set(), "the last byte of the portion has not been verified"
        pipe.send(portion.stop)
        for index in portion:
            require_arrived(pipe.arriving.layers[index], cache.layers[index])
    require_equal(cache, pipe.arriving.cache())
    pipe.finish()


@given(st.lists(st.integers(1, 20 << 20), min_size=1, max_size=100))
def test_the_first_layer_comes_alone_and_then_ever_more_together(sizes: list[int]) -> None:
    portions = list(portions_of(sizes))
    assert [index for portion in portions for index in portion] == list(range(len(sizes)))
    assert len(portions[0]) == 1
    volumes = [sum(sizes[index] for index in portion) for portion in portions]
    for portion, volume, before in zip(portions[1:], volumes[1:], volumes, strict=False):
        most = min(2 * before, 8 << 20)
        assert volume - sizes[portion[-1]] < most
        assert volume >= most or portion is portions[-1]


@given(st.lists(st.integers(1, 6 << 20), min_size=1, max_size=60), st.integers(0, 59))
def test_what_is_read_at_once_is_one_layer_or_at_most_4_mib_of_them(sizes: list[int], start: int) -> None:
    portion = range(min(start, len(sizes) - 1), len(sizes))
    batches = list(batches_of(sizes, portion))
    assert [index for batch in batches for index in batch] == list(portion)
    volumes = [sum(sizes[index] for index in batch) for batch in batches]
    assert all(len(batch) == 1 or volume <= 4 << 20 for batch, volume in zip(batches, volumes, strict=True))
    assert all(a + sizes[batch[0]] > 4 << 20 for a, batch in zip(volumes, batches[1:], strict=False)), "all that fit"


@pytest.mark.parametrize("name", few(9, golden_caches()))
def test_what_arrives_is_what_was_stored(shelf: DiskStore, name: str) -> None:
    cache = golden_caches()[name]
    with shelf.open_cache(shelf.put(cache).id) as arriving:
        arriving.read()
        require_equal(cache, arriving.cache())
        require_equal(cache, shelf.get(shelf.cache_id(cache.identity, codec=cache.codec)))


def test_all_layers_share_the_memory_that_was_announced(shelf: DiskStore) -> None:
    with shelf.open_cache(shelf.put(make_cache(lengths=LAYERS)).id) as arriving:
        arriving.read()
        starts = []
        for layer in arriving.layers:
            (record,) = parts_of(layer.result())
            assert isinstance(record.keys, Tensor)
            assert record.keys.data_ptr() % 64 == 0, "as in the blob"
            starts.append(record.keys.data_ptr())
    assert starts == sorted(starts)
    assert starts[-1] - starts[0] < arriving.nbytes


def test_several_may_wait_for_the_layers_and_none_can_cancel_them() -> None:
    cache = make_cache(lengths=LAYERS)
    pipe = Pipe(cache)
    found: list[CompressedCache] = []
    waiting = [threading.Thread(target=lambda: found.append(pipe.arriving.cache()), daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    assert not any(layer.cancel() for layer in pipe.arriving.layers)
    pipe.send(4)
    for thread in waiting:
        thread.join(SOON)
    assert len(found) == 3
    for each in found:
        require_equal(cache, each)
    pipe.finish()


@pytest.mark.parametrize("size", [0, 1, 300_000, 1 << 21, (3 << 20) + 7])
def test_fresh_memory_begins_where_a_huge_page_can(size: int) -> None:
    memory = fresh_memory(size)
    assert (len(memory), memory.readonly) == (size, False)
    assert not any(memory[-4096:])
    assert as_tensor(memory).data_ptr() % (2 << 20) == 0 or not size


# Faults


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_set_aside_where_its_fault_is_met(shelf: DiskStore, home: Path, name: str) -> None:
    """That of a layer when the layer is read; any other before there is anything to wait for."""
    reason, damage = DAMAGE[name]
    manifest = shelf.put(make_cache())
    path = file_of(home, manifest)
    damage(path)
    if name in ("first layer", "last layer"):
        with shelf.open_cache(manifest.id) as arriving:
            arriving.read()
            with pytest.raises(CacheCorrupt, match=manifest.id) as refusal:
                arriving.cache()
    else:
        with pytest.raises(CacheCorrupt, match=manifest.id) as refusal:
            shelf.open_cache(manifest.id)
    assert refusal.value.details["reason"] == reason
    assert not path.exists()
    with pytest.raises(CacheCorrupt) as refusal:
        shelf.open_cache(manifest.id)
    assert refusal.value.details["reason"] == "quarantined"


@pytest.mark.parametrize("broken", range(4))
def test_layers_before_a_damaged_one_are_good(shelf: DiskStore, home: Path, broken: int) -> None:
    cache = make_cache(lengths=((20, 20), (31, 9), (40, 3), (40, 40)))
    manifest = shelf.put(cache)
    path = file_of(home, manifest)
    data = bytearray(path.read_bytes())
    data[segment_offset(data, broken) + 5] ^= 16
    path.write_bytes(data)
    set_aside: list[bool] = []
    with shelf.open_cache(manifest.id) as arriving:
        arriving.layers[broken].add_done_callback(lambda _: set_aside.append(not path.exists()))
        arriving.read()
        for layer, expected in zip(arriving.layers[:broken], cache.layers[:broken], strict=True):
            require_arrived(layer, expected)
        errors = errors_of(arriving)[broken:]
    assert {type(error) for error in errors} == {CacheCorrupt}
    assert f"segment {broken} is not what was written" in str(errors[0])
    assert set_aside == [True], "before anyone hears of it"
    assert (home / "quarantine" / path.name).exists()


ONLY_FROM_OUTSIDE = "digests_of_two_runs_swapped"
"""A lie about digests that a whole read does not need: a shelf takes no such blob in, and its manifest has the root."""


@pytest.mark.parametrize("name", [name for name in CASES if name != ONLY_FROM_OUTSIDE])
def test_whatever_is_refused_as_a_whole_is_refused_on_arrival(tmp_path: Path, name: str) -> None:
    """The digests of these blobs fit; the faults are those of another writer."""
    reason, make, edit = CASES[name]
    parts = Parts(make())
    edit(parts)
    data = parts.join()
    (tmp_path / "blob").write_bytes(data)
    with pytest.raises(BlobError) as refusal:
        arrive(tmp_path / "blob")
    assert refusal.value.reason == reason


def test_a_file_cut_short_after_it_was_opened(shelf: DiskStore, home: Path) -> None:
    cache = make_cache(lengths=LAYERS)
    manifest = shelf.put(cache)
    path = file_of(home, manifest)
    with shelf.open_cache(manifest.id) as arriving:
        os.truncate(path, segment_offset(path.read_bytes(), 2) - 1)
        arriving.read()
        require_arrived(arriving.layers[0], cache.layers[0])
        errors = errors_of(arriving)[1:]
    assert [error.details["reason"] for error in errors if isinstance(error, CacheCorrupt)] == ["truncated"] * 3
    assert (home / "quarantine" / path.name).exists()


@pytest.mark.parametrize("again", [False, True])
def test_a_cache_that_is_deleted_meanwhile_is_read_to_its_end(store: DiskStore, again: bool) -> None:
    cache = make_cache(lengths=LAYERS)
    manifest = store.put(cache)
    with store.open_cache(manifest.id) as arriving:
        store.delete(manifest.id)
        if again:
            store.put(cache)
        arriving.read()
        require_equal(cache, arriving.cache())


def test_a_damaged_file_does_not_take_the_one_that_replaced_it_with_it(shelf: DiskStore, home: Path) -> None:
    cache = make_cache()
    manifest = shelf.put(cache)
    path = file_of(home, manifest)
    with shelf.open_cache(manifest.id) as arriving:
        os.truncate(path, 1000)
        shelf.delete(manifest.id)
        shelf.put(cache)
        arriving.read()
        with pytest.raises(CacheCorrupt):
            arriving.cache()
    require_equal(cache, shelf.get(manifest.id))
    assert shelf.check() == []


def test_opening_refuses_what_get_refuses(store: DiskStore, clock: Clock) -> None:
    mine, theirs = store.put(make_cache(), ttl_s=10), store.put(make_cache(1), tenant="you")
    clock.time += 10
    with pytest.raises(CacheExpired):
        store.open_cache(mine.id)
    for cache_id in (theirs.id, "kvs_" + "0" * 40, "../../etc/passwd"):
        with pytest.raises(CacheNotFound, match="there is no cache"):
            store.open_cache(cache_id)


def test_a_medium_that_fails_is_no_fault_of_the_cache(store: DiskStore, home: Path) -> None:
    """A folder takes the place of the open file, so that reading on is an error of the system."""
    cache = make_cache()
    manifest = store.put(cache)
    with store.open_cache(manifest.id) as arriving:
        folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(folder, arriving._body.fileno())
        os.close(folder)
        arriving.read()
    assert {type(error) for error in errors_of(arriving)} == {StoreUnavailable}
    require_equal(cache, store.get(manifest.id))


def test_an_error_nobody_thought_of_reaches_those_who_wait() -> None:
    pipe = Pipe(make_cache())
    broken = ArrivingCache(blob.inspect(make_cache().to_bytes()), pipe.file, nullcontext)
    pipe.finish()
    broken.read()
    assert {type(error) for error in errors_of(broken)} == {ValueError}, "the file is closed"


# Closing


def test_closing_before_reading(shelf: DiskStore) -> None:
    arriving = shelf.open_cache(shelf.put(make_cache()).id)
    arriving.close()
    arriving.close()
    arriving.read()
    assert {type(error) for error in errors_of(arriving)} == {StoreUnavailable}
    with pytest.raises(StoreUnavailable, match="closed before this layer was read"):
        arriving.cache()


def test_what_was_closed_is_not_looked_for_elsewhere(shelf: DiskStore) -> None:
    cache_id = shelf.put(make_cache()).id
    arriving = shelf.open_cache(cache_id)
    elsewhere: list[str] = []
    arriving.elsewhere = lambda: elsewhere.append("opened") or shelf.open_cache(cache_id)  # type: ignore[func-returns-value]
    arriving.close()
    arriving.read()
    assert elsewhere == []


def test_closing_after_reading_takes_nothing_away(shelf: DiskStore) -> None:
    cache = make_cache()
    arriving = shelf.open_cache(shelf.put(cache).id)
    arriving.read()
    arriving.close()
    arriving.read()
    arriving.close()
    require_equal(cache, arriving.cache())


def test_closing_while_a_layer_is_read() -> None:
    """Those who wait hear of it at once; the reader ends when it has the layers that it is at."""
    cache = make_cache(lengths=LAYERS)
    pipe = Pipe(cache)
    pipe.send(2, but=1)
    require_arrived(pipe.arriving.layers[0], cache.layers[0])
    pipe.arriving.close()
    assert [type(error) for error in errors_of(pipe.arriving)] == [type(None)] + [StoreUnavailable] * 3
    assert not pipe.file.closed, "it is being read"
    pipe.send(pipe.portions()[1].stop)
    pipe.join()
    assert [type(error) for error in errors_of(pipe.arriving)] == [type(None)] + [StoreUnavailable] * 3
    pipe.finish()


def test_no_descriptor_is_left_open(shelf: DiskStore, home: Path) -> None:
    good, cut, flipped = (shelf.put(make_cache(seed)) for seed in range(3))
    shelf.get(good.id)
    gc.collect()  # or what other tests left open might be closed meanwhile
    before = len(os.listdir("/dev/fd"))
    kept = [shelf.open_cache(good.id) for _ in range(100)]  # what is thrown away closes itself
    assert len(os.listdir("/dev/fd")) == before + 100
    for arriving in kept[:50]:
        arriving.close()
    for arriving in kept[50:]:
        arriving.read()
    os.truncate(file_of(home, cut), 500)
    with pytest.raises(CacheCorrupt):
        shelf.open_cache(cut.id)
    DAMAGE["first layer"][1](file_of(home, flipped))
    shelf.open_cache(flipped.id).read()
    assert len(os.listdir("/dev/fd")) == before
