"""The protocol, on a real pair of sockets whose other end the test holds."""

from __future__ import annotations

import random
import socket
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.store.redis.wire import Garbled, RedisRefusal, Wire


class Pair:
    """A wire and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        ours.settimeout(5)
        self.wire = Wire(ours)
        self._ours = ours

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self.peer.close()

    def answer(self, data: bytes, *, cuts: int = 0) -> None:
        """Send from a thread of its own, in pieces."""
        places = sorted(random.sample(range(len(data) + 1), min(cuts, len(data))))
        pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
        threading.Thread(target=lambda: [self.peer.sendall(piece) for piece in pieces if piece], daemon=True).start()


replies = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40_000),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)


def encoded(reply: Any) -> bytes:
    match reply:
        case None:
            return random.choice([b"$-1\r\n", b"*-1\r\n"])
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case _:
            return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


@given(st.lists(replies, min_size=1, max_size=4), st.integers(0, 6))
def test_answers_are_what_was_sent_wherever_they_are_cut(sent: list[Any], cuts: int) -> None:
    with Pair() as pair:
        pair.answer(b"".join(map(encoded, sent)), cuts=cuts)
        assert [pair.wire.receive() for _ in sent] == sent


@given(st.lists(st.lists(st.binary(max_size=100) | st.integers() | st.text(max_size=20), min_size=1), min_size=1))
def test_commands_are_what_a_server_reads(commands: list[list[Any]]) -> None:
    """A command has the form of a list of values, so a second wire can read it."""
    with Pair() as pair:
        pair.wire.send(*commands)
        pair.peer.settimeout(5)
        server = Wire(pair.peer)
        expected = [
            [part if isinstance(part, bytes) else str(part).encode() for part in command] for command in commands
        ]
        assert [server.receive() for _ in commands] == expected


def test_a_value_in_pieces_is_one_argument() -> None:
    pieces = [b"", b"a" * 10, b"b" * 100_000, b"c", b"d" * 40_000, b"e" * 1_000_000]
    with Pair() as pair:
        reader = Wire(pair.peer)
        received: list[Any] = []
        thread = threading.Thread(target=lambda: received.append(reader.receive()))
        thread.start()
        pair.wire.begin_value(("SET", "key"), sum(map(len, pieces)))
        for piece in pieces:
            pair.wire.put(memoryview(piece))
        pair.wire.end_value()
        thread.join(5)
    assert received == [[b"SET", b"key", b"".join(pieces)]]


def test_a_value_goes_into_the_callers_memory() -> None:
    value = random.randbytes(300_000)
    with Pair() as pair:
        pair.answer(encoded(value) + encoded(7), cuts=5)
        buffer = bytearray(len(value))
        assert pair.wire.bulk() == len(value)
        pair.wire.fill(memoryview(buffer)[:10])
        pair.wire.fill(memoryview(buffer)[10:])
        pair.wire.end_bulk()
        assert buffer == value
        assert pair.wire.receive() == 7


def test_an_error_of_the_server_is_an_answer() -> None:
    with Pair() as pair:
        pair.answer(b"*2\r\n-OOM no memory\r\n:1\r\n-ERR what\r\n+OK\r\n")
        first, second = pair.wire.receive()
        assert isinstance(first, RedisRefusal)
        assert first.code == "OOM"
        assert second == 1
        with pytest.raises(RedisRefusal, match="ERR what"):
            pair.wire.bulk()
        assert pair.wire.receive() == b"OK"


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"?\r\n",
        b"x" * 100_000,
        b"+" + b"x" * 100_000,
        b"$abc\r\n",
        b"$-2\r\n",
        b"$ 1\r\na\r\n",
        b"$1_0\r\n0123456789\r\n",
        b"$+1\r\na\r\n",
        b":\r\n",
        b":1.5\r\n",
        b":" + b"9" * 5000 + b"\r\n",
        b"$9999999999999999999\r\n",
        b"$68719476736\r\n",
        b"*1000000000\r\n",
        b"*1000000\r\n" * 7,
        b"*1\r\n" * 1000,
        b"$1\r\nabc\r\n",
    ],
)
def test_garbage_is_refused_without_memory(garbage: bytes) -> None:
    tracemalloc.start()
    try:
        with Pair() as pair:
            pair.answer(garbage)
            with pytest.raises(Garbled):
                pair.wire.receive()
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("answer", [b":1\r\n", b"+OK\r\n", b"*1\r\n$1\r\na\r\n", b"$x\r\n"])
def test_what_is_no_value_is_not_taken_for_one(answer: bytes) -> None:
    with Pair() as pair:
        pair.answer(answer)
        with pytest.raises(Garbled):
            pair.wire.bulk()


@pytest.mark.parametrize(
    "cut", [b"", b"$", b"$10\r", b"$10\r\n", b"$10\r\n12345", b"$10\r\n0123456789", b"*2\r\n:1\r\n"]
)
def test_a_connection_that_ends_too_soon_is_an_error(cut: bytes) -> None:
    with Pair() as pair:
        pair.peer.sendall(cut)
        pair.peer.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            pair.wire.receive()


def test_silence_is_an_error_and_a_slow_reader_is_none() -> None:
    """The timeout is for progress: what is sent may take longer in all."""
    with Pair() as pair:
        pair._ours.settimeout(1.0)
        with pytest.raises(TimeoutError):
            pair.wire.receive()
        reader = threading.Thread(target=_read_slowly, args=(pair.peer, 5_000_000, 2.0))
        reader.start()
        pair.wire.begin_value(("SET", "key"), 5_000_000)
        pair.wire.put(memoryview(bytes(5_000_000)))
        pair.wire.end_value()
        reader.join(30)
        assert not reader.is_alive()


def _read_slowly(peer: socket.socket, nbytes: int, seconds: float) -> None:
    done = 0
    while done < nbytes:
        done += len(peer.recv(nbytes // 20))
        threading.Event().wait(seconds / 20)
