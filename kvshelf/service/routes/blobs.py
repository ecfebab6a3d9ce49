"""The bytes of caches: download, import, verification."""

from __future__ import annotations

import mmap
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Annotated, BinaryIO

from blake3 import blake3
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from kvshelf import errors
from kvshelf.api import CacheObject, ImportCache, Verification
from kvshelf.api.caches import ExportDtype, ExportTo
from kvshelf.artifact.blob import inspect
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.exported import split
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.shape import layers_made_by
from kvshelf.service.access.keys import Reader, Writer
from kvshelf.service.engines import serving
from kvshelf.service.http import openapi
from kvshelf.service.http.body import BLOB_TYPE, read_query, received_blob
from kvshelf.service.http.downloads import InDownload, download
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.service import InService, Service, cache_response, in_turn
from kvshelf.service.storage import space_for
from kvshelf.store.about import About, about_of, export_part, source_of
from kvshelf.store.base import Store
from kvshelf.store.manifest import Judgement, Manifest
from kvshelf.store.types import BlobFile
from kvshelf.workers.cluster.remote import RESTART_S
from kvshelf.workers.replica.api import ReplicaApi, Stored
from kvshelf.workers.replica.create.existing import as_requested

router = APIRouter(prefix="/v1/caches", tags=["caches"], responses=openapi.ERRORS)

WithAbout = Annotated[bool, Query(description="send name, labels, quality and source, too")]

WantedTo = Annotated[ExportTo, Query(description="the engine that reads the file")]
WantedDtype = Annotated[
    ExportDtype | None, Query(description="of the numbers; default: float16 for llama.cpp, the model's for mlx")
]
WantedName = Annotated[
    str | None,
    Query(max_length=1024, description="mlx: what mlx-lm is told as its model; default: the model's name here"),
]

_BLOB = {"content": {BLOB_TYPE: {"schema": {"type": "string", "format": "binary"}}}}


@router.post(
    "/import",
    status_code=201,
    response_model=CacheObject,
    responses=openapi.EXISTING,
    openapi_extra=openapi.query_of(ImportCache) | {"requestBody": {"required": True} | _BLOB},
)
async def import_cache(request: Request, service: InService, caller: Writer) -> Response:
    """Store a blob that was downloaded or exported. The cache keeps its codec and gets the id that this shelf gives it,
    and from an export its name, labels, quality and source. `label.<key>=<value>` sets a label and may be repeated.

    A cache that is on the shelf already gets the `name` and labels of the request, as in a creation, and none of an
    export's."""
    options = read_query(request, ImportCache)
    await off_loop(service.store.expiry, options.ttl_s, options.expires_at)
    async with (
        received_blob(request, service.settings) as file,
        service.whole.turn(caller.tenant, service.settings.request_deadline_s) as left_s,
    ):
        arrived = await off_loop(_inspect, service, file)
        if arrived.source is not None:
            remote = service.engine(arrived.model).remote
            await remote.call_within(
                left_s, ReplicaApi.require_source, arrived.identity, arrived.source, caller=caller.within(left_s)
            )
        return cache_response(await off_loop(_import, service.store, arrived, options, caller.tenant))


@dataclass(frozen=True)
class _Arrived:
    """A blob whose header fits a served model, and what came with it. `source` must still be compared with it."""

    blob: memoryview
    model: str
    identity: Identity
    about: About
    source: str | None


def _inspect(service: Service, file: BinaryIO) -> _Arrived:
    """What a file contains, mapped into memory: of the blob nothing but the header is read yet. The map stays valid
    when the file is closed."""
    size = file.seek(0, 2)
    exported = split(memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""))
    header = inspect(exported.blob).header
    identity = header.to_identity()
    model = serving(service.identities, identity.model)
    header.shape.require_bounds(service.identities[model])
    header.shape.require_layers(layers_made_by(identity.model, service.identities[model], service.layer_shapes[model]))
    _require_transforms(service, model, identity.transforms)
    if service.engine(model).remote.running == 0:
        raise errors.NoWorker(f"no worker of {model!r} runs; one is being started", retry_after_s=RESTART_S)
    # What was appended to a cache that may not be here can be compared with nothing.
    source = None if identity.parent else source_of(exported, service.settings.max_body_bytes)
    return _Arrived(exported.blob, model, identity, about_of(exported), source)


def _import(store: Store, arrived: _Arrived, options: ImportCache, tenant: str) -> Stored:
    cache, about = CompressedCache.from_bytes(arrived.blob), arrived.about
    manifest: Manifest | None = None
    with suppress(errors.CacheNotFound, errors.CacheError):  # an unusable cache on the shelf is replaced
        cache_id = store.cache_id(cache.identity, tenant=tenant, codec=cache.codec)
        manifest = store.stat(cache_id, tenant=tenant)
    existing = manifest is not None
    if manifest is None or manifest.recoded is not None:  # what a ladder has coded smaller is made as it was
        manifest = store.put(
            cache,
            tenant=tenant,
            ttl_s=options.ttl_s,
            expires_at=options.expires_at,
            ttl_renew_s=options.ttl_renew_s,
            labels=about.labels | options.labels,
            name=about.name if options.name is None else options.name,
            source=arrived.source,
            judged=Judgement(quality=about.quality),
        )
    if existing:
        manifest = as_requested(store, manifest, labels=options.labels, name=options.name or "", lifetime=options)
        if arrived.source is not None and not manifest.has_source:
            manifest = store.keep_source(manifest.id, arrived.source, tenant=tenant)
    return Stored(manifest, existing)


def _require_transforms(service: Service, model: str, digest: str) -> None:
    """Raises `ModelMismatch` for a cache under transforms that neither the model nor the shelf has."""
    if digest and digest != service.transforms[model] and service.store.transforms.get(digest) is None:
        raise errors.ModelMismatch(
            f"the cache is under codec klt with the transforms {digest[:16]}, and they are neither those of {model!r} "
            "here nor on the shelf; put their file into the calibration folder, or compress the document again",
            transforms=digest,
        )


@router.post("/{cache_id}/verify")
async def verify(cache_id: str, service: InService, caller: Writer) -> Verification:
    """Read a whole stored cache and check every digest. A corrupt cache is quarantined, and `ok` is false."""
    return await in_turn(service, caller, _verification, service.store, cache_id, caller.tenant)


def _verification(store: Store, cache_id: str, tenant: str) -> Verification:
    try:
        with store.open_blob(cache_id, tenant=tenant) as blob:
            nbytes = blob.nbytes
        store.open_cache(cache_id, tenant=tenant).close()  # checks the content address
        if (kept := store.stat(cache_id, tenant=tenant).source) is not None:
            store.source(cache_id, tenant=tenant)
            nbytes += kept.nbytes
    except (errors.CacheCorrupt, errors.SourceNotKept) as error:
        return Verification(id=cache_id, ok=False, reason=error.details.get("reason"), problem=error.message)
    return Verification(id=cache_id, ok=True, bytes=nbytes)


@router.get(
    "/{cache_id}/blob",
    response_class=StreamingResponse,
    responses={200: {"description": "the blob"} | _BLOB, 206: {"description": "the requested range"} | _BLOB},
)
async def download_blob(
    cache_id: str, request: Request, service: InService, caller: Reader, selection: InDownload, about: WithAbout = False
) -> Response:
    """The stored bytes, for `CompressedCache.from_bytes`. With `about` they are an export: behind the blob follow its
    name, labels, quality and kept source, for an import. Honours one byte range; several ranges get everything."""
    blob = await in_turn(service, caller, service.store.open_blob, cache_id, tenant=caller.tenant)
    more = b""
    if about:
        try:
            more = await off_loop(_about, service.store, cache_id, caller.tenant, blob.digest)
            request.state.hold(len(more))  # until the answer is read; the blob itself is read from its file
        except BaseException:
            blob.close()
            raise
    return download(blob, selection, BLOB_TYPE, more)


def _about(store: Store, cache_id: str, tenant: str, digest: str) -> bytes:
    """What an export says of the blob with this digest. Raises `StateConflict` where there is another one by now."""
    manifest = store.stat(cache_id, tenant=tenant)
    if manifest.blob_digest != digest:
        raise errors.StateConflict(
            f"cache {cache_id} was coded anew while it was read; read it again", param="cache_id"
        )
    return export_part(store, manifest)


@router.get(
    "/{cache_id}/export",
    response_class=StreamingResponse,
    responses={200: {"description": "the file"} | _BLOB, 206: {"description": "the requested range"} | _BLOB},
)
async def export_cache(
    cache_id: str,
    to: WantedTo,
    request: Request,
    service: InService,
    caller: Reader,
    selection: InDownload,
    dtype: WantedDtype = None,
    engine_model: WantedName = None,
) -> Response:
    """The cache as a file of llama.cpp or MLX, from which they answer questions to its document. `policy_unsupported`
    for one that the engine cannot hold. Honours a byte range, for which the file is made again."""
    manifest = await off_loop(service.store.stat, cache_id, tenant=caller.tenant)
    remote = service.reader(manifest).remote
    # A replica reads the whole cache. The file is on disk here before its reader, who may be slow, gets any of it.
    async with service.whole.turn(caller.tenant, service.settings.request_deadline_s) as left_s:
        pieces = remote.stream(ReplicaApi.export, cache_id, to, dtype, engine_model, caller=caller.within(left_s))
        file = await until_hangup(request, _on_disk(pieces))
    return download(file, selection, BLOB_TYPE)


async def _on_disk(pieces: AsyncGenerator[bytes, None]) -> BlobFile:
    """All pieces, in an anonymous file."""
    hasher = blake3()
    with ExitStack() as stack, space_for("an exported file"):
        file = stack.enter_context(TemporaryFile())
        async with aclosing(pieces):
            async for piece in pieces:
                hasher.update(piece)
                await off_loop(file.write, piece)
        await off_loop(file.flush)
        stack.pop_all()  # it is closed when it has been sent
    return BlobFile(file, file.tell(), hasher.hexdigest())
