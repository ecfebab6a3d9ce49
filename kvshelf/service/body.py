"""Request bodies: read as a stream under a running cap and a clock, then parsed as JSON or as a multipart form.

Neither Starlette nor uvicorn caps a body or its duration, so both caps are here, before a byte is parsed. Nothing is
spooled to disk: a body that may be kept at all fits in memory, `max_body_bytes` of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pydantic_core
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from kvshelf.client.strict import RequestT, parse_request
from kvshelf.client.types import CreateCache
from kvshelf.errors import BodyTooLarge, Cancelled, InvalidRequest, RequestTimeout, UnsupportedMediaType
from kvshelf.service.settings import Settings

_FORM = "multipart/form-data"
_MAX_FIELD_BYTES = 1 << 20
_INSTEAD_OF_FILE = ("document", "messages", "token_ids")


async def read_json(request: Request, model: type[RequestT], settings: Settings) -> RequestT:
    """The validated body of a request that takes JSON only."""
    _require_type(request, allow_form=False)
    return parse_request(model, await _read(request, settings))


async def read_create(request: Request, settings: Settings) -> CreateCache:
    """The validated body of a creation: JSON, or a form with the document as its `file`."""
    is_form = _require_type(request, allow_form=True)
    body = await _read(request, settings)
    return parse_request(CreateCache, await _form_values(request, body) if is_form else body)


def _require_type(request: Request, *, allow_form: bool) -> bool:
    """Whether the body is a form. Refuses every type that is neither JSON nor a form."""
    essence = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {encoding!r} is not supported; send the body as it is")
    if essence == _FORM and allow_form:
        return True
    if essence == "application/json":
        return False
    accepted = f"application/json or {_FORM}" if allow_form else "application/json"
    raise UnsupportedMediaType(f"Content-Type {essence!r} is not supported here; send {accepted}")


async def _read(request: Request, settings: Settings) -> bytes:
    """The whole body. Raises `BodyTooLarge`, `RequestTimeout`, and `Cancelled` when the caller hangs up meanwhile."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > settings.max_body_bytes:
        raise _too_large(settings, f"is {announced} bytes long")
    body = bytearray()
    started = time.monotonic()
    stream = request.stream()
    try:
        while True:
            # A caller may be slow for a while, but on the whole must keep up the minimum rate and the total deadline.
            earned_s = settings.upload_grace_s + len(body) / settings.min_upload_bytes_per_s
            async with asyncio.timeout(started + min(earned_s, settings.upload_deadline_s) - time.monotonic()):
                chunk = await anext(stream, b"")
            if not chunk:
                return bytes(body)
            body += chunk
            if len(body) > settings.max_body_bytes:
                raise _too_large(settings, "goes on beyond that")
    except TimeoutError as exc:
        raise RequestTimeout(
            f"{len(body)} bytes of the body arrived in {time.monotonic() - started:.1f} s. At least "
            f"{settings.min_upload_bytes_per_s} bytes/s are needed, and all within {settings.upload_deadline_s:g} s"
        ) from exc
    except ClientDisconnect as exc:
        raise Cancelled("the caller hung up while sending the body") from exc
    finally:
        await stream.aclose()


def _too_large(settings: Settings, found: str) -> BodyTooLarge:
    return BodyTooLarge(
        f"a request body may have {settings.max_body_bytes} bytes; this one {found}. Split the document, or raise the "
        "service's max_body_bytes",
        max_body_bytes=settings.max_body_bytes,
    )


class _StrictParser(MultiPartParser):
    """Starlette's parser falls back to Latin-1 for text that is not UTF-8. A wrong name is worse than a refusal."""

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            self.items.append((part.field_name, _utf8(bytes(part.data), part.field_name)))
        else:
            super().on_part_end()


async def _form_values(request: Request, body: bytes) -> dict[str, Any]:
    """The fields of a creation from a form: `file` is the document, text fields are text, all others are JSON."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield body

    parser = _StrictParser(request.headers, chunks(), max_files=1, max_fields=64, max_part_size=_MAX_FIELD_BYTES)
    parser.spool_max_size = len(body) + 1
    try:
        form = await parser.parse()
    except MultiPartException as exc:
        raise InvalidRequest(f"the form cannot be read: {exc.message}") from exc
    values: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name in values or (name == "file" and "document" in values):
            raise InvalidRequest(f"the form has {name} twice", param=name)
        if isinstance(value, UploadFile) != (name == "file") or name in _INSTEAD_OF_FILE:
            raise InvalidRequest(f"{name}: a form has the document as one file part named file", param=name)
        if isinstance(value, UploadFile):
            values["document"] = _utf8(await value.read(), "file")
        else:
            values[name] = value if _is_text(CreateCache.model_json_schema(), name) else _json(value, name)
    if "document" not in values:
        raise InvalidRequest("a form has the document as one file part named file; there is none", param="file")
    return values


def _is_text(schema: Mapping[str, Any], name: str) -> bool:
    """Whether a field of the request takes text. Unknown ones pass as text and are refused by validation."""
    field = schema["properties"].get(name, {"type": "string"})
    return "string" in [option.get("type") for option in field.get("anyOf", [field])]


def _json(text: str, name: str) -> Any:
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as exc:
        raise InvalidRequest(f"{name}: not JSON: {exc}", param=name) from exc


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise InvalidRequest(
            f"{name}: byte {exc.start} is not valid UTF-8; documents are UTF-8 text", param=name
        ) from exc
