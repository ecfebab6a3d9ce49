"""The protocol of Redis (RESP2) on a socket that redis-py has opened and secured.

redis-py's own reader and writer copy every value into a new bytes object (0.3 GB/s for 64 MiB: the first touch of its
memory costs more than the transfer), trust any length a peer claims, and may resend a command that was executed. Here a
value goes straight into the caller's memory, lengths are bounded before any allocation, and nothing is sent twice.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

Part = bytes | str | int | float
Command = Sequence[Part]
Reply = Any
"""bytes, int, None, a list of replies, or a `RedisRefusal` that the server gave as its answer."""

_INBOX: Final = 16 << 10  # bytes; also the limit of one line: answers of one line are short
_SMALL: Final = 32 << 10  # bytes; below it, copying buffers together is cheaper than sending each
_REPLY_LIMIT: Final = 64 << 20  # bytes of one whole reply; values that may be larger are read by `bulk`
_ITEM: Final = 64  # bytes that an item of a list counts for, besides its own
_DEPTH: Final = 8


class RedisRefusal(Exception):
    """An error that the server answered. `code` is its first word, as in `OOM` or `NOSCRIPT`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.split(" ", 1)[0]


class Garbled(Exception):
    """The bytes received are not valid protocol, or do not answer the command. The connection is unusable."""


class Wire:
    """One conversation on an idle, blocking socket. Not for several threads at once. Answers come in the order of the
    commands; as many may be under way as the caller likes. Raises `OSError` where the socket does (`TimeoutError` when
    nothing moves for the socket's timeout) and `Garbled`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox = bytearray(_INBOX)
        self._start = self._end = 0  # of the bytes received and not read yet
        self._outbox = bytearray()

    # Sending

    def send(self, *commands: Command) -> None:
        for command in commands:
            self._add(command)
        self._flush()

    def begin_value(self, command: Command, size: int) -> None:
        """Begin a command whose last argument is `size` bytes, which `put` then gives piece by piece."""
        self._add(command, more=1)
        self._outbox += b"$%d\r\n" % size

    def put(self, piece: memoryview) -> None:
        """Send a piece of a value. Its memory may be reused on return."""
        if len(piece) < _SMALL:
            self._outbox += piece
            if len(self._outbox) >= _SMALL:
                self._flush()
        else:
            self._flush()
            self._send(piece)

    def end_value(self) -> None:
        self._outbox += b"\r\n"
        self._flush()

    def _add(self, command: Command, more: int = 0) -> None:
        """more: arguments that follow these."""
        self._outbox += b"*%d\r\n" % (len(command) + more)
        for part in command:
            data = part if isinstance(part, bytes) else str(part).encode()
            self._outbox += b"$%d\r\n%b\r\n" % (len(data), data)

    def _flush(self) -> None:
        ready, self._outbox = self._outbox, bytearray()
        self._send(memoryview(ready))

    def _send(self, data: memoryview) -> None:
        while data:  # not `sendall`, whose timeout covers all data: a slow network is no hung server
            data = data[self._sock.send(data) :]

    # Receiving

    def receive(self) -> Reply:
        """The next answer. An error of the server is returned, not raised: other answers may follow it."""
        reply, _ = self._reply(_REPLY_LIMIT, _DEPTH)
        return reply

    def bulk(self) -> int | None:
        """Begin to receive an answer that is one value. Returns its length, None for a null. Raises `RedisRefusal`.
        `fill` then receives all of its bytes, `end_bulk` ends it."""
        line = self._line()
        if line[:1] == b"-":
            raise RedisRefusal(_text(line))
        if line[:1] != b"$":
            raise Garbled(f"{line[:40]!r} came where the length of a value was expected")
        return _length(line)

    def fill(self, buffer: memoryview) -> None:
        """Receive as many bytes as the buffer has."""
        ready = min(self._end - self._start, len(buffer))
        buffer[:ready] = self._inbox[self._start : self._start + ready]
        self._start += ready
        buffer = buffer[ready:]
        while buffer:
            buffer = buffer[self._received(self._sock.recv_into(buffer)) :]

    def end_bulk(self) -> None:
        if self._line() != b"":
            raise Garbled("a value is longer than its length")

    def _reply(self, room: int, depth: int) -> tuple[Reply, int]:
        """An answer, and how much of `room` is left after it."""
        line = self._line()
        kind = line[:1]
        if kind == b"+":
            return line[1:], room
        if kind == b"-":
            return RedisRefusal(_text(line)), room
        if kind == b":":
            return _number(line), room
        if kind not in (b"$", b"*"):
            raise Garbled(f"{line[:40]!r} is not an answer of Redis")
        length = _length(line)
        if length is None:
            return None, room
        room -= length if kind == b"$" else length * _ITEM
        if room < 0 or depth == 0:
            raise Garbled(f"{line[:40]!r} announces an answer of absurd size")
        if kind == b"$":
            value = bytearray(length)
            self.fill(memoryview(value))
            self.end_bulk()
            return bytes(value), room
        items = []
        for _ in range(length):
            item, room = self._reply(room, depth - 1)
            items.append(item)
        return items, room

    def _line(self) -> bytes:
        while (end := self._inbox.find(b"\r\n", self._start, self._end)) < 0:
            waiting = self._end - self._start
            self._inbox[:waiting] = self._inbox[self._start : self._end]
            self._start, self._end = 0, waiting
            if waiting == _INBOX:
                raise Garbled(f"{bytes(self._inbox[:40])!r} is not an answer of Redis")
            self._end += self._received(self._sock.recv_into(memoryview(self._inbox)[waiting:]))
        line = bytes(self._inbox[self._start : end])
        self._start = end + 2
        return line

    def _received(self, count: int) -> int:
        if count == 0:
            raise ConnectionResetError("the server closed the connection")
        return count


def _text(line: bytes) -> str:
    return line[1:].decode(errors="replace")


def _number(line: bytes) -> int:
    digits = line[1:]
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise Garbled(f"{line[:40]!r} is not an answer of Redis")
    return int(digits)


def _length(line: bytes) -> int | None:
    length = _number(line)
    if length < -1:
        raise Garbled(f"{line[:40]!r} is not an answer of Redis")
    return None if length == -1 else length
