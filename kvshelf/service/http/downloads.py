"""Stored bytes as answers, with ranges and entity tags (RFC 9110, sections 13 and 14)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from blake3 import blake3
from fastapi import Depends, Header, Response
from fastapi.responses import StreamingResponse

from kvshelf.errors import InvalidRequest
from kvshelf.service.http.errors import error_response
from kvshelf.service.http.waiting import off_loop
from kvshelf.store.types import BlobFile

_CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True)
class DownloadRange:
    """The three request headers that select which bytes to send."""

    range: Annotated[str, Header()] = ""
    if_range: Annotated[str, Header()] = ""
    if_none_match: Annotated[str, Header()] = ""


InDownload = Annotated[DownloadRange, Depends()]


def download(blob: BlobFile, selection: DownloadRange, media_type: str, more: bytes = b"") -> Response:
    """An answer with the bytes, then `more`; it closes `blob`. A single range is honoured; several get everything."""
    etag = f'"{blob.digest}{blake3(more).hexdigest(length=8) if more else ""}"'
    nbytes = blob.nbytes + len(more)
    headers = {"etag": etag, "accept-ranges": "bytes"}
    if etag in [tag.strip().removeprefix("W/") for tag in selection.if_none_match.split(",")]:
        blob.close()
        return Response(status_code=304, headers=headers)
    span = None if selection.if_range not in ("", etag) else _span(selection.range, nbytes)
    if span is not None and span[0] >= span[1]:
        blob.close()
        problem = InvalidRequest(f"range {selection.range!r} is outside the {nbytes} bytes", param="range")
        refusal = error_response(problem)
        refusal.status_code = 416
        refusal.headers["content-range"] = f"bytes */{nbytes}"
        return refusal
    start, end = span or (0, nbytes)
    headers["content-length"] = str(end - start)
    if span is not None:
        headers["content-range"] = f"bytes {start}-{end - 1}/{nbytes}"
    content = _chunks(blob, more, start, end)
    status = 200 if span is None else 206
    return StreamingResponse(content, status_code=status, headers=headers, media_type=media_type)


def _span(header: str, size: int) -> tuple[int, int] | None:
    """First byte and one past the last of a Range header (RFC 9110, section 14.1.2). None: send all. Empty: refuse."""
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None or match.groups() == ("", ""):
        return None
    first, last = (_number(digits) for digits in match.groups())
    if first is None:
        return max(0, size - (last or 0)), size
    if last is not None and last < first:
        return None  # not a valid range at all, so the header is ignored
    return first, min(size, size if last is None else last + 1)


def _number(digits: str) -> int | None:
    """None for no digits. Reads 20 digits at most, enough for every size: Python refuses to convert thousands."""
    return int(digits.lstrip("0")[:20] or "0") if digits else None


async def _chunks(blob: BlobFile, more: bytes, start: int, end: int) -> AsyncIterator[bytes]:
    with blob:
        rest = more[max(0, start - blob.nbytes) : max(0, end - blob.nbytes)]
        end = min(end, blob.nbytes)
        blob.file.seek(start)
        while start < end:
            chunk = await off_loop(blob.file.read, min(_CHUNK_BYTES, end - start))
            if not chunk:
                return  # the blob is shorter than its manifest says: the client sees a broken transfer
            start += len(chunk)
            yield chunk
        if rest:
            yield rest
