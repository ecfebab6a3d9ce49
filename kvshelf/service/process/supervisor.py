"""`kvshelf serve`: a small process, without torch or ray, that holds the listening socket and runs the service as its
child."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from kvshelf.errors import InvalidRequest
from kvshelf.service.http.place import ServerPlace
from kvshelf.service.observe import logs
from kvshelf.service.settings import Settings

log = structlog.get_logger("kvshelf.service")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(settings: Settings, command: Sequence[str]) -> int:
    """Run the service until SIGINT or SIGTERM, or until it ends by itself. Returns its exit code, 130 after SIGINT.

    On SIGHUP a new child starts on the same socket, with the current code and settings; once it is ready, the old one
    stops accepting, finishes its open requests and exits. No connection is lost: connections wait in the socket's queue
    until a child accepts them. If the new child does not start, nothing changes. (To replace Ray Serve's replicas one
    by one would keep the front end's old code.)

    `command` plus a `--place` option starts a child. Raises `InvalidRequest` if it cannot listen on the address.
    """
    logs.configure(settings.log_level)
    with bound(settings.host, settings.port) as listener, _signals() as numbers:
        return asyncio.run(_Supervisor(command, listener, numbers).run())


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """From it the numbers of arriving signals are read. Afterwards they are ignored until the process ends.

    asyncio's handlers give each signal its default action back when the loop closes, so a late one would end the
    process with a wrong exit code. To block them in this thread does not help: a library's thread would take them.
    """
    numbers, written = socket.socketpair()
    with numbers, written:
        numbers.setblocking(False)
        written.setblocking(False)
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        try:
            yield numbers
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to the port. It does not listen yet, so connections are refused until the service is ready.

    Reusing the address is allowed while it is bound, for a port whose old connections still wait for their end, and not
    afterwards: another process could bind the port, too, and whoever listens first would end the other.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose another --port, or 0 for a free one",
            param="port",
        ) from error
    with listener:
        yield listener


@contextmanager
def alone(host: str, port: int) -> Iterator[ServerPlace]:
    """The place of a server that no supervisor has started: nobody ends its line. Raises as `bound` does."""
    line, other_end = socket.socketpair()
    with bound(host, port) as listener, line, other_end:
        line.setblocking(False)
        yield ServerPlace(listener, line)


@dataclass(frozen=True, eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    line: socket.socket


class _Supervisor:
    """Starts at most one child at a time. The last child to become ready serves."""

    def __init__(self, command: Sequence[str], listener: socket.socket, signals: socket.socket) -> None:
        self._command = command
        self._listener = listener
        self._signals = signals
        self._lives = asyncio.TaskGroup()
        self._children: list[_Child] = []
        self._coming: _Child | None = None
        self._serving: _Child | None = None
        self._restart_due = False
        self._stopping = self._interrupted = False
        self._exit_code = 0
        self._in_terminal = os.isatty(0)

    async def run(self) -> int:
        """See `supervise`. Ends when no child is left: a starting child may replace one that died."""
        asyncio.get_running_loop().add_reader(self._signals, self._take_signals)
        async with self._lives:
            self._start()
        return 128 + signal.SIGINT if self._interrupted else self._exit_code

    def _take_signals(self) -> None:
        for number in self._signals.recv(4096):
            if number == signal.SIGHUP:
                self._replace()
            else:
                self._stop(number)

    def _stop(self, number: int) -> None:
        self._stopping = True
        self._interrupted = self._interrupted or number == signal.SIGINT
        for child in self._children:
            child.process.send_signal(number)

    def _replace(self) -> None:
        if self._in_terminal and not os.isatty(0):  # here SIGHUP means that the terminal was closed
            self._stop(signal.SIGTERM)
            return
        self._restart_due = True
        self._start_if_due()

    def _start_if_due(self) -> None:
        """Start a child if a restart was requested since the last start, but not while another child is starting."""
        if self._restart_due and self._coming is None and not self._stopping:
            self._restart_due = False
            log.info("restarting")
            try:
                self._start()
            except OSError as error:
                log.error("the restart failed; nothing has changed", reason=str(error))

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            place = ServerPlace(self._listener, theirs)
            # A new session: Ctrl-C reaches only the supervisor, which passes it on, so a child gets each signal once.
            process = subprocess.Popen(
                [*self._command, f"--place={place}"],
                pass_fds=(place.listener.fileno(), place.line.fileno()),
                start_new_session=True,
            )
        ours.setblocking(False)
        self._coming = child = _Child(process, ours)
        self._children.append(child)
        self._lives.create_task(self._live(child))

    async def _live(self, child: _Child) -> None:
        ready = await asyncio.get_running_loop().sock_recv(child.line, 1)  # empty if the child died before that
        self._coming = None
        if ready:
            before, self._serving = self._serving, child
            if before is not None:
                log.info("restarted", pid=child.process.pid, before=before.process.pid)
                before.line.close()
        self._start_if_due()
        code = await asyncio.to_thread(child.process.wait)
        child.line.close()
        self._children.remove(child)
        if self._serving in (None, child):
            self._exit_code = code if code >= 0 else 128 - code  # what shells return after a signal
        if self._stopping:
            return
        if child is self._serving:
            log.error("the service has ended by itself", exit_code=code)
        elif not ready and self._serving is not None:
            log.error("the restart failed, for the reason above; the service from before goes on", exit_code=code)
