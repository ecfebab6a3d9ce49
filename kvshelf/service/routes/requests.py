"""/v1/requests: background creations."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api import ErrorBody, RequestObject
from kvshelf.backoff import backoff_s
from kvshelf.errors import InternalError, by_code
from kvshelf.service.access.keys import Reader
from kvshelf.service.http import openapi
from kvshelf.service.http.errors import error_json
from kvshelf.service.http.server import LEAVING
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.service import InService
from kvshelf.store.jobs.requests import RequestRecord, RequestTable

router = APIRouter(prefix="/v1/requests", tags=["requests"], responses=openapi.ERRORS)

MAX_WAIT_S = 300.0
_FIRST_POLL_S, _LAST_POLL_S = 0.05, 0.5


@router.get("/{request_id}", response_model=RequestObject)
async def get_request(
    request_id: str,
    request: Request,
    service: InService,
    caller: Reader,
    wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0,
) -> Response:
    """The state of a background creation. With `wait_s`, the answer comes when the creation ends, after that many
    seconds, or when the service is stopped or restarted."""
    leaving = getattr(request.state, LEAVING)
    record = await until_hangup(request, _wait(service.store.requests, request_id, caller.tenant, wait_s, leaving))
    return JSONResponse(request_json(record))


async def _wait(
    requests: RequestTable, request_id: str, tenant: str, wait_s: float, leaving: asyncio.Event
) -> RequestRecord:
    end = time.monotonic() + wait_s
    poll = 0
    while True:
        record = await off_loop(requests.get, request_id, tenant=tenant)
        if record.state in ("done", "failed") or time.monotonic() >= end or leaving.is_set():
            return record
        await asyncio.sleep(min(backoff_s(poll, _FIRST_POLL_S, _LAST_POLL_S), max(0.0, end - time.monotonic())))
        poll += 1


def request_json(record: RequestRecord) -> dict[str, Any]:
    """A request as the API shows it."""
    error = None
    if record.error is not None:
        kind = by_code().get(record.error.code, InternalError).type
        error = ErrorBody(type=kind, **record.error.model_dump())
    request = RequestObject(
        id=record.id,
        state=record.state,
        cache_id=record.cache_ids[0] if record.cache_ids else None,
        cache_ids=list(record.cache_ids),
        attempts=record.tries,
        error=error,
        created_at=record.created_at,
        updated_at=record.updated_at,
    )
    return request.model_dump(mode="json") | {"error": error and error_json(error)}
