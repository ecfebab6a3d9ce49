"""Processes that read hostile input: each lives for one input, with limits on memory and processor time.

A thread would not do: it holds the interpreter's lock during a long parse, cannot be ended, and shares the caller's
memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Final

_PIECE_BYTES: Final = 1 << 20


def ended_by(code: int) -> str:
    """The reason for a process that ended without output."""
    return "time" if code == -signal.SIGXCPU else "crashed"


async def run(command: list[str], data: bytes | bytearray, most: int) -> tuple[int, bytearray]:
    """Runs a process with `data` as input; returns its exit code and output. Kills it if it writes more than `most`
    bytes or if this call is cancelled."""
    # No settings and keys, only what Python needs to find its modules.
    environment = {name: value for name, value in os.environ.items() if name.startswith("PYTHON") or name == "PATH"}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        cwd="/",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    feeding = asyncio.create_task(_feed(process.stdin, data))
    output = bytearray()
    try:
        while len(output) <= most and (piece := await process.stdout.read(_PIECE_BYTES)):
            output += piece
        if len(output) <= most:
            await process.wait()
    finally:
        feeding.cancel()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        while await process.stdout.read(_PIECE_BYTES):  # unread output stops the pipe, and wait() waits for its end
            pass
        await asyncio.gather(feeding, process.wait(), return_exceptions=True)
    assert process.returncode is not None
    return process.returncode, output


async def _feed(pipe: asyncio.StreamWriter, data: bytes | bytearray) -> None:
    with suppress(ConnectionError):  # the process has already ended; its output says why
        for start in range(0, len(data), _PIECE_BYTES):
            pipe.write(data[start : start + _PIECE_BYTES])
            await pipe.drain()
        pipe.close()
