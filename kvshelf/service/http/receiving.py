"""Bodies as they arrive, with limits on size and time, which Starlette and uvicorn do not have. Needs no Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from kvshelf.errors import BodyTooLarge, Cancelled, RequestTimeout, UnsupportedMediaType
from kvshelf.service.settings import Settings

JSON_TYPE: Final = "application/json"


def require_type(request: Request, *accepted: str) -> str:
    """The media type of the body. The Content-Type header must give it, and it must be one of `accepted`."""
    essence = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {encoding!r} is not supported; send the body as it is")
    if essence not in accepted:
        what = f"Content-Type {essence!r:.80} is not supported here" if essence else "the body has no Content-Type"
        raise UnsupportedMediaType(f"{what}; send {' or '.join(accepted)}")
    return essence


@dataclass(frozen=True)
class Cap:
    """Limits of a body: its size, the setting that limits it, and its duration in seconds."""

    setting: str
    nbytes: int
    deadline_s: float

    def refuse(self, size: str) -> BodyTooLarge:
        limit: dict[str, Any] = {self.setting: self.nbytes}
        return BodyTooLarge(
            f"the body of this request may have at most {self.nbytes} bytes; this one {size}. Send less, or raise the "
            f"service's {self.setting}",
            **limit,
        )


async def read_body(request: Request, settings: Settings) -> bytearray:
    """The whole body of a document or a question. Raises as `arriving` does, and `ServiceBusy`."""
    body = bytearray()
    held_bytes = 0
    cap = Cap("max_body_bytes", settings.max_body_bytes, settings.upload_deadline_s)
    async with aclosing(arriving(request, settings, cap)) as chunks:
        async for chunk in chunks:
            if (needed := len(body) + len(chunk)) > held_bytes:
                # All that is announced at once: bodies that fill the memory together would all be refused in the end.
                needed = max(needed, _announced(request))
                request.state.hold(needed - held_bytes)
                held_bytes = needed
            body += chunk
    return body


def _announced(request: Request) -> int:
    """The length of the body; 0 if its headers do not say it."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


async def arriving(request: Request, settings: Settings, cap: Cap) -> AsyncGenerator[bytes, None]:
    """The body as it arrives. Raises `BodyTooLarge`, `RequestTimeout`, and `Cancelled` when the caller hangs up."""
    if (announced := _announced(request)) > cap.nbytes:
        raise cap.refuse(f"is {announced} bytes long")
    received = 0
    started = time.monotonic()
    stream = request.stream()
    try:
        while True:
            # A caller may be slow for a while, but must keep the minimum rate on average, and the total deadline.
            earned_s = settings.upload_grace_s + received / settings.min_upload_bytes_per_s
            async with asyncio.timeout(started + min(earned_s, cap.deadline_s) - time.monotonic()):
                chunk = await anext(stream, b"")
            if not chunk:
                return
            received += len(chunk)
            if received > cap.nbytes:
                raise cap.refuse("is longer")
            if received > len(chunk):  # forms are parsed as they arrive
                await request.state.turn()
            yield chunk
    except TimeoutError as exc:
        raise RequestTimeout(
            f"{received} bytes of the body arrived in {time.monotonic() - started:.1f} s. At least "
            f"{settings.min_upload_bytes_per_s} bytes/s are needed, and all within {cap.deadline_s:g} s"
        ) from exc
    except ClientDisconnect as exc:
        raise Cancelled("the caller hung up while sending the body") from exc
    finally:
        await stream.aclose()
