"""/v1/messages: Anthropic's shapes. A conversation begins with a cache, which `cache_control` makes or finds."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvshelf.api import Asking
from kvshelf.api.anthropic import MessageError, MessageObject, MessagesRequest
from kvshelf.errors import CacheError, CacheNotFound, NotFound
from kvshelf.service.access.keys import Caller, Reader
from kvshelf.service.asked import question_to
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_json
from kvshelf.service.http.errors import MESSAGES
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.messages import Answering
from kvshelf.service.http.waiting import off_loop, until_hangup
from kvshelf.service.recompute import Question
from kvshelf.service.state import TAKES_TOKENS, InService, Service
from kvshelf.store.base import Store
from kvshelf.workers.replica.create.spec import require_policy
from kvshelf.workers.replica.results import Reply

router = APIRouter(prefix=MESSAGES, tags=["messages"], responses=openapi.errors_of(MessageError))


@router.post(
    "",
    response_class=JSONResponse,
    responses=openapi.json_or_events(MessageObject),
    openapi_extra=openapi.body_of(MessagesRequest),
    dependencies=[TAKES_TOKENS],
)
async def create(request: Request, service: InService, caller: Reader) -> Response:
    """Answer the last message of a conversation whose beginning is on the shelf, or goes there with this request."""
    body = await read_json(request, MessagesRequest, service)
    if body.model not in service.engines:
        raise NotFound(f"there is no model {body.model!r:.100}; there is {', '.join(service.engines)}", param="model")
    if body.stream:
        return await event_stream(request, _events(service, caller, body))
    return JSONResponse(await until_hangup(request, _whole(service, caller, body)))


class _Begun(NamedTuple):
    """A question behind its cache, and the message that answers it."""

    question: Question
    answering: Answering


async def _whole(service: Service, caller: Caller, body: MessagesRequest) -> dict[str, Any]:
    question, answering = await _begun(service, caller, body)
    (reply,) = await question.answers()
    await _keep_turns(question, body, reply)
    return answering.whole(reply)


async def _events(service: Service, caller: Caller, body: MessagesRequest) -> AsyncGenerator[dict[str, Any], None]:
    question, answering = await _begun(service, caller, body)

    async def pieces() -> AsyncGenerator[str | Reply, None]:
        async with aclosing(question.stream()) as made:
            async for piece in made:
                if isinstance(piece, Reply):
                    await _keep_turns(question, body, piece)
                yield piece

    async with aclosing(answering.events(pieces())) as events:
        async for event in events:
            yield event


async def _begun(service: Service, caller: Caller, body: MessagesRequest) -> _Begun:
    cache_id, created = body.cache_id, False
    if cache_id is None:
        cache_id, created = await _beginning(service, caller, body)
    question = await question_to(service, caller, [cache_id], _asking(body), body.model)
    manifest = question.caches[0].manifest
    read, made = (0, manifest.num_tokens) if created else (manifest.num_tokens, 0)
    return _Begun(question, Answering(body.model, cache_id, read, made))


async def _beginning(service: Service, caller: Caller, body: MessagesRequest) -> tuple[str, bool]:
    """The cache of the conversation's beginning, which lives on from now, and whether this request made it."""
    caller.require("write")
    spec = body.creation
    require_policy(spec)
    deadline_s = service.settings.request_deadline_s
    created = await service.engines[body.model].create(spec, tenant=caller.tenant, deadline_s=deadline_s)
    if created.existing:
        await off_loop(_extend, service.store, created.manifest.id, caller.tenant, body.ttl_s)
    return created.manifest.id, not created.existing


async def _keep_turns(question: Question, body: MessagesRequest, reply: Reply) -> None:
    """Turns that were read or stored live on together: a later turn is found through all before it."""
    if body.ttl_s is None:
        return
    store, tenant, (root,) = question.service.store, question.caller.tenant, question.cache_ids
    await off_loop(_extend, store, reply.stored_cache_id or reply.cache_id, tenant, body.ttl_s, root)


def _extend(store: Store, cache_id: str, tenant: str, ttl_s: float, root: str | None = None) -> None:
    """Let a cache expire so late at least; with a root also the caches between the two, and the root stays as it is."""
    at: str | None = cache_id
    with suppress(CacheError, CacheNotFound):  # a turn that is gone is a longer prefill, and no error
        while at is not None and at != root:
            manifest = store.stat(at, tenant=tenant)
            if manifest.expires_at is not None and manifest.expires_at < time.time() + ttl_s:
                store.update(at, tenant=tenant, ttl_s=ttl_s)
            at = None if root is None else manifest.parent_id


def _asking(body: MessagesRequest) -> Asking:
    return Asking(
        messages=body.asked,
        max_tokens=body.max_tokens,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stop_sequences,
        store=body.keeps_turn,
        ttl_s=body.ttl_s if body.keeps_turn else None,
    )
