"""`kvshelf vllm-proxy`: OpenAI's API before vLLM servers; a request may name a stored cache.

An application of its own: it passes on whatever names no cache, with fields, headers, models and errors that are
vLLM's, and needs neither Ray nor a model. As a backend of the service it would lose that, and gain routes that it has
nothing to answer with. What it does with a cache is the service's: keys, limits, errors and shapes of answers.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Final

import structlog
from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse
from opentelemetry.trace import Tracer
from starlette.types import Receive, Scope, Send

from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.api.shapes import SHAPES
from kvshelf.api.strict import RequestT
from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.integrations.vllm.asking import CacheAsker
from kvshelf.integrations.vllm.bodies import CacheCompletion, Directions
from kvshelf.integrations.vllm.request import QuestionBuilder
from kvshelf.integrations.vllm.upstreams import ProxyMetrics, Upstreams
from kvshelf.model.loading import load_tokenizer
from kvshelf.service.access.keyfile import KeyFile
from kvshelf.service.access.keys import Admin, LiveKeys, Reader
from kvshelf.service.access.limits import TenantLimits
from kvshelf.service.dialects.completions import Completion
from kvshelf.service.front import guard, rereading
from kvshelf.service.http import server
from kvshelf.service.http.events import event_stream
from kvshelf.service.http.parsing import Parser
from kvshelf.service.http.receiving import JSON_TYPE, read_body, require_type
from kvshelf.service.http.waiting import until_hangup
from kvshelf.service.observe import logs
from kvshelf.service.observe.tracing import tracer_to
from kvshelf.service.process.supervisor import alone
from kvshelf.service.settings import Settings
from kvshelf.service.storage import store_config
from kvshelf.workers.replica.calls import Computing

log = structlog.get_logger("kvshelf.vllm")

_BETWEEN_NEIGHBOURS: Final = frozenset(
    {
        "authorization",
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-api-key",
    }
)
"""Headers that are not passed on: those of one connection (RFC 9110, section 7.6.1), and the key for the proxy."""

_SHAPES: Final = (*SHAPES, "logprobs", "n", "tools")


router = APIRouter()


def _asking(request: Request) -> CacheAsker:
    asking: CacheAsker = request.app.state.asking
    return asking


InAsking = Annotated[CacheAsker, Depends(_asking)]


@router.post("/v1/chat/completions")
async def chat(request: Request, asking: InAsking, caller: Reader) -> Response:
    """A chat completion; with `cache_id` its messages are the question, as in kvshelf's service."""
    body = await _body(request, ChatCompletionRequest, caller.tenant)
    if isinstance(body, _Forwarded):
        return body
    assert body.cache_id is not None
    for name in _SHAPES:
        if getattr(body, name) not in (None, False, 1):
            raise InvalidRequest(f"the proxy does not pass {name} on; ask /v1/completions, in vLLM's terms", param=name)
    query = body.asking
    fields = query.model_dump(include={"max_tokens", "temperature", "top_p", "seed", "stop"}, exclude_none=True)
    if body.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    turns = [message.model_dump() for message in query.messages or ()]
    ask = await asking.prepare(body.cache_id, caller.tenant, turns, body.model, fields)
    completion = Completion(ask.cache.model)
    computing: Computing = request.app.state.computing
    if body.stream:
        return await event_stream(request, completion.chunks(ask.pieces(), with_usage=body.wants_usage))
    answer = await until_hangup(request, ask.answer())
    return await computing.run(lambda: JSONResponse(completion.whole([answer])))


@router.post("/v1/completions")
async def complete(request: Request, asking: InAsking, caller: Reader) -> Response:
    """A completion; with `cache_id` its prompt is the question. The answer is vLLM's."""
    body = await _body(request, CacheCompletion, caller.tenant)
    if isinstance(body, _Forwarded):
        return body
    fields = (body.model_extra or {}) | {"stream": bool(body.stream)}
    ask = await asking.prepare(body.cache_id, caller.tenant, body.prompt, body.model, fields)
    if body.stream:
        return await event_stream(request, ask.events())
    return JSONResponse(await until_hangup(request, ask.whole()))


@router.get("/v1/models")
async def models(request: Request, _caller: Reader) -> Response:
    """The models of the least loaded server."""
    return _Forwarded(request)


@router.get("/health")
async def health(request: Request) -> Response:
    return _Forwarded(request)


@router.get("/metrics")
async def metrics(request: Request, _caller: Admin, accept: Annotated[str, Header()] = "") -> Response:
    """The metrics of this proxy, in Prometheus' text format, or as OpenMetrics if the caller accepts it."""
    numbers: ProxyMetrics = request.app.state.metrics
    content, media_type = numbers.encoded(accept)
    return Response(content, media_type=media_type)


async def _body(request: Request, model: type[RequestT], tenant: str) -> RequestT | _Forwarded:
    """The body of a request that names a cache; others are passed on."""
    require_type(request, JSON_TYPE)
    data = bytes(await read_body(request, request.app.state.settings))
    parser: Parser = request.app.state.parser
    if not (await parser.parsed(Directions, data, tenant)).names_cache:
        return _Forwarded(request, data)
    return await parser.parsed(model, data, tenant)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _BETWEEN_NEIGHBOURS}


class _Forwarded(Response):
    """Sends a request on when it is called, and gives the answer back as it arrives."""

    def __init__(self, request: Request, data: bytes | None = None) -> None:
        super().__init__()
        self._request = request
        self._data = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_hangup(Request(scope, receive), self._forward(send))

    async def _forward(self, send: Send) -> None:
        begun = False
        request, upstreams = self._request, self._request.app.state.upstreams
        sent = {"headers": _end_to_end(request.headers), "content": self._data}
        try:
            async with upstreams.answer(request.method, request.url.path, key=None, **sent) as answer:
                headers = [(name.encode(), value.encode()) for name, value in _end_to_end(answer.headers).items()]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                begun = True
                async for chunk in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except KvshelfError as error:
            if not begun:
                raise
            logs.note(code=error.code)
            log.warning("an answer was cut off", code=error.code, problem=error.message)  # uvicorn ends the connection


def create_app(
    settings: Settings,
    asking: CacheAsker,
    upstreams: Upstreams,
    metrics: ProxyMetrics,
    keys: LiveKeys | None,
    tracer: Tracer,
) -> FastAPI:
    """The proxy as an application. Its lifespan closes `upstreams`."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with rereading(keys):
            yield
        await upstreams.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.settings, app.state.asking, app.state.upstreams, app.state.metrics = settings, asking, upstreams, metrics
    app.state.computing = computing = Computing()
    app.state.parser = Parser(settings, computing)
    limits = TenantLimits(settings.tenant_max_concurrent, None, max_held_bytes=settings.max_held_bytes)
    listed = "the proxy has /v1/chat/completions, /v1/completions and /v1/models"
    guard(app, [router], settings, keys, limits, metrics, tracer, listed=listed)
    return app


def serve(settings: Settings, urls: Sequence[str], model: str, page: int) -> None:
    """Run the proxy until SIGINT or SIGTERM. model: whose tokenizer writes the questions. page: tokens of a page of all
    servers. Raises a `KvshelfError` for settings, a store or a tokenizer that cannot be used."""
    logs.configure(settings.log_level)
    metrics, api_key = ProxyMetrics(), os.environ.get("VLLM_API_KEY")
    upstreams = Upstreams(urls, silence_s=settings.request_deadline_s, metrics=metrics, api_key=api_key)
    keys = None if settings.api_key_file is None else LiveKeys(KeyFile(settings.api_key_file))
    with (
        store_config(settings).open() as store,
        tracer_to(settings.otel_endpoint) as tracer,
        alone(settings.host, settings.port) as place,
    ):
        asking = CacheAsker(store, QuestionBuilder(load_tokenizer(model), page), upstreams, metrics)
        app = create_app(settings, asking, upstreams, metrics, keys, tracer)
        server.run(app, place, settings)
