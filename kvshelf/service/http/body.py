"""Query strings, multipart forms, and bodies that go into files."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypeVar

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from kvshelf.api import QueryString
from kvshelf.api.strict import JsonBounds, RequestT, parse_json, parse_request
from kvshelf.corpus.input.extract import Upload
from kvshelf.errors import InvalidRequest
from kvshelf.service.http.parsing import LARGE_BYTES
from kvshelf.service.http.receiving import Cap, arriving, require_type
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.settings import Settings
from kvshelf.service.storage import space_for

QueryT = TypeVar("QueryT", bound=QueryString)

BLOB_TYPE = "application/octet-stream"

FORM = "multipart/form-data"
_PIECE_BYTES = 4 << 20
_SLICE_BYTES = 64 << 10
_MAX_FIELD_BYTES = LARGE_BYTES
_MAX_NAME = 255
_CHARSET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,39}")
_INSTEAD_OF_FILE = ("document", "messages", "token_ids")


def read_query(request: Request, model: type[QueryT]) -> QueryT:
    """The validated query string. Each label is one parameter, `label.<key>=<value>`."""
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        target, key = (labels, name.removeprefix("label.")) if name.startswith("label.") else (values, name)
        if key in target:
            raise InvalidRequest(f"{name} is given twice", param=name)
        target[key] = value
    if "labels" in values:
        raise InvalidRequest("labels: give label.<key>=<value>", param="labels")
    return model.model_validate(values | {"labels": labels})


@asynccontextmanager
async def received_blob(request: Request, settings: Settings) -> AsyncIterator[BinaryIO]:
    """The body of an import, up to `max_import_bytes`, in an anonymous file that is closed with the block."""
    require_type(request, BLOB_TYPE)
    cap = Cap("max_import_bytes", settings.max_import_bytes, settings.request_deadline_s)
    pending = bytearray()
    with ExitStack() as stack:
        with space_for("a blob that arrives"):
            file = stack.enter_context(TemporaryFile())
        async with aclosing(arriving(request, settings, cap)) as chunks:
            async for chunk in chunks:
                pending += chunk
                if len(pending) >= _PIECE_BYTES:
                    await off_loop(_append, file, pending)
                    pending = bytearray()
        await off_loop(_append, file, pending)
        yield file


@asynccontextmanager
async def received_file(
    request: Request, settings: Settings, model: type[RequestT]
) -> AsyncIterator[tuple[RequestT, str, BinaryIO]]:
    """The form of an upload: its fields, the name of its `file`, and the file itself, up to `max_file_bytes`, on disk.

    The file is closed with the block. Nested fields are named as OpenAI's client names them: `outer[inner]`.
    """
    require_type(request, FORM)
    cap = Cap("max_file_bytes", settings.max_file_bytes, settings.request_deadline_s)
    async with aclosing(arriving(request, settings, cap)) as chunks:
        parser = _StrictParser(request.headers, chunks, max_files=1, max_fields=8, max_part_size=_MAX_FIELD_BYTES)
        parser.spool_max_size = 1  # 0 would keep it in memory
        with space_for("a file that arrives"):
            form = await parser.parsed()
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("a form has the file as one part named file; there is none", param="file")
        fields = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
        yield parse_request(model, _nested(fields)), (file.filename or "")[-_MAX_NAME:], file.file
    finally:
        await form.close()


def _nested(fields: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Text fields, and one object per group of fields named `outer[inner]`, in which digits become integers."""
    values: dict[str, Any] = {}
    for name, value in fields:
        outer, _, inner = name.removesuffix("]").partition("[")
        place = values.setdefault(outer, {}) if inner else values
        if not isinstance(place, dict) or (inner or outer) in place:
            raise InvalidRequest(f"the form has {name} twice", param=name)
        place[inner or outer] = int(value) if inner and value.isdecimal() and len(value) < 20 else value
    return values


def _append(file: BinaryIO, data: bytearray) -> None:
    with space_for("a blob that arrives"):
        file.write(data)
        file.flush()


class _StrictParser(MultiPartParser):
    """Refuses text that is not UTF-8. Starlette's parser would silently read it as Latin-1."""

    async def parsed(self) -> FormData:
        """As `parse`. Raises `InvalidRequest` for a body that is not a form."""
        try:
            return await self.parse()
        except MultiPartException as exc:
            raise InvalidRequest(f"the form cannot be read: {exc.message}") from exc

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                text = part.data.decode()
            except UnicodeDecodeError as exc:
                raise InvalidRequest(
                    f"{part.field_name}: byte {exc.start} is not valid UTF-8; documents are UTF-8 text",
                    param=part.field_name,
                ) from exc
            self.items.append((part.field_name, text))
        else:
            super().on_part_end()


async def read_form(request: Request, body: bytearray) -> FormData:
    async def chunks() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _SLICE_BYTES):
            yield bytes(body[start : start + _SLICE_BYTES])
            await request.state.turn()  # the parser may take its time for each byte

    parser = _StrictParser(request.headers, chunks(), max_files=1, max_fields=64, max_part_size=_MAX_FIELD_BYTES)
    parser.spool_max_size = len(body) + 1
    return await parser.parsed()


def form_values(form: FormData, schema: Mapping[str, Any]) -> tuple[dict[str, Any], UploadFile]:
    """The fields of a request from a form, and its `file`. Fields that are text in its schema are text, all others
    JSON."""
    values: dict[str, Any] = {}
    file: UploadFile | None = None
    bounds = JsonBounds()
    size = sum(len(value) for _, value in form.multi_items() if isinstance(value, str))
    if size > _MAX_FIELD_BYTES:  # they are parsed here, so all together are a body that is not large
        raise InvalidRequest(
            f"the fields beside the file have {size} characters, and at most {_MAX_FIELD_BYTES} are taken; send the "
            "whole request as JSON"
        )
    for name, value in form.multi_items():
        if name in values or (name == "file" and file is not None):
            raise InvalidRequest(f"the form has {name} twice", param=name)
        if isinstance(value, UploadFile) != (name == "file") or name in _INSTEAD_OF_FILE:
            raise InvalidRequest(f"{name}: a form has the document as one file part named file", param=name)
        if isinstance(value, UploadFile):
            file = value
        else:
            # Unknown fields are text; validation refuses them.
            is_text = _is_text(schema["properties"].get(name, {"type": "string"}), value)
            values[name] = value if is_text else _json(value, name, bounds)
    if file is None:
        raise InvalidRequest("a form has the document as one file part named file; there is none", param="file")
    return values, file


async def read_upload(part: UploadFile) -> Upload:
    media_type, parameters = parse_options_header(part.content_type)
    charset = parameters.get(b"charset", b"").decode("latin-1")
    if not _CHARSET.fullmatch(charset):  # it becomes a command line argument
        charset = ""
    return Upload(await part.read(), media_type.decode("latin-1").lower(), charset)


def _is_text(field: Mapping[str, Any], value: str) -> bool:
    """Whether a field with this schema takes a value as text."""
    if options := field.get("anyOf") or field.get("oneOf"):
        return any(_is_text(option, value) for option in options)
    texts = [field["const"]] if "const" in field else field.get("enum", [value])
    return field.get("type") == "string" and value in texts


def _json(text: str, name: str, bounds: JsonBounds) -> Any:
    try:
        return parse_json(text, bounds)
    except ValueError as exc:
        raise InvalidRequest(f"{name}: not JSON: {exc}", param=name) from exc
