"""A process that forks children for tests of object storage: `python -m tests.store.zygote`.

A fork of a process that has used object storage cannot use it, and pytest's own process has. This one never does; its
children do.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

import cloudpickle

from tests.store.processes import Child, start_child


class Zygote:
    """The other end: `start` forks there. Used by one thread."""

    def __enter__(self) -> Self:
        root = Path(__file__).parents[2]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-m", __name__], cwd=root, stdin=pipe, stdout=pipe)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def start(self, work: Callable[[], None]) -> Child:
        return RemoteChild(self._ask("start", cloudpickle.dumps(work)), self._ask)

    def _ask(self, verb: str, value: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, (verb, value))
        return int(pickle.load(self._process.stdout))


class RemoteChild(Child):
    """A child of the zygote. Signals reach it as they reach a child of this process."""

    def __init__(self, pid: int, ask: Callable[[str, Any], int]) -> None:
        super().__init__(pid)
        self._ask = ask

    def wait(self) -> int:
        return self._ask("wait", self.pid)


def _send(file: IO[bytes], value: Any) -> None:
    pickle.dump(value, file)
    file.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a child prints must not come between the answers
    while True:
        try:
            verb, value = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if verb == "start":
            work = pickle.loads(value)
            _send(answers, start_child(work).pid)
        else:
            _send(answers, Child(value).wait())


if __name__ == "__main__":
    import tests.store.caches  # noqa: F401 - torch and the store are imported once, for all children

    main()
