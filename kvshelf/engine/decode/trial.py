"""Whether a grammar compiles within limits of time and memory, as a process of its own finds out."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Final

from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.decode.trial_child import LENGTH
from kvshelf.errors import DeadlineExceeded, InternalError, InvalidRequest

COMPILE_S: Final = 2
"""Seconds of processor time that a grammar may take to compile. 1,800 properties take 0.4 s."""

LEXER_STATES: Final = 20_000
"""States that the texts of one answer's grammar may have. llguidance allows 250,000, which took 6.5 s, 1 s of it
within one token of an answer, while all others waited; with this it is 0.24 s, and 0.03 s."""

_MEMORY_BYTES: Final = 1 << 30
HANG_S: Final = 120.0
"""Seconds until a process that does not answer is ended: it is stopped, or the machine has no processor time for it. A
grammar is judged by processor time alone."""

_CHILD: Final = "kvshelf.engine.decode.trial_child"


class Trials:
    """Compiles grammars for one tokenizer, each first in a process of its own. For any thread: as many processes work
    as threads ask, and one stays for the next grammar.

    llguidance bounds the steps of an answer, but not all that it does with a schema: sixty patterns that one text must
    match take minutes. A thread could not be ended, and would keep a processor and its memory.
    """

    def __init__(self, tokenizer: str, *, hang_s: float = HANG_S) -> None:
        """tokenizer: as JSON."""
        self._tokenizer = tokenizer.encode()
        self._hang_s = hang_s
        self._idle: queue.LifoQueue[subprocess.Popen[bytes]] = queue.LifoQueue(maxsize=1)

    def require_compiled(self, grammar: Grammar) -> None:
        """Raises `InvalidRequest` for a grammar that is none, or takes more than the limits, and `DeadlineExceeded`
        where the process was ended before it had used its time."""
        process = self._process()
        hangs = threading.Timer(self._hang_s, process.kill)
        hangs.start()
        try:
            _write(process, grammar.text.encode())
            assert process.stdout is not None
            line = process.stdout.readline()
        finally:
            hangs.cancel()
        if not line:  # the process has ended
            raise self._error_of(process, grammar)
        try:
            self._idle.put_nowait(process)
        except queue.Full:
            _end(process)
        if error := line.strip():
            raise InvalidRequest(f"{grammar.param} cannot be used: {json.loads(error)[:500]}", param=grammar.param)

    def _process(self) -> subprocess.Popen[bytes]:
        with suppress(queue.Empty):
            if (process := self._idle.get_nowait()).poll() is None:
                return process
        command = [sys.executable, "-PB", "-m", _CHILD, *map(str, (COMPILE_S, _MEMORY_BYTES, LEXER_STATES))]
        # Only what Python needs to find its modules: no keys of the service.
        env = {name: value for name, value in os.environ.items() if name.startswith("PYTHON") or name == "PATH"}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd="/"
            )
        except OSError as error:
            raise InternalError(f"no process could be started to compile the grammar: {error.strerror}") from error
        _write(process, self._tokenizer)
        return process

    def _error_of(self, process: subprocess.Popen[bytes], grammar: Grammar) -> Exception:
        code = process.wait()
        _end(process)
        if code > 0:
            return InternalError(f"the process that compiles grammars ended with {code}")
        if code == -signal.SIGKILL:  # by the timer, or by a system without memory: its limit of time is SIGXCPU
            return DeadlineExceeded(
                f"{grammar.param} was not compiled: its process was ended from outside, or had used less than "
                f"{COMPILE_S} s of a processor after {self._hang_s:g} s, as on a machine that is too "
                "busy; try again later"
            )
        late = code == -signal.SIGXCPU
        excess = f"more than {COMPILE_S} s" if late else f"more than {_MEMORY_BYTES >> 30} GiB, or is nested too deep,"
        return InvalidRequest(
            f"{grammar.param} takes {excess} to compile ({len(grammar.text.encode())} bytes); give a simpler one, with "
            "fewer patterns that one text must match",
            param=grammar.param,
        )

    def __del__(self) -> None:
        with suppress(queue.Empty):
            _end(self._idle.get_nowait())


def _write(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the process has ended; its exit code says why
        process.stdin.write(LENGTH.pack(len(text)) + text)
        process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
