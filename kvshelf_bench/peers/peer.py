"""Peers in processes of their own, asked for one measurement at a time, so that they can take turns with kvshelf."""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvshelf.errors import InvalidRequest, WorkerCrashed


class Peer:
    """A running worker, asked by one JSON line at a time. ready: what it said first. versions: of its packages."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process = process
        self._name = name
        self.ready = self._answer()
        self.versions: dict[str, str] = self.ready["versions"]

    def ask(self, **request: Any) -> dict[str, Any]:
        """The worker's answer. Raises `WorkerCrashed` if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> WorkerCrashed:
        return WorkerCrashed(
            f"the process of {self._name} ended with exit code {self._process.wait()}; its own message stands above"
        )


def require_kvpress(interpreter: Path) -> None:
    """Raises `InvalidRequest` for an interpreter that cannot import kvpress."""
    try:
        tried = subprocess.run([interpreter, "-I", "-c", "import kvpress"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise InvalidRequest(
            f"--kvpress-python {interpreter} cannot be run: {error}", param="kvpress_python"
        ) from error
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise InvalidRequest(f"--kvpress-python {interpreter} cannot import kvpress: {last}", param="kvpress_python")


@contextmanager
def running(interpreter: str, worker: str, arguments: Sequence[str], name: str) -> Iterator[Peer]:
    """A worker of this folder; errors call its process `name`. Raises `InvalidRequest` for an interpreter that does not
    exist, and `WorkerCrashed` if the worker dies, as it does without its package."""
    with _process(interpreter, worker, arguments) as process:
        yield Peer(process, name)


@contextmanager
def ready_by(ends: float, interpreter: str, worker: str, arguments: Sequence[str], name: str) -> Iterator[Peer | None]:
    """As `running`; None, and no process, if the worker is not ready when the monotonic clock says `ends`."""
    with _process(interpreter, worker, arguments) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            process.kill()
        yield Peer(process, name) if ready else None


@contextmanager
def _process(interpreter: str, worker: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    # -I: neither this process's PYTHONPATH nor the folder of the worker, whose modules have names of their own.
    command = [interpreter, "-I", str(Path(__file__).with_name(f"{worker}_worker.py")), *arguments]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise InvalidRequest(f"--{worker}-python {interpreter}: {error}", param=f"{worker}_python") from error
    with process:  # closes the worker's standard input, which ends the worker
        try:
            yield process
        except BaseException:
            process.kill()
            raise
