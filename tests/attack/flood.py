"""Sends one kind of request many times at once, as a process of its own: the attacker's work is not that of who waits.

Run as a program, it reads what to send from its standard input as JSON: `url`, `headers`, `method`, `path`, `body`
(JSON, or a text as it is), `at_once` and `seconds`. `%N` in path and body becomes another number each time. It says
"begun", and in the end how many answers there were by status, and the median seconds of one request alone, which it
measures first.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from typing import Any

import httpx

_ALONE = 5


async def _flood(told: dict[str, Any]) -> None:
    numbers, answers = itertools.count(time.time_ns()), Counter[int]()
    body = told["body"] if isinstance(told["body"], str | None) else json.dumps(told["body"])
    limits = httpx.Limits(max_connections=told["at_once"])
    headers = {"content-type": "application/json"} | told["headers"]

    async def send() -> float:
        number, began = str(next(numbers)), time.monotonic()
        content = None if body is None else body.replace("%N", number).encode()
        path = told["path"].replace("%N", number)
        answer = await client.request(told["method"], path, content=content)
        answers[answer.status_code] += 1
        return time.monotonic() - began

    async def go_on() -> None:
        while time.monotonic() < ends_at:
            await send()

    async with httpx.AsyncClient(base_url=told["url"], headers=headers, limits=limits, timeout=300) as client:
        alone = statistics.median([await send() for _ in range(_ALONE)])
        ends_at = time.monotonic() + told["seconds"]
        print("begun", flush=True)
        await asyncio.gather(*(go_on() for _ in range(told["at_once"])))
    print(json.dumps({"alone_s": alone, "answers": answers}))


if __name__ == "__main__":
    os.nice(5)
    asyncio.run(_flood(json.loads(sys.stdin.read())))
