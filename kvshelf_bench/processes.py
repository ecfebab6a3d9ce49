"""Processes of a bench, each behind a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from kvshelf.errors import WorkerCrashed


@contextmanager
def processes(
    target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
) -> Iterator[dict[Connection, BaseProcess]]:
    """One process per tuple: `target(pipe, *arguments)`. All processes have ended after the block.

    A pipe closes when the process at its other end ends, even if that process is killed.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    started: dict[Connection, BaseProcess] = {}
    with ExitStack() as stack:
        for own_arguments in arguments:
            near_end, far_end = context.Pipe()
            started[near_end] = process = context.Process(target=target, args=(far_end, *own_arguments), daemon=True)
            process.start()
            far_end.close()
            stack.callback(process.join)
            stack.callback(process.terminate)  # runs first; its results have been received, or another process has died
        yield started


def arriving(busy: dict[Connection, BaseProcess], advice: str = "") -> Iterator[tuple[Connection, Any]]:
    """One object from each process of `busy`, as they come; the caller puts a process back for its next object.

    Raises `WorkerCrashed`, with `advice`, as soon as one of them has died, whatever the others do.
    """
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            process = busy.pop(connection)
            try:
                result = connection.recv()
            except (EOFError, ConnectionResetError) as error:
                process.join()
                reason = f"a process of the bench ended with exit code {process.exitcode}; its own message stands above"
                raise WorkerCrashed(reason + advice) from error
            yield connection, result
