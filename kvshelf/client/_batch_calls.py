"""The calls about files and batches, one function each, as in `_calls`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, Unpack

from kvshelf.api import batches
from kvshelf.client import _calls
from kvshelf.client._exchange import HttpCall, parse_as
from kvshelf.errors import InvalidRequest
from kvshelf.names import as_text

FileInput = str | os.PathLike[str] | bytes | BinaryIO | tuple[str, bytes | BinaryIO]
"""A path, or the content itself, with or without a name."""


class ExpiresAfterFields(TypedDict, total=False):
    """How long a file is kept, in seconds from its creation (the only anchor)."""

    anchor: str
    seconds: int


class BatchFields(_calls.OptionFields, total=False):
    """The keywords of `batches.create`; None means absent.

    The options of `caches.create` hold for all rows without their own. `completion_window` is "24h" or "7d"; `window`
    is the time of day in which the batch may run, as "22:00-06:00"; of your batches, those of the highest `priority`
    (-10 to 10) run first.
    """

    levels: Sequence[_calls.Level] | None
    min_quality: float | None
    max_bytes: int | None
    bytes_per_token: float | None
    certificate: str | None
    completion_window: str | None
    metadata: Mapping[str, str] | None
    output_expires_after: ExpiresAfterFields | None
    window: str | None
    max_gpu_hours: float | None
    max_attempts: int | None
    document_timeout_s: float | None
    priority: int | None


class FileFilters(TypedDict, total=False):
    """Which files to list, and how many to fetch with one request (`limit`)."""

    purpose: str | None
    limit: int | None
    after: str | None


class BatchFilters(TypedDict, total=False):
    """The id to start after, and how many batches to fetch with one request (`limit`)."""

    limit: int | None
    after: str | None


def create_file(
    *, file: FileInput, purpose: str = "batch", expires_after: ExpiresAfterFields | None = None
) -> HttpCall[batches.FileObject]:
    """Upload a path, bytes, an open file, or content with a name. A file is sent in pieces, never read as a whole.

    Raises `InvalidRequest`, `BodyTooLarge`, `QuotaExceeded`, `StorageFull`.
    """
    form = _calls.checked(batches.CreateFile, {"purpose": purpose, "expires_after": expires_after})
    data = {"purpose": purpose} | {f"expires_after[{k}]": str(v) for k, v in form.get("expires_after", {}).items()}
    name, content = _open(file)
    upload = content if isinstance(file, str | os.PathLike) else nullcontext()
    body = {"files": {"file": (name, content, "application/jsonl")}, "data": data}
    # Not repeated when the answer is lost: a repeat would make a second file.
    return HttpCall("POST", "/v1/files", parse_as(batches.FileObject), body=body, repeatable=False, upload=upload)


def retrieve_file(id: str) -> HttpCall[batches.FileObject]:
    """The record of one file. Raises `FileNotFound`."""
    return HttpCall("GET", _file(id), parse_as(batches.FileObject))


def list_files(**fields: Unpack[FileFilters]) -> HttpCall[batches.FileList]:
    """All files, newest first; `purpose` filters. They are fetched `limit` at a time as they are read."""
    params = _calls.query_string(batches.ListFiles, fields)
    return HttpCall("GET", "/v1/files", parse_as(batches.FileList), params=params)


def delete_file(id: str) -> HttpCall[batches.FileDeleted]:
    """Delete one file. Raises `FileNotFound`, and `StateConflict` for the input of a batch that has not ended."""
    return HttpCall("DELETE", _file(id), parse_as(batches.FileDeleted), repeatable=False)


def file_content(id: str) -> HttpCall[bytes]:
    """The bytes of one file. Raises `FileNotFound`."""
    return HttpCall("GET", _file(id) + "/content", lambda response: response.content)


def create_batch(
    *, input_file_id: str, endpoint: str = "/v1/caches", **fields: Unpack[BatchFields]
) -> HttpCall[batches.BatchObject]:
    """Compress every row of an uploaded file, in the background; with the endpoint /v1/chat/completions, answer the
    question in each, with no options of `caches.create`.

    Keywords: `completion_window`, `metadata`, `output_expires_after`, `window`, `max_gpu_hours`, `max_attempts`,
    `document_timeout_s`, `priority`, and the options of `caches.create`, which hold for all rows without their own.
    Raises `InvalidRequest`, `FileNotFound`; a file with bad rows ends the batch as `failed`.
    """
    values: dict[str, Any] = {"input_file_id": input_file_id, "endpoint": endpoint, **fields}
    body = {"json": _calls.checked(batches.CreateBatch, values)}
    return HttpCall("POST", "/v1/batches", parse_as(batches.BatchObject), body=body, repeatable=False)


def retrieve_batch(id: str) -> HttpCall[batches.BatchObject]:
    """The record of one batch, with its progress. Raises `BatchNotFound`."""
    return HttpCall("GET", _batch(id), parse_as(batches.BatchObject))


def list_batches(**fields: Unpack[BatchFilters]) -> HttpCall[batches.BatchList]:
    """All batches, newest first. They are fetched `limit` at a time as they are read."""
    params = _calls.query_string(batches.ListBatches, fields)
    return HttpCall("GET", "/v1/batches", parse_as(batches.BatchList), params=params)


def cancel_batch(id: str) -> HttpCall[batches.BatchObject]:
    """End a batch; finished rows keep their results. Raises `BatchNotFound`, and `StateConflict` after its end."""
    return _do(id, "cancel")


def pause_batch(id: str) -> HttpCall[batches.BatchObject]:
    """Stop working on a batch until it is resumed. Raises `BatchNotFound`, `StateConflict`."""
    return _do(id, "pause")


def resume_batch(id: str) -> HttpCall[batches.BatchObject]:
    """Go on with a paused batch. Raises `BatchNotFound`, `StateConflict`."""
    return _do(id, "resume")


def retry_batch(id: str) -> HttpCall[batches.BatchObject]:
    """Try the failed rows of an ended batch again. Raises `BatchNotFound`, `FileNotFound`, `StateConflict`."""
    return _do(id, "retry", repeatable=False)


def batch_events(id: str, last_event_id: str) -> HttpCall[None]:
    """An event stream for `_stream.BatchReader`, from the event behind `last_event_id` on; "" is the first."""
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    return HttpCall("GET", _batch(id) + "/events", lambda _: None, headers=headers)


def _open(file: FileInput) -> tuple[str, BinaryIO]:
    """The name and the content of an upload. Raises `InvalidRequest` for a path that cannot be read."""
    if isinstance(file, tuple):
        name, content = file
        return name, io.BytesIO(content) if isinstance(content, bytes) else content
    if isinstance(file, bytes):
        return "input.jsonl", io.BytesIO(file)
    if not isinstance(file, str | os.PathLike):
        return as_text(Path(str(getattr(file, "name", "input.jsonl"))).name), file
    path = Path(file)
    try:
        return as_text(path.name), path.open("rb")
    except OSError as error:
        raise InvalidRequest(f"cannot read {as_text(path)}: {error.strerror}", param="file") from error


def _do(id: str, verb: str, *, repeatable: bool = True) -> HttpCall[batches.BatchObject]:
    return HttpCall("POST", f"{_batch(id)}/{verb}", parse_as(batches.BatchObject), repeatable=repeatable)


def _file(id: str) -> str:
    return "/v1/files/" + _calls.quoted(id)


def _batch(id: str) -> str:
    return "/v1/batches/" + _calls.quoted(id)
