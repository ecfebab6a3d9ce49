"""The peers of the speed bench, where an interpreter has them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

from kvshelf_bench.peers.peer import Peer, ready_by, running
from kvshelf_bench.speed.subject import Subject


def open_kvpress(interpreter: str | None, subject: Subject, threads: int) -> AbstractContextManager[Peer | None]:
    """kvpress with the model, dtype, device and threads of `subject`, under `interpreter`. See `kvpress_worker.py`.

    None means this interpreter if it has kvpress, whose pin of transformers seldom allows this, and otherwise no peer.
    Raises as `running`.
    """
    given = (subject.source, subject.dtype, str(subject.device), str(threads))
    return _found(interpreter, "kvpress", "kvpress", given, "kvpress")


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
    return running(*of) if ends is None else ready_by(ends, *of)
