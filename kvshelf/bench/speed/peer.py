"""Peers in processes of their own, asked for one measurement at a time, so that they can take turns with kvshelf."""

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


class Peer:
    """A running worker, asked by one JSON line at a time. versions: of its packages."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process = process
        self._name = name
        self.ready = self._answer()
        self.versions: dict[str, str] = self.ready["versions"]

    def ask(self, **asked: Any) -> dict[str, Any]:
        """The worker's answer. Raises `WorkerCrashed` if it has ended."""
        assert self._process.stdin is not None
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
            f"the process of {self._name} ended with exit code {self._process.wait()}; its own message stands above"
        )


class KvpressPeer(Peer):
    """methods: the methods that it can measure, by kvshelf's names."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(process, "kvpress")
        self.methods: frozenset[str] = frozenset(self.ready["methods"])

    def measure(self, method: str, removed: float, token_ids: Sequence[int]) -> dict[str, float]:
        """One prefill: total_s, hook_s and wall_s in seconds, and the entries kept. See `kvpress_worker.py`."""
        return self.ask(method=method, removed=removed, token_ids=list(token_ids))


@contextmanager
def open_kvpress(interpreter: str | None, subject: Subject, threads: int) -> Iterator[KvpressPeer | None]:
    """kvpress with the model, dtype, device and threads of `subject`, under `interpreter`.

    None means this interpreter if it has kvpress, whose pin of transformers seldom allows this, and otherwise no peer.
    Raises as `open_vllm`.
    """
    if interpreter is None and find_spec("kvpress") is not None:
        interpreter = sys.executable
    if interpreter is None:
        yield None
        return
    given = (subject.source, subject.dtype, str(subject.device), str(threads))
    with running(interpreter, "kvpress", given) as process:
        yield KvpressPeer(process)


@contextmanager
def open_vllm(interpreter: str, subject: Subject, threads: int, longest: int) -> Iterator[Peer]:
    """vLLM on a CPU with the model, dtype and threads of `subject`, for up to `longest` tokens, under `interpreter`.

    Raises `InvalidRequest` if the interpreter does not exist, `WorkerCrashed` if the worker dies, as it does without
    vLLM.
    """
    with running(interpreter, "vllm", (subject.source, subject.dtype, str(threads), str(longest))) as process:
        yield Peer(process, "vLLM")


@contextmanager
def running(interpreter: str, name: str, given: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A worker of this folder. Raises `InvalidRequest` for an interpreter that does not exist."""
    # -I: neither this process's PYTHONPATH nor the folder of the worker, whose modules have names of their own.
    command = [interpreter, "-I", str(Path(__file__).with_name(f"{name}_worker.py")), *given]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise InvalidRequest(f"--{name}-python {interpreter}: {error}", param=f"{name}_python") from error
    with process:  # closes the worker's standard input, which ends the worker
        try:
            yield process
        except BaseException:
            process.kill()
            raise
