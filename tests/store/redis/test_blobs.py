"""Bytes in Redis: whole, or an error that says so; nothing freed under a reader; nothing left by the dead."""

from __future__ import annotations

import io
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.artifact.memory import fresh_memory
from kvshelf.errors import BlobError, StorageFull, StoreUnavailable
from kvshelf.store.blobs import MARGIN_S, new_name
from kvshelf.store.redis.blobs import CHUNK, RedisBlobs
from kvshelf.store.redis.link import RedisLink
from tests.store.redis.servers import PATIENT, Cluster, LyingServer, ValkeyServer, wait_until

Start = Callable[..., ValkeyServer]
Connect = Callable[[str], RedisLink]

MB = 1 << 20


@pytest.fixture
def blobs(valkey: ValkeyServer, connect: Connect) -> RedisBlobs:
    return RedisBlobs(connect(valkey.url + PATIENT), "test")


def fresh_name() -> str:
    return new_name("kvs_" + os.urandom(20).hex())


def write(blobs: RedisBlobs, data: bytes, *, keep: bool = True) -> str:
    name = fresh_name()
    blobs.write(name, [memoryview(data)], len(data), on_step=lambda _: None)
    if keep:
        blobs.keep_until(name, len(data), None)
    return name


def opened(blobs: RedisBlobs, name: str, nbytes: int) -> io.RawIOBase:
    file = blobs.open(name, nbytes)
    assert file is not None
    return file


def chunk_key(name: str, index: int) -> str:
    return f"{{test/{name}}}:{index}"


# Whole


@pytest.mark.parametrize("nbytes", [0, 1, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 20 * MB + 7])
def test_what_is_written_is_read(blobs: RedisBlobs, valkey: ValkeyServer, nbytes: int) -> None:
    data = random.randbytes(nbytes)
    name = write(blobs, data)
    assert blobs.holds(name, nbytes)
    with opened(blobs, name, nbytes) as file:
        assert file.seek(0, io.SEEK_END) == nbytes
        file.seek(0)
        memory = fresh_memory(nbytes)
        assert file.readinto(memory) == nbytes
        assert memory == data
        assert file.readinto(bytearray(1)) == 0
    assert blobs.remove(name, nbytes)
    assert not blobs.holds(name, nbytes)
    assert blobs.open(name, nbytes) is None
    assert valkey.client().dbsize() == 0


def test_pieces_of_any_size_are_written_without_keeping_them(blobs: RedisBlobs) -> None:
    """A writer may make each piece in the same memory, as encryption does."""
    sizes = [0, 1, 64, 40_000, 3 * MB, 5, 9 * MB + 3, 0, 100, CHUNK]
    scratch = bytearray(max(sizes))
    steps: list[str] = []

    def pieces() -> Iterator[memoryview]:
        for number, size in enumerate(sizes):
            scratch[:size] = bytes([number]) * size
            yield memoryview(scratch)[:size]

    name = fresh_name()
    blobs.write(name, pieces(), sum(sizes), on_step=steps.append)
    assert steps == ["created", "written", "synced"]
    with opened(blobs, name, sum(sizes)) as file:
        assert file.readall() == b"".join(bytes([number]) * size for number, size in enumerate(sizes))


@pytest.mark.parametrize("given_bytes", [5, 7, CHUNK + 6, 0])
def test_another_number_of_bytes_than_announced_is_a_bug_and_said(blobs: RedisBlobs, given_bytes: int) -> None:
    with pytest.raises(ValueError, match="than announced"):
        blobs.write(fresh_name(), [memoryview(bytes(given_bytes))], 6, on_step=lambda _: None)


def test_a_name_is_written_once(blobs: RedisBlobs) -> None:
    name = write(blobs, b"first")
    with pytest.raises(StoreUnavailable, match="written once"):
        blobs.write(name, [memoryview(b"other")], 5, on_step=lambda _: None)
    assert opened(blobs, name, 5).readall() == b"first"


@pytest.mark.parametrize("name", ["", "x", "../x", "kvs_" + "0" * 40, "0" * 40 + "-" + "0" * 15 + "}"])
def test_what_is_no_name_is_refused(blobs: RedisBlobs, name: str) -> None:
    for call in (blobs.holds, blobs.open, blobs.remove, blobs.set_aside):
        with pytest.raises(StoreUnavailable, match="not the name"):
            call(name, 1)
    with pytest.raises(StoreUnavailable, match="not the name"):
        blobs.is_read(name)


READS = st.lists(st.tuples(st.integers(0, 10 * MB + 3), st.sampled_from([1, 16, 300, 70_000, 300_000, 5 * MB])))


@pytest.mark.slow
@given(READS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_is_read_in_any_order(shared_file: tuple[RedisBlobs, str, bytes], reads: list[tuple[int, int]]) -> None:
    blobs, name, data = shared_file
    with opened(blobs, name, len(data)) as file:
        for offset, size in reads:
            file.seek(offset)
            assert file.read(size) == data[offset : offset + size]
            assert file.tell() == min(offset + size, len(data))
            assert file.read(size) == data[offset + size : offset + 2 * size]  # and on from there


@pytest.fixture
def shared_file(blobs: RedisBlobs) -> tuple[RedisBlobs, str, bytes]:
    data = random.randbytes(10 * MB + 3)
    return blobs, write(blobs, data), data


def test_a_small_read_inside_does_not_fetch_a_chunk(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    name = write(blobs, bytes(CHUNK))
    before = valkey.client().info("stats")["total_net_output_bytes"]
    with opened(blobs, name, CHUNK) as file:
        for offset in (90_000, CHUNK - 40, 80_000):
            file.seek(offset)
            file.read(32)
    assert valkey.client().info("stats")["total_net_output_bytes"] - before < 20_000


@pytest.mark.parametrize("nbytes", [1, 4, 5, 20 * MB])
def test_a_beginning_is_all_that_the_server_sends(blobs: RedisBlobs, valkey: ValkeyServer, nbytes: int) -> None:
    data = random.randbytes(nbytes)
    name = write(blobs, data)
    blobs.beginning(name, nbytes, 4)  # connects
    before = valkey.client().info("stats")
    assert blobs.beginning(name, nbytes, 4) == data[:4]
    after = valkey.client().info("stats")
    assert after["total_net_output_bytes"] - before["total_net_output_bytes"] < 64 << 10
    assert after["total_connections_received"] - before["total_connections_received"] <= 1  # the asking client itself
    blobs.remove(name, nbytes)
    assert blobs.beginning(name, nbytes, 4) is None


def test_nothing_begins_with_nothing(blobs: RedisBlobs) -> None:
    assert blobs.beginning(write(blobs, b""), 0, 4) == b""


def test_a_file_closed_after_its_last_bytes_leaves_its_connection(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    """A blob is read at its beginning, at its end, at its beginning again, and then up to its trailer."""
    data = bytes(2 * CHUNK)
    name = write(blobs, data)
    blobs.is_read(name)
    before = valkey.client().info("stats")["total_connections_received"]
    for _ in range(5):
        with opened(blobs, name, len(data)) as file:
            for offset, count in ((0, 8), (len(data) - 40, 40), (0, 16)):
                file.seek(offset)
                file.read(count)
            file.readinto(bytearray(len(data) - 16 - 40))
    after = valkey.client().info("stats")["total_connections_received"]
    assert after - before <= 2, "one more for the file, one for the question"


def test_a_blob_is_opened_in_one_round_trip_and_closed_in_none(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    data = random.randbytes(2 * CHUNK + 100)
    name = write(blobs, data)
    opened(blobs, name, len(data)).close()  # the server has the script now
    before = _calls(valkey)
    file = blobs.open(name, len(data), once=True)
    assert file is not None
    assert (file.read(16), file.seek(-40, io.SEEK_END), file.read(40)) == (data[:16], len(data) - 40, data[-40:])
    opened_with = _calls(valkey) - before
    file.seek(16)
    rest = bytearray(len(data) - 16 - 40)
    assert file.readinto(rest[: CHUNK + 16]) == CHUNK + 16  # type: ignore[attr-defined]
    assert blobs.is_read(name), "its last piece has not come"
    file.seek(CHUNK + 32)
    file.readinto(memoryview(rest)[CHUNK + 16 :])  # type: ignore[attr-defined]
    assert rest[CHUNK + 16 :] == data[CHUNK + 32 : -40]
    wait_until(lambda: not blobs.is_read(name), "the lease ends with the last piece", 2)
    before = _calls(valkey)
    file.close()
    assert _calls(valkey) == before
    assert opened_with == 3 + 2, "lease, beginning and end; and what is read on, asked for at once"


def test_a_lease_that_has_ended_is_not_taken_again(connect: Connect, valkey: ValkeyServer) -> None:
    blobs = RedisBlobs(connect(valkey.url), "brief", read_lease_s=0.9)
    data = random.randbytes(MB // 2)
    name = write(blobs, data)
    file = blobs.open(name, len(data), once=True)
    assert file is not None
    with file:
        file.read(20_000)  # the last piece has begun
        wait_until(lambda: not blobs.is_read(name), "the lease ends with the last piece", 2)
        time.sleep(0.4)  # a third of the lease, after which it would be renewed
        assert file.readall() == data[20_000:]
    assert not blobs.is_read(name)


def test_a_closed_file_is_not_read(blobs: RedisBlobs) -> None:
    file = opened(blobs, write(blobs, bytes(2 * CHUNK)), 2 * CHUNK)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.readinto(bytearray(CHUNK))


def test_a_file_that_may_be_read_again_is_leased_until_it_is_closed(blobs: RedisBlobs) -> None:
    data = random.randbytes(CHUNK + 100)
    name = write(blobs, data)
    with opened(blobs, name, len(data)) as file:
        assert file.readall() == data
        assert blobs.is_read(name)
        blobs.remove(name, len(data))
        file.seek(0)
        assert file.readall() == data
    assert not blobs.is_read(name)


def _calls(valkey: ValkeyServer) -> int:
    """Commands that read or release bytes, and scripts."""
    stats = valkey.client().info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "get", "getrange", "zrem"))


def test_a_file_closed_in_the_middle_harms_nobody(blobs: RedisBlobs) -> None:
    data = random.randbytes(5 * CHUNK)
    name = write(blobs, data)
    for _ in range(3):
        with opened(blobs, name, len(data)) as file:
            file.read(MB)
    with opened(blobs, name, len(data)) as file:
        assert file.readall() == data


def test_more_than_redis_holds_in_one_value(blobs: RedisBlobs, soak: bool) -> None:
    """Beyond 512 MB Redis takes no value at all."""
    nbytes = (513 if soak else 65) * MB + 5
    piece = memoryview(random.randbytes(MB))
    name = fresh_name()
    pieces = [*[piece] * (nbytes // MB), piece[: nbytes % MB]]
    blobs.write(name, pieces, nbytes, on_step=lambda _: None)
    with opened(blobs, name, nbytes) as file:
        for expected in pieces:
            assert file.read(len(expected)) == expected
    assert blobs.remove(name, nbytes)


@pytest.mark.slow
def test_chunks_of_a_blob_are_on_one_node_and_blobs_on_all(
    tmp_path_factory: pytest.TempPathFactory, connect: Connect
) -> None:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        blobs = RedisBlobs(connect(cluster.url + PATIENT), "test")
        data = random.randbytes(CHUNK + 5)
        names: set[str] = set()
        while not all(node.client().dbsize() for node in cluster.nodes):
            assert len(names) < 100, "a node has no blob of a hundred"
            names.add(write(blobs, data))
        assert {name for name, _ in blobs.walk()} == names
        for name in names:
            assert cluster.place(chunk_key(name, 0)) == cluster.place(chunk_key(name, 1))
        for name in names:
            assert opened(blobs, name, len(data)).readall() == data
        moved = names.pop()
        slot, home = cluster.place(chunk_key(moved, 0))
        cluster.move_slot(slot, cluster.nodes[home], cluster.nodes[(home + 1) % 3])
        assert opened(blobs, moved, len(data)).readall() == data
        for name in (*names, moved):
            assert blobs.remove(name, len(data))


# Lost


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("damage", ["gone", "short", "long", "another type"])
def test_a_lost_chunk_is_said_to_be_missing(blobs: RedisBlobs, valkey: ValkeyServer, lost: int, damage: str) -> None:
    data = random.randbytes(2 * CHUNK + 100)
    name = write(blobs, data)
    _damage(valkey, chunk_key(name, lost), damage)
    expected = (StoreUnavailable, "WRONGTYPE") if damage == "another type" else (BlobError, "in Redis any more")
    with opened(blobs, name, len(data)) as file, pytest.raises(expected[0], match=expected[1]) as caught:
        file.readall()
    if isinstance(caught.value, BlobError):
        assert caught.value.reason == "missing"
        assert not blobs.holds(name, len(data))
        with pytest.raises(BlobError):
            blobs.keep_until(name, len(data), None)
    other = write(blobs, data)
    assert opened(blobs, other, len(data)).readall() == data


def _damage(valkey: ValkeyServer, key: str, damage: str) -> None:
    client = valkey.client()
    if damage == "short":
        client.set(key, client.getrange(key, 1, -1))
    elif damage == "long":
        client.append(key, b"x")
    else:
        client.delete(key)
        if damage == "another type":
            client.rpush(key, "x")


@pytest.mark.parametrize("small", [True, False])
def test_a_chunk_lost_while_a_file_is_read_is_never_a_short_read(
    blobs: RedisBlobs, valkey: ValkeyServer, small: bool
) -> None:
    data = bytes(5 * CHUNK)
    name = write(blobs, data)
    with opened(blobs, name, len(data)) as file:
        file.read(MB)
        valkey.client().delete(chunk_key(name, 4))
        file.seek(len(data) - 1000)
        with pytest.raises(BlobError) as caught:
            file.read(100 if small else 1000)
        assert caught.value.reason == "missing"
        file.seek(0)
        assert file.read(CHUNK) == data[:CHUNK], "what is still there can still be read"


# Expiry


@pytest.mark.slow
def test_a_dead_writers_chunks_go_away_by_themselves(valkey: ValkeyServer, soak: bool) -> None:
    """A process that writes is killed at a random moment; it has a lease of half a second."""
    for _ in range(20 if soak else 1):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, valkey.url], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        client = valkey.client()
        keys = client.keys()
        assert all(client.pttl(key) != -1 for key in keys), "there is never a chunk without an expiry"
        wait_until(lambda client=client: client.dbsize() == 0, "all is gone", 2)


_WRITER = """
import os, sys
from kvshelf.store.blobs import new_name
from kvshelf.store.redis import address
from kvshelf.store.redis.blobs import RedisBlobs
from kvshelf.store.redis.link import RedisLink
blobs = RedisBlobs(RedisLink(address.parse(sys.argv[1])), "test", write_lease_s=0.5)
print("ready", flush=True)
data = memoryview(os.urandom(1 << 20))
while True:
    name = new_name("kvs_" + os.urandom(20).hex())
    blobs.write(name, [data] * 40, 40 << 20, on_step=lambda _: None)
"""


def test_a_slow_writer_keeps_its_chunks(valkey: ValkeyServer, connect: Connect) -> None:
    """Chunks that are there and chunks that are not yet; what is kept for good stays so."""
    blobs = RedisBlobs(connect(valkey.url + PATIENT), "test", write_lease_s=1.0)
    client, nbytes = valkey.client(), 3 * CHUNK
    name = fresh_name()

    def pieces() -> Iterator[memoryview]:
        for _ in range(3):
            for _ in range(3):
                time.sleep(0.2)
                blobs.renew(name, nbytes)
            yield memoryview(bytes(CHUNK))

    blobs.write(name, pieces(), nbytes, on_step=lambda _: None)
    assert all(0 < client.pttl(chunk_key(name, index)) <= 1000 for index in range(3))
    blobs.keep_until(name, nbytes, None)
    blobs.renew(name, nbytes)
    assert {client.pttl(chunk_key(name, index)) for index in range(3)} == {-1}


def test_a_writer_that_came_too_late_is_told(valkey: ValkeyServer, connect: Connect) -> None:
    blobs = RedisBlobs(connect(valkey.url + PATIENT), "test", write_lease_s=0.1)
    name = write(blobs, bytes(CHUNK + 1), keep=False)
    time.sleep(0.2)
    with pytest.raises(BlobError) as caught:
        blobs.keep_until(name, CHUNK + 1, None)
    assert caught.value.reason == "missing"


def test_all_chunks_end_together_after_the_margin(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    nbytes = 2 * CHUNK + 1
    name = write(blobs, bytes(nbytes), keep=False)
    client = valkey.client()
    expires_at = time.time() + 1000
    blobs.keep_until(name, nbytes, expires_at)
    ends = {client.execute_command("PEXPIRETIME", chunk_key(name, index)) for index in range(3)}
    assert ends == {round((expires_at + MARGIN_S) * 1000)}
    blobs.keep_until(name, nbytes, None)
    assert {client.pttl(chunk_key(name, index)) for index in range(3)} == {-1}


def test_nothing_shortens_the_life_of_chunks(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    """Whoever comes late may be one whose manifest does not count any more."""
    name, client, expires_at = write(blobs, b"data", keep=False), valkey.client(), time.time() + 1000
    for kept in (expires_at, None):
        blobs.keep_until(name, 4, kept)
        before = client.execute_command("PEXPIRETIME", chunk_key(name, 0))
        blobs.keep_until(name, 4, expires_at - 500)
        blobs.renew(name, 4)
        assert client.execute_command("PEXPIRETIME", chunk_key(name, 0)) == before


# Readers


LEASE_S = 0.6
"""Of some readers here, so that a test need not wait for a minute."""


@pytest.fixture
def brief(valkey: ValkeyServer, connect: Connect) -> RedisBlobs:
    return RedisBlobs(connect(valkey.url + PATIENT), "test", read_lease_s=LEASE_S)


def test_nothing_is_freed_under_a_reader(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    data = random.randbytes(3 * CHUNK)
    name = write(blobs, data)
    with opened(blobs, name, len(data)) as one, opened(blobs, name, len(data)) as two:
        assert blobs.is_read(name)
        assert one.read(MB) == data[:MB]
        assert blobs.remove(name, len(data))
        assert one.readall() == data[MB:]
        assert two.readall() == data
    assert not blobs.is_read(name)
    client = valkey.client()
    keys = client.keys()
    assert all(0 < client.pttl(key) <= 60_000 for key in keys), "what is left goes by itself"


def test_removed_bytes_go_when_their_reader_dies(brief: RedisBlobs, valkey: ValkeyServer) -> None:
    name = write(brief, bytes(CHUNK))
    file = opened(brief, name, CHUNK)
    brief.remove(name, CHUNK)
    wait_until(lambda: valkey.client().dbsize() == 0, "all is gone", 3 * LEASE_S)
    assert not brief.is_read(name)
    with pytest.raises(BlobError):
        file.readall()


@pytest.mark.slow
def test_a_reader_that_reads_keeps_removed_bytes(valkey: ValkeyServer, connect: Connect) -> None:
    """Reading takes three times the lease, which a busy machine that stalls for a second still keeps."""
    lease_s = 2.0
    blobs = RedisBlobs(connect(valkey.url + PATIENT), "test", read_lease_s=lease_s)
    data = random.randbytes(2 * CHUNK)
    name = write(blobs, data)
    with opened(blobs, name, len(data)) as file:
        blobs.remove(name, len(data))
        step = len(data) // 20
        for offset in range(0, 20 * step, step):
            assert file.read(step) == data[offset : offset + step]
            time.sleep(3 * lease_s / 20)
        assert blobs.is_read(name)
    wait_until(lambda: valkey.client().dbsize() == 0, "all is gone", 3 * lease_s)


def test_expired_bytes_stay_for_their_reader(valkey: ValkeyServer, connect: Connect) -> None:
    blobs = RedisBlobs(connect(valkey.url + PATIENT), "test", write_lease_s=3)
    name = write(blobs, bytes(CHUNK), keep=False)
    blobs.keep_until(name, CHUNK, time.time() - MARGIN_S + 3)
    with opened(blobs, name, CHUNK) as file:
        time.sleep(3.2)
        assert len(file.readall()) == CHUNK


def test_many_readers_and_removals(blobs: RedisBlobs) -> None:
    """Whoever has it open reads it whole; whoever comes later is told, or finds it still there."""
    data = random.randbytes(2 * CHUNK + 3)
    whole: list[bool] = []
    for _ in range(5):
        name = write(blobs, data)

        def read(name: str = name) -> None:
            time.sleep(random.uniform(0, 0.02))
            file = blobs.open(name, len(data))
            if file is not None:
                with file:
                    whole.append(file.readall() == data)

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(random.uniform(0, 0.02))
        blobs.remove(name, len(data))
        for thread in threads:
            thread.join()
    assert whole
    assert all(whole)


# Aside, and what there is


def test_bytes_set_aside_are_kept_and_not_found_by_opening(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    data = random.randbytes(CHUNK + 1)
    name = write(blobs, data)
    blobs.set_aside(name, len(data))
    blobs.set_aside(name, len(data))
    assert blobs.open(name, len(data)) is None
    assert not blobs.holds(name, len(data))
    assert valkey.client().get(f"{{test/{name}}}:aside:1") == data[CHUNK:]
    assert [name for name, _ in blobs.walk()] == [name]
    assert blobs.remove(name, len(data))
    assert valkey.client().dbsize() == 0


def test_found_tells_every_name_of_this_shelf_and_how_long_it_lay(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    names = {write(blobs, bytes(CHUNK + 1)) for _ in range(5)}
    write(RedisBlobs(blobs.link, "other"), b"x")
    valkey.client().mset({"test": 1, "{test/x}:0": 1, f"{{test/{fresh_name()}}}:what": 1})
    time.sleep(1.1)
    walked = list(blobs.walk())
    assert {name for name, _ in walked} == names
    assert len(walked) == 5
    assert all(1 <= seconds < 10 for _, seconds in walked)


def test_a_server_that_may_drop_bytes_is_a_problem(start_valkey: Start, connect: Connect) -> None:
    (problem,) = RedisBlobs(connect(start_valkey(maxmemory_policy="allkeys-lru").url), "test").problems()
    assert "noeviction" in problem


# A server of no use


def test_a_full_server_takes_nothing_and_can_still_be_read(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey(maxmemory="32mb")
    blobs = RedisBlobs(connect(server.url + PATIENT), "test")
    data = random.randbytes(8 * MB)
    name = write(blobs, data)
    with pytest.raises(StorageFull):
        write(blobs, bytes(64 * MB))
    server.client().config_set("maxmemory", "4mb")
    assert opened(blobs, name, len(data)).readall() == data
    blobs.keep_until(name, len(data), time.time())
    assert blobs.remove(name, len(data))


@pytest.mark.parametrize("moment", ["between chunks", "within a chunk"])
def test_hung_in_the_middle_of_a_file(start_valkey: Start, connect: Connect, moment: str) -> None:
    server = start_valkey()
    blobs = RedisBlobs(connect(server.url), "test")
    data = random.randbytes(64 * MB)
    name = write(blobs, data)
    with opened(blobs, name, len(data)) as file:
        file.read(CHUNK if moment == "between chunks" else CHUNK + MB)
        server.pause()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            file.readall()
        assert time.monotonic() - started < 1
        server.resume()
        wait_until(lambda: _is_up(blobs), "the link has healed", 5)
        position = file.tell()
        assert file.read(100_000) == data[position : position + 100_000], "it goes on where it was"
        file.seek(0)
        assert file.read(2 * CHUNK) == data[: 2 * CHUNK], "it can be used again"


def test_hung_in_the_middle_of_a_write(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey()
    blobs = RedisBlobs(connect(server.url), "test")
    paused: list[float] = []

    def pieces() -> Iterator[memoryview]:
        for number in range(16):
            if number == 2:
                server.pause()
                paused.append(time.monotonic())
            yield memoryview(bytes(CHUNK))

    with pytest.raises(StoreUnavailable):
        blobs.write(fresh_name(), pieces(), 16 * CHUNK, on_step=lambda _: None)
    assert time.monotonic() - paused[-1] < 1


def test_killed_in_the_middle_of_a_file_and_of_a_write(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey()
    blobs = RedisBlobs(connect(server.url), "test")
    data = random.randbytes(64 * MB)
    name = write(blobs, data)
    file = opened(blobs, name, len(data))
    file.read(CHUNK)
    server.kill()
    with pytest.raises(StoreUnavailable):
        file.readall()
    file.close()
    server.start()
    wait_until(lambda: _is_up(blobs), "the link has healed", 5)

    def pieces() -> Iterator[memoryview]:
        for start in range(0, len(data), CHUNK):
            if start == 6 * CHUNK:
                assert server.client().dbsize() > 3
                server.kill()
            yield memoryview(data)[start : start + CHUNK]

    with pytest.raises(StoreUnavailable):
        blobs.write(fresh_name(), pieces(), len(data), on_step=lambda _: None)


def _is_up(blobs: RedisBlobs) -> bool:
    try:
        return not blobs.is_read(fresh_name())
    except StoreUnavailable:
        return False


@pytest.mark.parametrize("answer", [b":0\r\n", b"$-1\r\n"])
def test_what_does_not_say_ok_has_not_written(connect: Connect, answer: bytes) -> None:
    with LyingServer(answer) as server, pytest.raises(StoreUnavailable, match="OK was expected"):
        write(RedisBlobs(connect(server.url), "test"), b"data")


def test_an_absurd_length_is_refused_before_memory_is_taken(blobs: RedisBlobs, valkey: ValkeyServer) -> None:
    """The server has 256 MB where 100 bytes belong."""
    name = write(blobs, bytes(100))
    valkey.client().setrange(chunk_key(name, 0), 256 * MB, b"x")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with opened(blobs, name, 100) as file, pytest.raises(BlobError):
        file.read(10)  # the beginning: the whole value is asked for
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 20_000  # KB
