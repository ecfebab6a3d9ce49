"""Work that the service repeats for as long as it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from kvshelf.errors import KvshelfError

log = structlog.get_logger("kvshelf.service")


async def repeat(what: str, work: Callable[[], Awaitable[object]], pause: Callable[[], Awaitable[object]]) -> None:
    """Run `work`, then wait for `pause`, again and again. A failure is logged and does not end the loop, also if it is
    a bug. what: the name of the work in the log."""
    while True:
        try:
            await work()
        except KvshelfError as error:
            log.warning(f"{what} failed", code=error.code, message=error.message)
        except Exception:
            log.exception(f"{what} failed unexpectedly")
        await pause()
