"""The socket on which a server listens, and its line to the process that started it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvshelf.errors import InvalidRequest


@dataclass(frozen=True)
class ServerPlace:
    """What a child inherits: the listening socket, and its end of a line to the supervisor.

    The child sends one byte when it is ready. The line closes when the child must leave or the supervisor has died.
    """

    listener: socket.socket
    line: socket.socket

    def __str__(self) -> str:
        return f"{self.listener.fileno()},{self.line.fileno()}"

    @classmethod
    @contextmanager
    def inherited(cls, numbers: str) -> Iterator[ServerPlace]:
        """The place that the supervisor passed as text (see `__str__`). The end of the block closes it."""
        listener, line = (socket.socket(fileno=int(number)) for number in numbers.split(","))
        with listener, line:
            for sock in (listener, line):
                sock.set_inheritable(False)  # Ray's processes must not inherit it
            line.setblocking(False)
            yield cls(listener, line)

    def require(self, host: str, port: int) -> None:
        """Raise `InvalidRequest` if the settings name another address: a restart cannot change the address.

        Otherwise a service without API keys, which must listen on loopback only, could keep listening elsewhere.
        """
        (_, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        have = self.listener.getsockname()
        if have[0] != address[0] or port not in (0, have[1]):
            raise InvalidRequest(
                f"the settings say {host} port {port}, but this service listens on {have[0]} port {have[1]}. "
                "To change the address, stop the service and start it again",
                param="port" if have[0] == address[0] else "host",
            )
