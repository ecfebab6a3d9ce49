"""Bytes as objects: whole, or an error that says so; nothing removed under a reader; nothing left by the dead."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.errors import BlobError, CacheNotFound, StoreUnavailable
from kvshelf.store.blobs import READ_LEASE_S, TAKEN_S, Blobs, Leases, SeekableFile, new_name
from kvshelf.store.objects.address import ObjectPlace
from kvshelf.store.objects.blobs import ObjectBlobs
from kvshelf.store.objects.file import HEAD, TAIL, ObjectFile
from tests.amounts import in_turn
from tests.store.caches import make_cache, require_equal
from tests.store.objects.conftest import OpenShelf
from tests.store.objects.faulty import Fault, FaultyProxy
from tests.store.objects.servers import BUCKET, S3Server
from tests.store.places import Clock, DiskPlace, Place, RedisPlace, remove_late_arrivals
from tests.store.redis.servers import wait_until
from tests.store.zygote import Zygote

MB = 1 << 20
PART = 16 * MB
SIZES = [0, 1, HEAD, HEAD + TAIL, HEAD + TAIL + 1, 3 * MB, PART, PART + 1, 40 * MB]


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def fresh_name() -> str:
    return new_name("kvs_" + os.urandom(20).hex())


def write(blobs: Blobs, data: bytes, steps: list[str] | None = None) -> str:
    name = fresh_name()
    pieces = [memoryview(data)[start : start + 5 * MB] for start in range(0, len(data), 5 * MB)]
    blobs.write(name, pieces, len(data), on_step=(steps if steps is not None else []).append)
    return name


def opened(blobs: Blobs, name: str, nbytes: int, *, once: bool = False) -> SeekableFile:
    file = blobs.open(name, nbytes, once=once)
    assert isinstance(file, SeekableFile)
    return file


@pytest.fixture
def blobs(shared_s3: S3Server, tmp_path: Path, open_shelf: OpenShelf) -> Blobs:
    return open_shelf(DiskPlace(tmp_path / "home"), shared_s3.url(tmp_path.name)).blobs


@in_turn({"server": ["shared_s3", "seaweed"], "once": [False, True]})
def test_what_was_written_is_read(
    request: pytest.FixtureRequest, server: str, once: bool, tmp_path: Path, open_shelf: OpenShelf
) -> None:
    """At every size at which another way is taken; once in one part, once in parts."""
    url = request.getfixturevalue(server).url(f"whole{once}")
    blobs = open_shelf(DiskPlace(tmp_path / "home"), url).blobs
    for size in SIZES:
        data, steps = random_bytes(size), list[str]()
        name = write(blobs, data, steps)
        assert steps == ["created", "written", "synced"]
        assert blobs.holds(name, size)
        assert blobs.hold_each([(name, size), (name, size + 1), (fresh_name(), 1)]) == [True, False, False]
        assert blobs.beginning(name, size, 100) == data[:100]
        with opened(blobs, name, size, once=once) as file:
            assert file.read(size + 1) == data
        assert not blobs.is_read(name)
        assert blobs.remove(name, size)
        assert blobs.open(name, size) is None
        assert blobs.beginning(name, size, 5) is None or size == 0
        assert not blobs.holds(name, size)


def test_large_content_goes_in_parts_and_small_content_in_one_conditional_request(
    proxy: FaultyProxy, tmp_path: Path, open_shelf: OpenShelf
) -> None:
    place = proxy.server.url("parts").replace(proxy.server.endpoint, proxy.endpoint)
    blobs = open_shelf(DiskPlace(tmp_path / "home"), place).blobs
    proxy.requests.clear()
    write(blobs, random_bytes(PART))
    assert [method for method, _ in proxy.requests] == ["PUT"]
    proxy.requests.clear()
    write(blobs, random_bytes(PART + 1))
    uploads = [path.partition("?")[2].partition("&")[0] for method, path in proxy.requests if method != "HEAD"]
    assert sorted(uploads)[:2] == ["partNumber=1", "partNumber=2"]
    assert uploads[0] == "uploads="
    assert uploads[-1].startswith("uploadId=")


def test_reading_anywhere(blobs: Blobs) -> None:
    data = random_bytes(13 * MB)
    name = write(blobs, data)
    with opened(blobs, name, len(data)) as file:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(start=st.integers(0, len(data) + 10), count=st.integers(0, 3 * MB))
        def check(start: int, count: int) -> None:
            file.seek(start)
            assert file.read(count) == data[start : start + count]

        check()


def test_a_stream_asks_for_each_byte_once(proxy: FaultyProxy, tmp_path: Path, open_shelf: OpenShelf) -> None:
    """With a seek over a part: a reader of some layers skips the others."""
    place = proxy.server.url("stream").replace(proxy.server.endpoint, proxy.endpoint)
    blobs = open_shelf(DiskPlace(tmp_path / "home"), place).blobs
    data = random_bytes(12 * MB)
    name = write(blobs, data)
    proxy.requests.clear()
    with opened(blobs, name, len(data)) as file:
        assert file.read(2 * MB) == data[: 2 * MB]
        file.seek(2 * MB + 10)
        assert file.read(9 * MB) == data[2 * MB + 10 : 11 * MB + 10]
    assert len(proxy.requests) <= 7  # the head, the tail, and ranges of 1, 2, 4 and 5 MB


def test_a_name_is_written_once(blobs: Blobs) -> None:
    for size in (100, PART + 1):
        name = write(blobs, random_bytes(size))
        with pytest.raises(StoreUnavailable, match="a name is written once"):
            blobs.write(name, [memoryview(bytes(size))], size, on_step=lambda _: None)
        with opened(blobs, name, size) as file:
            assert file.read(size) == random_bytes(size)


@pytest.mark.parametrize("size", [1000, PART + MB])
@pytest.mark.parametrize("excess", [-1, 1])
def test_another_number_of_bytes_than_announced_writes_nothing(
    blobs: Blobs, shared_s3: S3Server, tmp_path: Path, size: int, excess: int
) -> None:
    name = fresh_name()
    with pytest.raises(ValueError, match="were announced"):
        blobs.write(name, [memoryview(bytes(size + excess))], size, on_step=lambda _: None)
    assert not blobs.holds(name, size)
    assert len(shared_s3.keys(tmp_path.name)) == 1  # the marker
    uploads = shared_s3.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert not [upload for upload in uploads if name in upload["Key"]]


@pytest.mark.parametrize(
    ("size", "left"), [(1000, 0), (1000, 10), (HEAD + TAIL, 10), (HEAD + MB, 0), (HEAD + MB, 10), (HEAD + MB, HEAD + 1)]
)
def test_an_object_of_another_size_shows_it(
    blobs: Blobs, shared_s3: S3Server, tmp_path: Path, size: int, left: int
) -> None:
    name = write(blobs, random_bytes(size))
    (key,) = [key for key in shared_s3.keys(tmp_path.name) if name in key]
    shared_s3.client().put_object(Bucket=BUCKET, Key=key, Body=random_bytes(size)[:left])
    assert not blobs.holds(name, size)
    with opened(blobs, name, size) as file:
        assert file.seek(0, os.SEEK_END) == left


def test_an_object_that_goes_while_it_is_read(blobs: Blobs, shared_s3: S3Server, tmp_path: Path) -> None:
    data = random_bytes(40 * MB)
    name = write(blobs, data)
    with opened(blobs, name, len(data)) as file:
        assert file.read(HEAD) == data[:HEAD]
        (key,) = [key for key in shared_s3.keys(tmp_path.name) if name in key]
        shared_s3.client().delete_object(Bucket=BUCKET, Key=key)
        file.seek(30 * MB)
        with pytest.raises(BlobError) as caught:
            file.read(5 * MB)
        assert caught.value.reason == "missing"


# Readers


def test_removed_bytes_stay_for_who_reads_them(index: Place, shared_s3: S3Server, open_shelf: OpenShelf) -> None:
    url = shared_s3.url(f"readers-{index.kind}-{os.urandom(4).hex()}")
    one, other = open_shelf(index, url), open_shelf(index, url)
    cache = make_cache(num_tokens=4096, lengths=((4096, 4096),), dims=(64, 64))
    cache_id = one.put(cache).id
    reading = one.open_cache(cache_id)
    receipt = other.delete(cache_id)
    assert receipt.bytes_freed > HEAD + TAIL
    with pytest.raises(CacheNotFound):
        one.open_cache(cache_id)
    other.sweep()
    with reading:
        reading.read(together=True)
        require_equal(cache, reading.cache())
    assert [key for key in shared_s3.keys(url[len(f"s3://{BUCKET}/") :].partition("?")[0]) if key.endswith(".kvb")]
    other.sweep()
    assert other.check() == []
    assert not [key for key in shared_s3.keys(url[len(f"s3://{BUCKET}/") :].partition("?")[0]) if key.endswith(".kvb")]


@pytest.fixture(params=["disk", "redis"])
def leases(request: pytest.FixtureRequest, tmp_path: Path, shared_s3: S3Server, open_shelf: OpenShelf) -> Leases:
    """With `clock` for the disk; a server has its own."""
    clock = request.getfixturevalue("clock")
    index = (
        DiskPlace(tmp_path / "h") if request.param == "disk" else RedisPlace(request.getfixturevalue("shared_valkey"))
    )
    blobs = open_shelf(index, shared_s3.url(tmp_path.name), now=clock).blobs
    assert isinstance(blobs, ObjectBlobs)
    return blobs.leases


def test_leases(leases: Leases) -> None:
    name, other = fresh_name(), fresh_name()
    assert not leases.has_readers(name)
    assert leases.hold(name, "a")
    assert leases.hold(name, "a")
    assert leases.hold(name, "b")
    assert leases.has_readers(name)
    assert not leases.take(name)
    leases.release(name, "a")
    leases.release(name, "never")
    assert not leases.take(name)
    leases.release(name, "b")
    assert not leases.has_readers(name)
    assert leases.take(name)
    assert leases.take(name)
    assert not leases.hold(name, "c")
    assert not leases.has_readers(name)
    assert leases.hold(other, "a")


def test_leases_of_the_dead_end(tmp_path: Path, shared_s3: S3Server, open_shelf: OpenShelf, clock: Clock) -> None:
    blobs = open_shelf(DiskPlace(tmp_path / "home"), shared_s3.url(tmp_path.name), now=clock).blobs
    assert isinstance(blobs, ObjectBlobs)
    leases, name = blobs.leases, fresh_name()
    assert leases.hold(name, "dead")
    clock.time += READ_LEASE_S - 1
    assert not leases.take(name)
    clock.time += 1
    assert leases.take(name)
    clock.time += TAKEN_S - 1
    assert not leases.hold(name, "late")
    clock.time += 1
    assert leases.hold(name, "much later")


def test_a_reader_whose_lease_was_lost_stops(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(5 * MB)
    name = write(blobs, data)
    with opened(blobs, name, len(data)) as file:
        assert file.read(MB) == data[:MB]
        assert isinstance(blobs, ObjectBlobs)
        assert isinstance(file, ObjectFile)
        file.lease.release()
        assert blobs.leases.take(name)
        late = time.monotonic() + READ_LEASE_S
        monkeypatch.setattr(time, "monotonic", lambda: late)
        with pytest.raises(BlobError, match="gone"):
            file.read(MB)


# Killed in the middle of an upload


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared_s3", "seaweed"])
def test_killed_in_the_middle_of_an_upload(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, zygote: Zygote, open_shelf: OpenShelf, soak: bool
) -> None:
    """Nothing of it is visible, and the next put of the cache succeeds."""
    server: S3Server = request.getfixturevalue(kind)
    clock, index, prefix = Clock(), DiskPlace(tmp_path / "home"), f"killed-{tmp_path.name}"
    url = server.url(prefix)
    cache = make_cache(num_tokens=8192, lengths=((8192, 8192),) * 3, dims=(128, 128))  # 50 MB
    shelf = open_shelf(index, url, now=clock)
    begun, place = tmp_path / "begun", ObjectPlace("s3", BUCKET, prefix, server.endpoint)
    blobs = partial(ObjectBlobs.open_at, place)

    def child() -> None:
        with index.open(blobs=blobs, now=clock, on_step=lambda _: begun.touch()) as store:
            store.put(cache)

    rng = random.Random(1)
    for _ in range(20 if soak else 3):
        begun.unlink(missing_ok=True)
        writer = zygote.start(child)
        while not begun.exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0.01, 0.3))
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        clock.time += 61
        shelf.sweep()
        assert shelf.list().data == ()

        def swept() -> bool:
            """Called again, because a busy server ends what a killed writer began seconds later."""
            remove_late_arrivals(shelf)
            return not any(key.endswith(".kvb") for key in server.keys(prefix))

        wait_until(swept, "the bytes of the killed writer are removed")
    require_equal(cache, shelf.get(shelf.put(cache).id))
    assert shelf.check() == []


# Faults of the server and of the way to it


@pytest.fixture
def through(proxy: FaultyProxy, tmp_path: Path, open_shelf: OpenShelf) -> Callable[..., Blobs]:
    def through(timeout_s: float = 30) -> Blobs:
        url = proxy.server.url(tmp_path.name, timeout_s=timeout_s).replace(proxy.server.endpoint, proxy.endpoint)
        return open_shelf(DiskPlace(tmp_path / "home"), url).blobs

    return through


def test_failures_that_pass_are_not_noticed(through: Callable[..., Blobs], proxy: FaultyProxy) -> None:
    """Throttled requests, failed parts, answers that are lost or cut, also that of a conditional request."""
    blobs, data = through(), random_bytes(PART + MB)
    proxy.faults += [
        Fault("PUT", "partNumber=1", mute=True, times=1),
        Fault("PUT", "partNumber=2", status=503, code="SlowDown", times=2),
        Fault("POST", "uploadId", status=500, times=1),
        Fault("PUT", ".kvb", mute=True, times=1),
        Fault("PUT", ".kvb", status=503, code="SlowDown", times=2),
        Fault("GET", ".kvb", status=503, code="SlowDown", times=3),
        Fault("GET", ".kvb", cut=1000, times=2),
        Fault("HEAD", ".kvb", status=500, times=1),
    ]
    for some in (data, data[:1000]):
        name = write(blobs, some)
        with opened(blobs, name, len(some)) as file:
            assert file.read(len(some)) == some
        assert blobs.holds(name, len(some))
    assert not [fault for fault in proxy.faults if fault.times > 0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("PUT", ".kvb", status=500), "InternalError"),
        (Fault("PUT", ".kvb", status=403, code="AccessDenied"), r"refuses access \(AccessDenied\).*rights"),
        (Fault("PUT", ".kvb", status=401, code="InvalidToken"), "refuses access"),
        (Fault("PUT", ".kvb", status=404, code="NoSuchBucket"), "there is no bucket 'shelves'"),
        (Fault("PUT", ".kvb", delay_s=10), "does not work"),
    ],
)
def test_failures_that_stay_have_a_name(
    through: Callable[..., Blobs], proxy: FaultyProxy, fault: Fault, said: str
) -> None:
    blobs = through(timeout_s=2)
    proxy.faults.append(Fault(**vars(fault)))
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=said):
        write(blobs, random_bytes(1000))
    assert time.monotonic() - started < 30
    proxy.faults.clear()
    write(blobs, random_bytes(1000))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("POST", "uploads=", status=403, code="AccessDenied"), "refuses access"),
        (Fault("POST", "uploadId=", status=404, code="NoSuchUpload"), "has lost the upload of .* put it again"),
        (Fault("PUT", "partNumber=2", status=404, code="NoSuchUpload"), "has lost the upload of .* put it again"),
        (Fault("PUT", "partNumber=1", status=500), "InternalError"),
    ],
)
def test_a_multipart_upload_that_is_lost(
    through: Callable[..., Blobs], proxy: FaultyProxy, fault: Fault, said: str
) -> None:
    blobs = through(timeout_s=5)
    proxy.faults.append(Fault(**vars(fault)))
    with pytest.raises(StoreUnavailable, match=said):
        write(blobs, random_bytes(PART + 1))
    proxy.faults.clear()
    write(blobs, random_bytes(PART + 1))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault("GET", ".kvb", status=500), Fault("GET", ".kvb", delay_s=8)])
def test_an_outage_during_a_read(through: Callable[..., Blobs], proxy: FaultyProxy, fault: Fault) -> None:
    data = random_bytes(40 * MB)
    name = write(through(), data)
    blobs = through(timeout_s=2)
    with opened(blobs, name, len(data)) as file:
        assert file.read(MB) == data[:MB]
        proxy.faults.append(Fault(**vars(fault)))
        file.seek(32 * MB)
        with pytest.raises(StoreUnavailable, match="does not work"):
            file.read(5 * MB)
        proxy.faults.clear()
        deadline, read = time.monotonic() + 30, b""
        while read != data[32 * MB : 33 * MB]:  # the same file goes on after the outage
            with suppress(StoreUnavailable):
                read = file.read(MB)
            assert time.monotonic() < deadline


def test_readers_beside_each_other(blobs: Blobs) -> None:
    """More of them than requests at once, each right."""
    data = random_bytes(6 * MB)
    name = write(blobs, data)
    wrong: list[int] = []

    def read(number: int) -> None:
        with opened(blobs, name, len(data), once=bool(number % 2)) as file:
            if file.read(len(data)) != data:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not blobs.is_read(name)
