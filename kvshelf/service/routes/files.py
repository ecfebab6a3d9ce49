"""/v1/files: the inputs and outputs of batches, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from kvshelf.api.batches import CreateFile, FileDeleted, FileList, FileObject, ListFiles
from kvshelf.errors import StateConflict
from kvshelf.service.access.keys import Reader, Writer
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_query, received_file
from kvshelf.service.http.downloads import InDownload, download
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.service import InService, in_turn, written
from kvshelf.store.base import Store
from kvshelf.store.jobs.files import FileRecord

router = APIRouter(prefix="/v1/files", tags=["files"], responses=openapi.ERRORS)

KEEP_S: Final = 30 * 86400.0
"""The default lifetime of a file."""

_TYPE: Final = "application/octet-stream"
_FORM: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines in UTF-8"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 1, "description": "default: 30 days"},
    },
    "required": ["file", "purpose"],
}
_CONTENT: Final = {"content": {_TYPE: {"schema": {"type": "string", "format": "binary"}}}}


@router.post(
    "", openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
)
async def create_file(request: Request, service: InService, caller: Writer) -> FileObject:
    """Upload the input of a batch as a multipart form. It counts towards the tenant's quota until it is deleted."""
    async with received_file(request, service.settings, CreateFile) as (body, filename, file):
        ttl_s = KEEP_S if body.expires_after is None else float(body.expires_after.seconds)
        fields = {"tenant": caller.tenant, "filename": filename, "purpose": body.purpose, "ttl_s": ttl_s}
        return file_object(await in_turn(service, caller, service.store.files.create, file, **fields))


@router.get("", response_model=FileList, openapi_extra=openapi.query_of(ListFiles))
async def list_files(request: Request, service: InService, caller: Reader) -> Response:
    """Uploaded files and result files of batches, newest first."""
    return await service.listing.run(_listed, service.store, read_query(request, ListFiles), caller.tenant)


def _listed(store: Store, query: ListFiles, tenant: str) -> Response:
    records, has_more = store.files.list(tenant=tenant, limit=query.limit, after=query.after, purpose=query.purpose)
    data = [file_object(record) for record in records]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return written(FileList(data=data, has_more=has_more, first_id=first, last_id=last))


@router.get("/{file_id}")
async def get_file(file_id: str, service: InService, caller: Reader) -> FileObject:
    """The metadata of one file."""
    return file_object(await off_loop(service.store.files.get, file_id, tenant=caller.tenant))


@router.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    responses={200: {"description": "the file"} | _CONTENT, 206: {"description": "the requested range"} | _CONTENT},
)
async def get_content(file_id: str, service: InService, caller: Reader, selection: InDownload) -> Response:
    """The bytes of a file. Honours one byte range; several ranges get the whole file."""
    opened = await off_loop(service.store.files.open, file_id, tenant=caller.tenant)
    return download(opened, selection, _TYPE)


@router.delete("/{file_id}")
async def delete_file(file_id: str, service: InService, caller: Writer) -> FileDeleted:
    """Delete a file. Downloads in progress are completed. The input of an unfinished batch cannot be deleted (409)."""
    await off_loop(_delete, service.store, file_id, caller.tenant)
    return FileDeleted(id=file_id)


def _delete(store: Store, file_id: str, tenant: str) -> None:
    users = [record.id for record in store.batches.unfinished() if record.body["input_file_id"] == file_id]
    if users:
        store.files.get(file_id, tenant=tenant)  # raises `FileNotFound` if the file belongs to another tenant
        raise StateConflict(f"file {file_id} is the input of {users[0]}, which has not ended; cancel that first")
    store.files.delete(file_id, tenant=tenant)


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.nbytes,
        created_at=int(record.created_at),
        expires_at=None if record.expires_at is None else int(record.expires_at),
        filename=record.filename,
        purpose=record.purpose,
        digest=record.digest,
    )
