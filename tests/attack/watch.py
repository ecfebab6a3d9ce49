"""Watches a service while it is attacked: how long it is silent, how much memory it takes.

Run as a program with an address, it asks for /livez until its standard input ends, and prints the longest time between
two answers in seconds. It is a process of its own, because an attacker holds the interpreter's lock.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

_PAUSE_S = 0.005


@dataclass
class Watched:
    """What was seen, once the block has ended. `silent_s`: the longest time without an answer of /livez. `peak_bytes`:
    of the front end, which took `base_bytes` before. `children_bytes`: the most that its children took together."""

    silent_s: float = 0.0
    base_bytes: int = 0
    peak_bytes: int = 0
    children_bytes: int = 0


@contextmanager
def watched(url: str, pid: int) -> Iterator[Watched]:
    """pid: of the front end."""
    seen = Watched(base_bytes=memory_of(pid))
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is that from here on
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.02):
            seen.children_bytes = max(seen.children_bytes, _held_by_children(pid))

    sampling = threading.Thread(target=sample)
    sampling.start()
    asking = subprocess.Popen([sys.executable, __file__, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    asking.stdout.readline()  # it has begun
    try:
        yield seen
    finally:
        said, _ = asking.communicate(timeout=300)
        seen.silent_s = float(said)
        ended.set()
        sampling.join()
        seen.peak_bytes = memory_of(pid, "VmHWM")


def _held_by_children(pid: int) -> int:
    """Bytes of the processes that the front end has started to read hostile input."""
    held = 0
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _text(listed).split():
            if "kvshelf.service.http" in _text(Path(f"/proc/{child}/cmdline")):
                held += 4096 * int((_text(Path(f"/proc/{child}/statm")).split()[1:2] or ["0"])[0])
    return held


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""


def memory_of(pid: int, name: str = "VmRSS") -> int:
    """Bytes of a process: now, or at its peak."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _ask(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=200)
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    longest, before = 0.0, time.monotonic()
    print("begun", flush=True)
    while not ended.wait(_PAUSE_S):
        connection.request("GET", "/livez")
        assert connection.getresponse().read() is not None
        longest = max(longest, time.monotonic() - before - _PAUSE_S)
        before = time.monotonic()
    print(longest)


if __name__ == "__main__":
    _ask(sys.argv[1])
