"""kvpress in a process of its own, asked for one prefill at a time, so that it can take turns with kvshelf."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvshelf.bench.speed.subject import Subject
from kvshelf.errors import InvalidRequest, WorkerCrashed

_WORKER = Path(__file__).with_name("kvpress_worker.py")


class Peer:
    """A running worker. methods: the methods it can measure, by kvshelf's names; versions: of its packages."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        ready = self._answer()
        self.methods: frozenset[str] = frozenset(ready["methods"])
        self.versions: dict[str, str] = ready["versions"]

    def measure(self, method: str, removed: float, token_ids: Sequence[int]) -> dict[str, float]:
        """One prefill: total_s, hook_s and wall_s in seconds, and the entries kept. See `kvpress_worker.py`."""
        assert self._process.stdin is not None
        asked = {"method": method, "removed": removed, "token_ids": list(token_ids)}
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
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
            f"the process of kvpress ended with exit code {self._process.wait()}; its own message stands above"
        )


@contextmanager
def open_peer(interpreter: str | None, subject: Subject, threads: int) -> Iterator[Peer | None]:
    """kvpress with the model, dtype, device and threads of `subject`, under `interpreter`.

    None means this interpreter if it has kvpress, whose pin of transformers seldom allows this, and otherwise no peer.
    Raises `InvalidRequest` if the interpreter does not exist, `WorkerCrashed` if the worker dies, as it does without
    kvpress.
    """
    if interpreter is None and find_spec("kvpress") is not None:
        interpreter = sys.executable
    if interpreter is None:
        yield None
        return
    # -I: neither this process's PYTHONPATH nor the folder of the worker, whose modules have names of their own.
    command = [interpreter, "-I", str(_WORKER), subject.source, subject.dtype, str(subject.device), str(threads)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise InvalidRequest(f"--kvpress-python {interpreter}: {error}", param="kvpress_python") from error
    with process:  # closes the worker's standard input, which ends the worker
        try:
            yield Peer(process)
        except BaseException:
            process.kill()
            raise
