"""The supervisor's own work: which child serves, and when it ends. Its children here only hold their place."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.service.http.place import ServerPlace
from kvshelf.service.process.supervisor import bound
from tests.conftest import LiveService

SUPERVISOR = """
import sys
from kvshelf.service.settings import Settings
from kvshelf.service.process.supervisor import supervise
sys.exit(supervise(Settings(port=0), [sys.executable, sys.argv[1]]))
"""

# A child does what the file `plan` says when it starts, and writes what becomes of it: "<its pid> <word>".
CHILD = """
import os, pathlib, signal, socket, sys, time
here = pathlib.Path(__file__).parent
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback of its own

def tell(word):
    with (here / "told").open("a") as file:
        file.write(f"{os.getpid()} {word}\\n")

listener, line = (socket.socket(fileno=int(n)) for n in sys.argv[1].removeprefix("--place=").split(","))
plan = (here / "plan").read_text()
tell("started")
if plan == "fail":
    sys.exit(3)
while plan == "wait" and not (here / "go").exists():
    time.sleep(0.01)
listener.listen()
line.send(b".")
tell("ready")
try:
    line.recv(1)
except ConnectionResetError:  # the supervisor was killed before it read that this child is ready
    pass
tell("left")
"""


class Supervised:
    def __init__(self, folder: Path, plan: str = "serve", **options: Any) -> None:
        self.folder = folder
        (folder / "child.py").write_text(CHILD)
        self.plan(plan)
        command = [sys.executable, "-c", SUPERVISOR, str(folder / "child.py")]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, **options)

    def plan(self, word: str) -> None:
        (self.folder / "plan").write_text(word)

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def told(self, word: str) -> list[int]:
        """The children that have said this word, in their order."""
        file = self.folder / "told"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(line.split()[0]) for line in lines if line.endswith(f" {word}")]

    def pids(self, word: str, count: int) -> list[int]:
        """The first so many children to say this word, once they have."""
        end = time.monotonic() + 30
        while len(found := self.told(word)) < count:
            assert time.monotonic() < end, f"{found} {word}"
            time.sleep(0.01)
        assert len(found) == count
        return found

    def await_log(self, words: str) -> None:
        end = time.monotonic() + 30
        while words not in (self.folder / "log").read_text():
            assert time.monotonic() < end, words
            time.sleep(0.01)

    def ended(self) -> tuple[int, str]:
        """Its exit code, and what it logged."""
        return self.process.wait(timeout=30), (self.folder / "log").read_text()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    with ExitStack() as stack:

        def start(**options: Any) -> Supervised:
            running = Supervised(tmp_path, **options)
            stack.callback(running.process.kill)
            return running

        yield start


def test_a_child_that_is_ready_takes_over(supervised: Callable[..., Supervised]) -> None:
    it = supervised()
    (first,) = it.pids("ready", 1)
    it.hang_up()
    _, second = it.pids("ready", 2)
    assert it.pids("left", 1) == [first]
    it.process.terminate()
    code, log = it.ended()
    assert (code, it.told("left")) == (128 + signal.SIGTERM, [first])  # this child has no handler for signals
    assert f'"pid": {second}, "before": {first}' in log


def test_a_child_that_fails_changes_nothing(supervised: Callable[..., Supervised]) -> None:
    it = supervised()
    (first,) = it.pids("ready", 1)
    it.plan("fail")
    it.hang_up()
    it.await_log("the restart failed")
    assert it.told("left") == []
    it.plan("serve")
    it.hang_up()
    it.pids("ready", 2)
    assert it.pids("left", 1) == [first]
    it.process.terminate()
    it.ended()


def test_a_first_child_that_fails_is_the_end(supervised: Callable[..., Supervised]) -> None:
    assert supervised(plan="fail").ended() == (3, "")


def test_while_one_comes_up_the_next_waits(supervised: Callable[..., Supervised]) -> None:
    """Asked three times meanwhile, another one is started after it: what has changed since it started counts."""
    it = supervised()
    it.pids("ready", 1)
    it.plan("wait")
    it.hang_up()
    it.pids("started", 2)
    for _ in range(3):
        it.hang_up()
        time.sleep(0.2)
    assert len(it.told("started")) == 2
    (it.folder / "go").touch()
    assert len(it.pids("ready", 3)) == 3
    assert len(it.pids("left", 2)) == 2
    it.process.terminate()
    it.ended()
    assert len(it.told("started")) == 3


def test_the_death_of_the_service_is_the_end(supervised: Callable[..., Supervised]) -> None:
    it = supervised()
    os.kill(it.pids("ready", 1)[0], signal.SIGKILL)
    code, log = it.ended()
    assert code == 128 + signal.SIGKILL
    assert "ended by itself" in log


def test_one_that_comes_up_takes_the_place_of_a_dead_one(supervised: Callable[..., Supervised]) -> None:
    it = supervised()
    (first,) = it.pids("ready", 1)
    it.plan("wait")
    it.hang_up()
    it.pids("started", 2)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    (it.folder / "go").touch()
    it.pids("ready", 2)
    it.process.terminate()
    assert it.ended()[0] == 128 + signal.SIGTERM


def test_a_child_outlives_its_supervisor_only_to_leave(supervised: Callable[..., Supervised]) -> None:
    it = supervised()
    ready = it.pids("ready", 1)
    it.process.kill()
    assert it.pids("left", 1) == ready


def test_a_signal_reaches_all_children(supervised: Callable[..., Supervised]) -> None:
    """Also one that is on its way; nothing is left behind."""
    it = supervised()
    it.pids("ready", 1)
    it.plan("wait")
    it.hang_up()
    pids = it.pids("started", 2)
    it.process.send_signal(signal.SIGINT)
    assert it.ended()[0] == 128 + signal.SIGINT
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_its_very_end_changes_nothing(supervised: Callable[..., Supervised], number: int) -> None:
    service = supervised()
    service.pids("ready", 1)
    service.process.terminate()
    while service.process.poll() is None:
        service.process.send_signal(number)
        time.sleep(0.001)
    # Of the child, which a signal ended. Two that wait are delivered in the order of their numbers.
    assert service.process.returncode - 128 in {signal.SIGTERM, number} - {signal.SIGHUP}  # which is not passed on
    assert "Traceback" not in (service.folder / "log").read_text()


def test_a_window_that_is_closed_asks_for_no_restart(supervised: Callable[..., Supervised]) -> None:
    ours, theirs = pty.openpty()
    it = supervised(stdin=theirs, start_new_session=True)
    os.close(theirs)
    it.pids("ready", 1)
    os.close(ours)
    it.hang_up()
    it.ended()
    assert len(it.told("started")) == 1


def test_another_address_is_refused() -> None:
    with bound("127.0.0.1", 0) as listener:
        place = ServerPlace(listener, listener)
        port = listener.getsockname()[1]
        place.require("127.0.0.1", 0)
        place.require("127.0.0.1", port)
        place.require("localhost", port)
        for host, other in [("127.0.0.2", port), ("0.0.0.0", port), ("127.0.0.1", port % 65535 + 1)]:
            with pytest.raises(InvalidRequest, match="stop the service"):
                place.require(host, other)


def test_a_port_is_ones_own_before_it_listens() -> None:
    """Another process could bind it while the models were loaded, and whoever listened first ended the other."""
    with bound("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1 port {port}"), bound("127.0.0.1", port):
            pass


@pytest.mark.slow
def test_a_port_whose_connections_wait_for_their_end_is_taken_again(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path
) -> None:
    with start_service(tmp_path, tiny_folder) as service:
        host, port = service.url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)))
        client.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        while client.recv(4096):
            pass  # the service ends the connection, so it waits on the service's side
        client.close()
    with bound(host, int(port)):
        pass
