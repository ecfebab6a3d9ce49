"""/v1/batches: compress every row of an uploaded file, with the shapes and states of OpenAI's batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Request, Response

from kvshelf.api import batches
from kvshelf.corpus.input.defaults import require_defaults
from kvshelf.corpus.run.progress import WorkHours
from kvshelf.errors import FileNotFound, InvalidRequest, StateConflict
from kvshelf.service.access.keys import KeyCaller, Reader, Writer
from kvshelf.service.bodies import read_json
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_query
from kvshelf.service.http.events import Event, event_stream
from kvshelf.service.http.server import LEAVING
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.jobs.batch_work import rest_reason
from kvshelf.service.routes.files import KEEP_S
from kvshelf.service.service import InService, Service, written
from kvshelf.store.base import Store
from kvshelf.store.jobs.batches import BatchRecord
from kvshelf.workers.replica.create.spec import require_policy

router = APIRouter(prefix="/v1/batches", tags=["batches"], responses=openapi.ERRORS)

_POLL_S: Final = 1.0
_UNITS_S: Final = {"h": 3600.0, "d": 86400.0}
_EVENTS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "the batch after each change", "content": openapi.EVENTS}
}


@router.post("", openapi_extra=openapi.body_of(batches.CreateBatch))
async def create_batch(request: Request, service: InService, caller: Writer) -> batches.BatchObject:
    """Create a batch. Only the request is checked now. The whole file is checked before any work; if it is unusable,
    the batch ends as `failed`."""
    body = await read_json(request, batches.CreateBatch, service)
    service.engine(body.model, adapter=body.adapter)
    require_policy(require_defaults(body.options()))
    if body.window is not None:
        WorkHours.parse(body.window)
    file = await off_loop(service.store.files.get, body.input_file_id, tenant=caller.tenant)
    if file.purpose != "batch":
        raise InvalidRequest(
            f"file {file.id} has the purpose {file.purpose!r}; upload it with the purpose 'batch'",
            param="input_file_id",
        )
    now, most = service.store.now(), service.settings.tenant_max_batches
    times = {"now": now, "expires_at": now + _seconds(body.completion_window)}
    record = await off_loop(service.store.batches.create, caller.tenant, _body(body), most_open=most, **times)
    service.batches.nudge()
    return batch_object(record, now)


def _body(body: batches.CreateBatch) -> dict[str, Any]:
    """The parts of the request that the batch's record keeps."""
    kept = {"endpoint", "input_file_id", "completion_window", "metadata", "window", "max_gpu_hours", "max_attempts"}
    keep = body.output_expires_after
    return body.model_dump(mode="json", include=kept | {"document_timeout_s", "priority"}) | {
        "options": body.options(),
        "output_keep_s": KEEP_S if keep is None else float(keep.seconds),
    }


def _seconds(completion_window: str) -> float:
    return float(completion_window[:-1]) * _UNITS_S[completion_window[-1]]


@router.get("", response_model=batches.BatchList, openapi_extra=openapi.query_of(batches.ListBatches))
async def list_batches(request: Request, service: InService, caller: Reader) -> Response:
    """Batches, newest first. A batch is listed until 30 days after its end."""
    return await service.listing.run(_listed, service.store, read_query(request, batches.ListBatches), caller.tenant)


def _listed(store: Store, query: batches.ListBatches, tenant: str) -> Response:
    records, has_more = store.batches.list(tenant=tenant, limit=query.limit, after=query.after)
    data = [batch_object(record, store.now()) for record in records]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return written(batches.BatchList(data=data, has_more=has_more, first_id=first, last_id=last))


@router.get("/{batch_id}")
async def get_batch(batch_id: str, service: InService, caller: Reader) -> batches.BatchObject:
    """A batch and its progress."""
    record = await off_loop(service.store.batches.get, batch_id, tenant=caller.tenant)
    return batch_object(record, service.store.now())


@router.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: str, service: InService, caller: Writer) -> batches.BatchObject:
    """Cancel a batch. Running rows stop after their current layer; finished rows stay and are in the result files."""
    return await _changed(service, caller, batch_id, _cancelled)


@router.post("/{batch_id}/pause")
async def pause_batch(batch_id: str, service: InService, caller: Writer) -> batches.BatchObject:
    """Pause a batch until it is resumed. Its completion window keeps running."""
    pause = partial(_moved, before="in_progress", after="paused", verb="paused")
    return await _changed(service, caller, batch_id, pause)


@router.post("/{batch_id}/resume")
async def resume_batch(batch_id: str, service: InService, caller: Writer) -> batches.BatchObject:
    """Resume a paused batch."""
    resume = partial(_moved, before="paused", after="in_progress", verb="resumed")
    return await _changed(service, caller, batch_id, resume)


@router.post("/{batch_id}/retry")
async def retry_batch(batch_id: str, service: InService, caller: Writer) -> batches.BatchObject:
    """Run a batch that has ended again: its failed rows, and the rows that were never tried."""
    record = await off_loop(service.store.batches.get, batch_id, tenant=caller.tenant)
    await off_loop(service.store.files.get, record.body["input_file_id"], tenant=caller.tenant)
    await off_loop(_require_results, service.store, record)
    return await _changed(service, caller, batch_id, retried)


def _require_results(store: Store, record: BatchRecord) -> None:
    """Raises `StateConflict` for a batch whose journal has gone with its results: nobody knows which rows are done."""
    for file_id in filter(None, (record.output_file_id, record.error_file_id)):
        try:
            store.files.get(file_id, tenant=record.tenant)
        except FileNotFound as gone:
            raise StateConflict(
                f"the results of batch {record.id} were deleted or have expired; create a new batch"
            ) from gone


def retried(record: BatchRecord, *, now: float) -> BatchRecord:
    """The record of an ended batch that runs again, with a new completion window. Raises `StateConflict`."""
    if not record.ended:
        raise StateConflict(f"batch {record.id} is {record.state}; only one that has ended can be tried again")
    state: batches.BatchStatus = "in_progress" if record.counts.total else "validating"
    again = {"attempts": record.attempts + 1, "problems": (), "progress": {}}
    return record.entered(state, now, expires_at=now + _seconds(record.body["completion_window"]), **again)


@router.get("/{batch_id}/events", responses=_EVENTS, response_class=Response)
async def batch_events(
    batch_id: str, request: Request, service: InService, caller: Reader, last_event_id: Annotated[str, Header()] = ""
) -> Response:
    """The batch as server-sent events: its current state, each change, and its final state.

    The stream also ends when the service is stopped or restarted. Each event has an id: to continue, reconnect with
    `Last-Event-ID`, and the next event is the next change or the end.
    """
    leaving = getattr(request.state, LEAVING)
    return await event_stream(request, _snapshots(service, caller, batch_id, last_event_id, leaving))


async def _snapshots(
    service: Service, caller: KeyCaller, batch_id: str, last_id: str, leaving: asyncio.Event
) -> AsyncGenerator[Event, None]:
    while True:
        record = await off_loop(service.store.batches.get, batch_id, tenant=caller.tenant)
        batch = batch_object(record, service.store.now())
        event_id = f"{record.version}-{batch.status}"
        yield Event(batch.model_dump(mode="json") if record.ended or event_id != last_id else None, event_id)
        if record.ended or leaving.is_set():
            return
        last_id = event_id
        with suppress(TimeoutError):
            await asyncio.wait_for(leaving.wait(), _POLL_S)


def _cancelled(record: BatchRecord, *, now: float) -> BatchRecord:
    if record.state in ("cancelling", "cancelled"):
        return record
    if record.ended:
        raise StateConflict(f"batch {record.id} is {record.state} and can no longer be cancelled")
    return record.entered("cancelling", now)


def _moved(
    record: BatchRecord, *, now: float, before: batches.BatchStatus, after: batches.BatchStatus, verb: str
) -> BatchRecord:
    if record.state == after:
        return record
    if record.state != before:
        raise StateConflict(f"batch {record.id} is {record.state}; only one that is {before} can be {verb}")
    return record.entered(after, now)


async def _changed(
    service: Service, caller: KeyCaller, batch_id: str, change: Callable[..., BatchRecord]
) -> batches.BatchObject:
    """Change a batch in the store. The process that runs it sees the change within moments. `change` takes `now`."""
    change = partial(change, now=service.store.now())
    record = await off_loop(service.store.batches.update, batch_id, change, tenant=caller.tenant)
    service.batches.nudge()
    return batch_object(record, service.store.now())


def batch_object(record: BatchRecord, now: float) -> batches.BatchObject:
    """A batch as the API shows it. A batch that waits on its own appears as paused, with the reason."""
    body, progress = record.body, record.progress
    waits = progress.get("waits_for", "")
    if record.state in ("in_progress", "paused"):
        waits = rest_reason(record, now) or waits
    paused = record.state == "in_progress" and waits
    return batches.BatchObject(
        id=record.id,
        endpoint=body["endpoint"],
        input_file_id=body["input_file_id"],
        completion_window=body["completion_window"],
        status="paused" if paused else record.state,
        errors=batches.BatchErrors(data=list(record.problems)) if record.problems else None,
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        created_at=int(record.created_at),
        expires_at=int(record.expires_at),
        request_counts=record.counts,
        metadata=body["metadata"],
        model=body["options"].get("model"),
        window=body["window"],
        max_gpu_hours=body["max_gpu_hours"],
        priority=record.priority,
        progress=batches.BatchProgress.model_validate(progress | {"reason": waits or progress.get("reason", "")}),
        **{f"{state}_at": int(entered) for state, entered in record.times.items() if state != "validating"},
    )
