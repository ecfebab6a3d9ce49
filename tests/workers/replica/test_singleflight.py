"""Equal work that is asked for at the same time."""

from __future__ import annotations

import asyncio

import pytest

from kvshelf.workers.replica.singleflight import SingleFlight

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_call_is_shared_and_ends_with_its_last_caller() -> None:
    singleflight: SingleFlight[int] = SingleFlight()
    runs: list[str] = []
    go = asyncio.Event()

    async def work() -> int:
        runs.append("began")
        await go.wait()
        runs.append("ended")
        return 7

    callers = [asyncio.ensure_future(singleflight.join("key", work)) for _ in range(3)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    go.set()
    assert await callers[1] == (7, False)
    assert await callers[2] == (7, False)
    assert callers[0].cancelled()
    assert runs == ["began", "ended"]

    go.clear()
    alone = asyncio.ensure_future(singleflight.join("key", work))
    await asyncio.sleep(0.01)
    alone.cancel()
    await asyncio.sleep(0.01)
    go.set()
    assert await singleflight.join("key", work) == (7, True)
    assert runs == ["began", "ended", "began", "began", "ended"]
    assert not singleflight.calls


async def test_nobody_joins_work_that_has_ended() -> None:
    """A caller that comes in the moment between the end of the work and the removal of its call begins anew. If it
    joined, it would get the result without giving way to the event loop, and could ask for ever."""
    singleflight: SingleFlight[str] = SingleFlight()
    ended = asyncio.Event()

    async def early() -> str:
        ended.set()  # wakes the other caller before the end of this work is told
        return "early"

    async def late() -> str:
        return "late"

    async def other_caller() -> tuple[str, bool]:
        await ended.wait()
        assert len(singleflight) == 1
        return await singleflight.join("key", late)

    second = asyncio.ensure_future(other_caller())
    await asyncio.sleep(0)
    assert await singleflight.join("key", early) == ("early", True)
    assert await second == ("late", True)
    assert len(singleflight) == 0
