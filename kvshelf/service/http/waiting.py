"""Work beside the event loop, and until the caller hangs up. Needs no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from kvshelf.errors import Cancelled

ResultT = TypeVar("ResultT")


async def off_loop(call: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    """Run a blocking call (the store) on a thread."""
    return await asyncio.to_thread(call, *args, **kwargs)


async def until_hangup(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is cancelled when the caller hangs up first. The body must have been read already.

    Starlette does this for streamed responses only.
    """

    async def hangup() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(hangup())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the caller hung up")
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)
