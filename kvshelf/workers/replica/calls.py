"""Shared by all calls of a replica: threads beside the event loop, log context, and named errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import structlog

from kvshelf.errors import DocumentTooLong, InternalError, KvshelfError

log = structlog.get_logger("kvshelf.workers")

ResultT = TypeVar("ResultT")


class Threads(ThreadPoolExecutor):
    """Threads for blocking work: tokenization and the store."""

    async def run(self, call: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        """Run `call` on a thread, with the log context of this request."""
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self, partial(run, call, *args, **kwargs))


@contextmanager
def called_as(origin: str) -> Iterator[None]:
    """One call of a replica, in its own task: log lines carry the caller's id, and errors are kvshelf's."""
    structlog.contextvars.bind_contextvars(request_id=origin)
    with named_errors():
        yield


@contextmanager
def named_errors() -> Iterator[None]:
    """Turn foreign errors into errors of kvshelf, because others may not survive pickling to another process."""
    try:
        yield
    except KvshelfError:
        raise
    except Exception as exc:
        import torch  # here, because callers of replicas import this module, and they need no torch

        if isinstance(exc, torch.OutOfMemoryError):
            raise DocumentTooLong(f"this does not fit into the memory of the device: {str(exc)[:200]}") from exc
        log.exception("a bug in a replica")
        raise InternalError(f"the worker failed unexpectedly ({type(exc).__name__}); its log has the details") from exc
