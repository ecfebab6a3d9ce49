"""Shared by all calls of a replica: threads beside the event loop, log context, and named errors."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from kvshelf.errors import InternalError, KvshelfError
from kvshelf.workers.replica.queues import Rounds

log = structlog.get_logger("kvshelf.workers")

ResultT = TypeVar("ResultT")

tenant_at_work: ContextVar[str] = ContextVar("kvshelf.tenant", default="")
"""The tenant of the request that the current task or thread works for; "" for the service's own work."""

_LONGEST_PAUSE_S: Final = 1.0


async def relayed(fetch: Callable[[asyncio.Queue[ResultT | None]], Awaitable[None]]) -> AsyncGenerator[ResultT, None]:
    """What `fetch` puts into its queue, as it comes; a reader that leaves ends the fetching."""
    pieces: asyncio.Queue[ResultT | None] = asyncio.Queue()
    fetching = asyncio.ensure_future(fetch(pieces))
    fetching.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await fetching
    finally:
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)


class Threads(ThreadPoolExecutor):
    """Threads for blocking work: the store, searches. Tenants take turns, whatever the work is, and one alone takes
    half of the threads at most, or `most`, so that the next one's work finds a thread.

    The tenant is `tenant_at_work` of the caller, so that `asyncio.to_thread` takes turns too where these are the
    default threads of a loop.
    """

    def __init__(self, max_workers: int = 8, thread_name_prefix: str = "replica", most: int | None = None) -> None:
        super().__init__(max_workers, thread_name_prefix)
        self._most = max(1, max_workers // 2) if most is None else most
        self._lock = threading.Lock()
        self._waiting: Rounds[tuple[str, Future[Any], Callable[[], Any]]] = Rounds()
        self._working: Counter[str] = Counter()

    async def run(self, call: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        """Run `call` on a thread, with the log context of this request. A caller that leaves takes it out of the queue;
        a call that can take long is given the `check` of a `Ticket` to end by."""
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self, partial(run, call, *args, **kwargs))

    async def finished(self, call: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        """As `run`, but a caller that leaves waits for the end: what the call changes is under the caller's lock."""
        running = asyncio.ensure_future(self.run(call, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def submit(self, call: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        tenant, future = tenant_at_work.get(), Future[ResultT]()
        item = (tenant, future, partial(call, *args, **kwargs))
        with self._lock:
            self._waiting.add(tenant, item)
        try:
            super().submit(self._work)  # a thread for one item more, whose ever it is
        except BaseException:
            with self._lock:
                self._waiting.remove(tenant, item)
            raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            with self._lock:
                for item in self._waiting:
                    self._waiting.remove(item[0], item)
                    item[1].cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _work(self) -> None:
        """Do what waits, until nothing does that may have a thread more: another thread may have left it for this."""
        while (item := self._take()) is not None:
            tenant, future, call = item
            try:
                if future.set_running_or_notify_cancel():
                    self._finish(future, call)
            finally:
                del item, future, call  # results must not live as long as the thread waits
                with self._lock:
                    self._working[tenant] -= 1

    def _take(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            item = self._waiting.take_if(lambda tenant: self._working[tenant] < self._most)
            if item is not None:
                self._working[item[0]] += 1
            return item

    def _finish(self, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # as of any executor: it is the caller's
            future.set_exception(error)


class Computing(Threads):
    """Threads that compute beside an event loop, as parsing and writing JSON do. They have one interpreter together,
    and the loop needs it for everybody: a tenant has one of them, which pauses as long as it has computed."""

    def __init__(self, tenants_at_once: int = 8) -> None:
        super().__init__(tenants_at_once, "computing", most=1)

    def _finish(self, future: Future[Any], call: Callable[[], Any]) -> None:
        began = time.thread_time()
        super()._finish(future, call)
        time.sleep(min(time.thread_time() - began, _LONGEST_PAUSE_S))


class ReplicaThreads(Threads):
    """The threads of a replica. What computes, as tokenization does, has threads of its own, of which one tenant takes
    half as many as there are processors: the others' work and the model keep the rest."""

    def __init__(self) -> None:
        super().__init__()
        processors = len(os.sched_getaffinity(0))
        self._computing = Threads(max(2, processors), "computing", most=max(1, processors // 2))

    async def compute(self, call: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
        """As `run`, for a call that computes for longer than it waits."""
        return await self._computing.run(call, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._computing.shutdown(wait, cancel_futures=cancel_futures)
        super().shutdown(wait, cancel_futures=cancel_futures)


@dataclass(frozen=True)
class Caller:
    """For whom a replica works: a tenant, "" for the service itself; the seconds that it may take, None for any; and
    the id under which the caller logs the request, which log lines of the replica carry, too."""

    tenant: str = ""
    deadline_s: float | None = None
    origin: str = ""

    def within(self, deadline_s: float | None) -> Caller:
        return replace(self, deadline_s=deadline_s)


@contextmanager
def called_by(caller: Caller) -> Iterator[None]:
    """One call of a replica, in its own task: log lines carry the caller's id, work takes the turn of its tenant, and
    errors are kvshelf's."""
    structlog.contextvars.bind_contextvars(request_id=caller.origin)
    tenant_at_work.set(caller.tenant)
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
        log.exception("a bug in a replica")
        raise InternalError(f"the worker failed unexpectedly ({type(exc).__name__}); its log has the details") from exc
