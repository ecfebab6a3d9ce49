"""Answers as event streams: `data:` lines of JSON (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from kvshelf.errors import KvshelfError
from kvshelf.service.http.errors import is_anthropic, translate, wire
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.observe.logs import note

EVENT_STREAM = "text/event-stream"


class Event(NamedTuple):
    """An event with an id, by which a returning reader resumes. Without data it only keeps the connection open."""

    data: dict[str, Any] | None
    id: str


EventT = TypeVar("EventT", dict[str, Any], Event)


async def event_stream(request: Request, events: AsyncGenerator[EventT, None]) -> StreamingResponse:
    """Streams `events`. Those with a `type`, as Anthropic's, are named by it; others, as OpenAI's completions, end with
    a line `[DONE]`. An error before the first event is an ordinary error response, a later one is an event.

    When the caller hangs up, `events` is closed, which ends its work.
    """
    first = await until_hangup(request, anext(events))
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(
        _lines(first, events, anthropic=is_anthropic(request.scope)), headers=headers, media_type=EVENT_STREAM
    )


async def _lines(first: EventT, events: AsyncGenerator[EventT, None], *, anthropic: bool) -> AsyncIterator[str]:
    named = isinstance(first, dict) and "type" in first
    yield _line(first)
    last = first
    try:
        async with aclosing(events):
            async for last in events:
                yield _line(last)
    except Exception as exc:
        # The status line is already sent, so the error can only be an event.
        error = translate(exc)
        note(code=error.code)
        yield _line(({"type": "error"} if named else {}) | _numbered(last, error) | wire(error, anthropic=anthropic))
    if not named:
        yield "data: [DONE]\n\n"


def _numbered(last: dict[str, Any] | Event, error: KvshelfError) -> dict[str, Any]:
    """Where events have numbers, as those of OpenAI's responses, what an error has beside its envelope, for which
    OpenAI's client looks."""
    if not isinstance(last, dict) or "sequence_number" not in last:
        return {}
    return {
        "sequence_number": last["sequence_number"] + 1,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }


def _line(event: dict[str, Any] | Event) -> str:
    """One event in ASCII, because readers that split lines like Python (such as httpx) also split at U+2028."""
    if isinstance(event, dict):
        name = f"event: {event['type']}\n" if "type" in event else ""
        return f"{name}data: {json.dumps(event, separators=(',', ':'))}\n\n"
    return ":\n\n" if event.data is None else f"id: {event.id}\n{_line(event.data)}"
