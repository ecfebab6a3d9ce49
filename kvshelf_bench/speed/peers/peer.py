"""Peers in processes of their own, asked for one measurement at a time, so that they can take turns with kvshelf."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvshelf.errors import InvalidRequest, WorkerCrashed
from kvshelf_bench.speed.subject import Subject


class Peer:
    """A running worker, asked by one JSON line at a time. ready: what it said first. versions: of its packages."""

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


def open_kvpress(interpreter: str | None, subject: Subject, threads: int) -> AbstractContextManager[Peer | None]:
    """kvpress with the model, dtype, device and threads of `subject`, under `interpreter`. See `kvpress_worker.py`.

    None means this interpreter if it has kvpress, whose pin of transformers seldom allows this, and otherwise no peer.
    Raises as `running`.
    """
    given = (subject.source, subject.dtype, str(subject.device), str(threads))
    return _found(interpreter, "kvpress", "kvpress", given, "kvpress")


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


def open_vllm(
    interpreter: str | None, subject: Subject, threads: int, longest: int, ends: float
) -> AbstractContextManager[Peer | None]:
    """As `open_kvpress`, vLLM on a CPU, for up to `longest` tokens; no peer either where it is not ready when the
    monotonic clock says `ends`, because it compiles the model first. See `vllm_worker.py`."""
    given = (subject.source, subject.dtype, str(threads), str(longest))
    return _found(interpreter, "vllm", "vllm", given, "vLLM", ends)


def open_llama(
    interpreter: str | None, subject: Subject, threads: int, longest: int, answers: int
) -> AbstractContextManager[Peer | None]:
    """As `open_kvpress`, llama.cpp on the CPU, for up to `longest` tokens and `answers` at once; no peer for a model
    that is no GGUF file. See `llama_worker.py`."""
    if subject.gguf is None:
        return nullcontext()
    return _found(
        interpreter, "llama_cpp", "llama", (subject.gguf, str(threads), str(longest), str(answers)), "llama.cpp"
    )


def _found(
    interpreter: str | None, package: str, worker: str, given: Sequence[str], name: str, ends: float | None = None
) -> AbstractContextManager[Peer | None]:
    if interpreter is None and find_spec(package) is not None:
        interpreter = sys.executable
    if interpreter is None:
        return nullcontext()
    of = interpreter, worker, given, name
    return running(*of) if ends is None else _ready_by(ends, *of)


@contextmanager
def running(interpreter: str, worker: str, given: Sequence[str], name: str) -> Iterator[Peer]:
    """A worker of this folder; errors call its process `name`. Raises `InvalidRequest` for an interpreter that does not
    exist, and `WorkerCrashed` if the worker dies, as it does without its package."""
    with _process(interpreter, worker, given) as process:
        yield Peer(process, name)


@contextmanager
def _ready_by(ends: float, interpreter: str, worker: str, given: Sequence[str], name: str) -> Iterator[Peer | None]:
    """As `running`; None, and no process, if the worker is not ready when the monotonic clock says `ends`."""
    with _process(interpreter, worker, given) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            process.kill()
        yield Peer(process, name) if ready else None


@contextmanager
def _process(interpreter: str, worker: str, given: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    # -I: neither this process's PYTHONPATH nor the folder of the worker, whose modules have names of their own.
    command = [interpreter, "-I", str(Path(__file__).with_name(f"{worker}_worker.py")), *given]
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
