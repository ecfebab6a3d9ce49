"""The calls about files and batches, one function each, as in `_calls`."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, Unpack

import httpx

from kvshelf.api import batches
from kvshelf.client import _calls
from kvshelf.client._exchange import Call, parse_as
from kvshelf.errors import InvalidRequest

FileInput = str | os.PathLike[str] | bytes | BinaryIO | tuple[str, bytes | BinaryIO]
"""A path, or the content itself, with a name if it is to have one."""


class ExpiresAfter(TypedDict, total=False):
    """How long a file is kept, in seconds from when it was created (the one anchor there is)."""

    anchor: str
    seconds: int


class BatchFields(_calls.OptionFields, total=False):
    """What `batches.create` takes beside the file; None is as good as absent.

    The options of `caches.create` hold for all rows that do not bring their own. `completion_window` is "24h", "7d";
    `window` the time of day in which it may work: "22:00-06:00".
    """

    levels: Sequence[float] | None
    min_quality: float | None
    completion_window: str | None
    metadata: Mapping[str, str] | None
    output_expires_after: ExpiresAfter | None
    window: str | None
    max_gpu_hours: float | None
    max_attempts: int | None
    document_timeout_s: float | None


class FileFilters(TypedDict, total=False):
    """Which files to list, and how many to fetch with one request (`limit`)."""

    purpose: str | None
    limit: int | None
    after: str | None


class BatchFilters(TypedDict, total=False):
    """Where to begin, and how many batches to fetch with one request (`limit`)."""

    limit: int | None
    after: str | None


@contextmanager
def opened(file: FileInput) -> Iterator[tuple[str, BinaryIO]]:
    """The name and the content of an upload. Raises `InvalidRequest` for a path that cannot be read."""
    if isinstance(file, tuple):
        name, content = file
        yield name, io.BytesIO(content) if isinstance(content, bytes) else content
    elif isinstance(file, bytes):
        yield "input.jsonl", io.BytesIO(file)
    elif isinstance(file, str | os.PathLike):
        path = Path(file)
        try:
            found = path.open("rb")
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="file") from error
        with found:
            yield path.name, found
    else:
        yield Path(str(getattr(file, "name", "input.jsonl"))).name, file


def create_file(
    name: str, content: BinaryIO, *, purpose: str, expires_after: ExpiresAfter | None
) -> Call[batches.FileObject]:
    fields: dict[str, Any] = {"purpose": purpose}
    if expires_after is not None:
        fields["expires_after"] = expires_after
    form = _calls.checked(batches.CreateFile, fields)
    data = {"purpose": purpose} | {f"expires_after[{k}]": str(v) for k, v in form.get("expires_after", {}).items()}
    # Sent in pieces from where it lies. Not repeated when the answer was lost: then there would be two files.
    body = {"files": {"file": (name, content, "application/jsonl")}, "data": data}
    return Call("POST", "/v1/files", parse_as(batches.FileObject), body=body, repeatable=False)


def retrieve_file(id: str) -> Call[batches.FileObject]:
    """What is known of one file. Raises `FileNotFound`."""
    return Call("GET", _file(id), parse_as(batches.FileObject))


def list_files(fields: FileFilters) -> Call[batches.FileList]:
    return Call("GET", "/v1/files", parse_as(batches.FileList), params=_calls.query_string(batches.ListFiles, fields))


def delete_file(id: str) -> Call[batches.FileDeleted]:
    """Delete one file. Raises `FileNotFound`, and `StateConflict` for the input of a batch that has not ended."""
    return Call("DELETE", _file(id), parse_as(batches.FileDeleted), repeatable=False)


def file_content(id: str) -> Call[bytes]:
    """The bytes of one file. Raises `FileNotFound`."""
    return Call("GET", _file(id) + "/content", _content)


def create_batch(
    *, input_file_id: str, endpoint: str = "/v1/caches", **fields: Unpack[BatchFields]
) -> Call[batches.BatchObject]:
    """Compress every row of an uploaded file, in the background.

    Keywords: `completion_window`, `metadata`, `output_expires_after`, `window`, `max_gpu_hours`, `max_attempts`,
    `document_timeout_s`, and the options of `caches.create`, which hold for all rows that do not bring their own.
    Raises `InvalidRequest`, `FileNotFound`; what is wrong with the file ends the batch as `failed`.
    """
    given: dict[str, Any] = {"input_file_id": input_file_id, "endpoint": endpoint, **fields}
    body = {"json": _calls.checked(batches.CreateBatch, given)}
    return Call("POST", "/v1/batches", parse_as(batches.BatchObject), body=body, repeatable=False)


def retrieve_batch(id: str) -> Call[batches.BatchObject]:
    """How far a batch is. Raises `BatchNotFound`."""
    return Call("GET", _batch(id), parse_as(batches.BatchObject))


def list_batches(fields: BatchFilters) -> Call[batches.BatchList]:
    params = _calls.query_string(batches.ListBatches, fields)
    return Call("GET", "/v1/batches", parse_as(batches.BatchList), params=params)


def cancel_batch(id: str) -> Call[batches.BatchObject]:
    """End a batch; what is done stays done. Raises `BatchNotFound`, and `StateConflict` for one that has ended."""
    return _do(id, "cancel")


def pause_batch(id: str) -> Call[batches.BatchObject]:
    """Stop working on a batch until it is resumed. Raises `BatchNotFound`, `StateConflict`."""
    return _do(id, "pause")


def resume_batch(id: str) -> Call[batches.BatchObject]:
    """Go on with a batch that was paused. Raises `BatchNotFound`, `StateConflict`."""
    return _do(id, "resume")


def retry_batch(id: str) -> Call[batches.BatchObject]:
    """Try the failed rows of a batch that has ended again. Raises `BatchNotFound`, `FileNotFound`, `StateConflict`."""
    return _do(id, "retry", repeatable=False)


def batch_events(id: str, seen: str) -> Call[None]:
    """An event stream, which `_stream.BatchReader` reads; `seen` is the id of the last event that was read."""
    headers = {"last-event-id": seen} if seen else {}
    return Call("GET", _batch(id) + "/events", lambda _: None, headers=headers)


def _do(id: str, verb: str, *, repeatable: bool = True) -> Call[batches.BatchObject]:
    return Call("POST", f"{_batch(id)}/{verb}", parse_as(batches.BatchObject), repeatable=repeatable)


def _file(id: str) -> str:
    return "/v1/files/" + _calls.quoted(id)


def _batch(id: str) -> str:
    return "/v1/batches/" + _calls.quoted(id)


def _content(response: httpx.Response) -> bytes:
    return response.content
