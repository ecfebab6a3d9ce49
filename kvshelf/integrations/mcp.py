"""A server of the Model Context Protocol: assistants keep documents on the shelf of a kvshelf service, and ask them.

It needs the client alone. Over stdio it belongs to one user, whose key is in KVSHELF_API_KEY. Over HTTP it has no key:
each request brings that of its caller, so that tenants and scopes are those of the service.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, Final, Literal, ParamSpec, TypeVar
from urllib.parse import urlsplit

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

import kvshelf
from kvshelf._extras import needs_extra
from kvshelf.api import CacheObject, CreationProgress, Deleted, SearchList
from kvshelf.api.queries import Source
from kvshelf.api.strict import ResponseBody
from kvshelf.client import AsyncClient, Client, Retries
from kvshelf.errors import InvalidRequest, KvshelfError, Unauthorized
from kvshelf.integrations.mcp_request import bearer

P = ParamSpec("P")
T = TypeVar("T")

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
"""Hosts for which the package refuses requests of other hosts and origins (DNS rebinding)."""

_INSTRUCTIONS: Final = """\
kvshelf keeps long documents as compressed KV caches, so that a question about one does not read it again. `put` stores
a document and returns its cache id. `search` finds stored documents by the words of a question, `list` by name and
labels. `ask` has the service's own language model answer from one or several documents; it sees nothing else, so write
each question out in full."""

Text = Annotated[str, Field(min_length=1, description="The whole text of the document.")]
Name = Annotated[str, Field(description="A short name, such as a file name or a title.")]
Labels = Annotated[dict[str, str] | None, Field(description='Words to find it by, such as {"project": "apollo"}.')]
Policy = Annotated[
    str | None,
    Field(description='How it is compressed: "full" keeps all, "auto" chooses. Leave it out if unsure.'),
]
Ratio = Annotated[
    float | None,
    Field(ge=0, lt=1, description="The share of the cache to remove: 0.75 keeps a quarter. Leave it out if unsure."),
]
Ttl = Annotated[
    float | None, Field(gt=0, description="Seconds until the document is removed. Left out: the service decides.")
]
CacheId = Annotated[str, Field(description="A cache id (kvs_...), from put, search or list.")]


class ShelvedDocument(ResponseBody):
    """A document on the shelf. tokens: of the document; kept: of these, after compression. existing: it was there
    before. expires_at: Unix seconds; null: it stays."""

    cache_id: str
    name: str
    labels: dict[str, str]
    policy: str
    tokens: int
    kept: int
    stored_bytes: int
    expires_at: float | None
    existing: bool

    @classmethod
    def of(cls, cache: CacheObject) -> ShelvedDocument:
        same = cache.model_dump(include={"name", "labels", "policy", "expires_at", "existing"})
        tokens = {"tokens": cache.tokens.document, "kept": cache.tokens.kept}
        return cls(cache_id=cache.id, stored_bytes=cache.bytes.stored, **tokens, **same)


class Listed(ResponseBody):
    """Documents, the newest first. next: give it as `after` for those that follow; null: there are no more."""

    documents: list[ShelvedDocument]
    next: str | None


class ToolAnswer(ResponseBody):
    """finish_reason "length": max_tokens cut the answer off. sources: the part of the question's attention that went to
    each document. exact: false where they are several, which did not see each other when they were read.
    cached_tokens: of the documents, which were not read again."""

    text: str
    finish_reason: str
    sources: list[Source]
    exact: Literal[False] | None
    cached_tokens: int
    answer_tokens: int


def serve(url: str | None, address: str | None, files: Path | None) -> None:
    """Serve until stdin ends, or on `address` (HOST:PORT, path /mcp) until stopped.

    url: of the service, as for `AsyncClient`. files: the folder whose files `put_file` may read. Raises
    `InvalidRequest` for a bad address, a folder that is none, `files` over HTTP, and an address that other machines
    reach before a service that asks for no key.
    """
    if address is None:
        build(url, files=files).run()
        return
    if files is not None:
        raise InvalidRequest("--files is for stdio: over HTTP callers are not the users of this machine", param="files")
    host, port = _host_and_port(address)
    if host not in _LOOPBACK:
        _require_keys(url, host)
    with needs_extra("mcp", purpose="kvshelf mcp --http"):
        from kvshelf.integrations.mcp_http import run  # here: over stdio it is not needed
    run(build(url, over_http=True), url, host, port)


def build(url: str | None, *, over_http: bool = False, files: Path | None = None) -> MCPServer[Any]:
    """The server. over_http: the key is that of each request, not that of this process."""
    if files is not None and not files.is_dir():
        raise InvalidRequest(f"--files {files} is not a folder", param="files")
    server: MCPServer[Any] = MCPServer(
        "kvshelf", version=kvshelf.__version__, instructions=_INSTRUCTIONS, log_level="INFO" if over_http else "WARNING"
    )
    tools = _Tools(url, over_http, files)
    adds = ToolAnnotations(destructive_hint=False, idempotent_hint=True)
    reads = ToolAnnotations(read_only_hint=True)
    for add in [tools.put] if files is None else [tools.put, tools.put_file]:
        server.add_tool(add, annotations=adds)
    for read in (tools.ask, tools.search, tools.list):
        server.add_tool(read, annotations=reads)
    server.add_tool(tools.delete, annotations=ToolAnnotations(destructive_hint=True))
    server.middleware.append(tools.only_allowed)
    return server


def _named_errors(tool: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """The tool, with an error of kvshelf as its result: the text names the code, and structured content is the `error`
    object of the HTTP API."""

    @wraps(tool)
    async def named(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await tool(*args, **kwargs)
        except KvshelfError as error:
            return _refusal(error)  # type: ignore[return-value]  # the package takes a result in place of any type

    named.__doc__ = inspect.getdoc(tool)  # assistants read it
    return named


@dataclass(frozen=True)
class _Tools:
    """The tools; their names and docstrings are what an assistant reads."""

    url: str | None
    over_http: bool
    files: Path | None

    @_named_errors
    async def put(
        self,
        ctx: Context[Any, Any],
        text: Text,
        name: Name = "",
        labels: Labels = None,
        policy: Policy = None,
        compression_ratio: Ratio = None,
        ttl_s: Ttl = None,
    ) -> ShelvedDocument:
        """Store a text, so that `ask` can answer questions about it at any time without reading it again.

        Use it for a long text that will be asked about more than once. A text that is already stored costs nothing, and
        gets the name and labels that you give. A long text takes minutes.
        """
        fields = {"policy": policy, "compression_ratio": compression_ratio, "ttl_s": ttl_s}
        async with _sent(ctx, text) as document:
            return await self._put(ctx, **document, name=name, labels=labels, **fields)

    @_named_errors
    async def put_file(
        self,
        ctx: Context[Any, Any],
        path: Annotated[str, Field(description="The file's path: absolute, or relative to the folder of files.")],
        name: Annotated[str | None, Field(description="A short name. Left out: the name of the file.")] = None,
        labels: Labels = None,
        policy: Policy = None,
        compression_ratio: Ratio = None,
        ttl_s: Ttl = None,
    ) -> ShelvedDocument:
        """Store a file of the user's folder (UTF-8 text, PDF or HTML), as `put` stores a text. You need not read it."""
        assert self.files is not None
        file = _inside(self.files, path)
        fields = {"policy": policy, "compression_ratio": compression_ratio, "ttl_s": ttl_s}
        return await self._put(ctx, file=file, name=file.name if name is None else name, labels=labels, **fields)

    @_named_errors
    async def ask(
        self,
        ctx: Context[Any, Any],
        cache_ids: Annotated[
            list[str],
            Field(min_length=1, max_length=64, description="The documents to ask together: cache ids (kvs_...)."),
        ],
        question: Annotated[str, Field(min_length=1, description="One question that stands alone.")],
        max_tokens: Annotated[int, Field(ge=1, description="The longest answer, in tokens.")] = 256,
    ) -> ToolAnswer:
        """Ask one stored document, or several together, and get the answer of the service's own language model.

        It sees these documents and this question, nothing of your conversation. `sources` says how much each counted.
        """
        async with self._client(ctx) as client:
            answer = await client.caches.query(cache_ids, question, max_tokens=max_tokens)
        return ToolAnswer(
            text=answer.text,
            finish_reason=answer.finish_reason,
            sources=answer.sources,
            exact=answer.exact,
            cached_tokens=answer.usage.cache_read_tokens,
            answer_tokens=answer.usage.completion_tokens,
        )

    @_named_errors
    async def search(
        self,
        ctx: Context[Any, Any],
        question: Annotated[str, Field(min_length=1, description="A question, or words of one.")],
        labels: Annotated[dict[str, str] | None, Field(description="Only documents with all of these labels.")] = None,
        limit: Annotated[int, Field(ge=1, le=64, description="Most documents to name.")] = 5,
    ) -> SearchList:
        """Find the stored documents that hold most of a question's words, the best first. Then `ask` the best of them.

        It compares words, not meanings. Scores of one search can be compared with each other only.
        """
        async with self._client(ctx) as client:
            return await client.caches.search(question, labels=labels, limit=limit)

    @_named_errors
    async def list(
        self,
        ctx: Context[Any, Any],
        labels: Annotated[dict[str, str] | None, Field(description="Only documents with all of these labels.")] = None,
        name: Annotated[str | None, Field(description="Only documents with exactly this name.")] = None,
        limit: Annotated[int, Field(ge=1, le=100, description="Most documents to list.")] = 20,
        after: Annotated[str | None, Field(description="`next` of the page before.")] = None,
    ) -> Listed:
        """List the stored documents, the newest first, with their cache ids, names, labels and sizes."""
        caches: list[CacheObject] = []
        async with self._client(ctx) as client:
            pages = client.caches.list(labels=labels, name=name, limit=limit + 1, after=after)
            async for cache in pages:  # one more than the page, to know whether any follow
                caches.append(cache)
                if len(caches) > limit:
                    break
        page = caches[:limit]
        return Listed(
            documents=[ShelvedDocument.of(cache) for cache in page], next=page[-1].id if caches[limit:] else None
        )

    @_named_errors
    async def delete(
        self,
        ctx: Context[Any, Any],
        cache_id: CacheId,
        cascade: Annotated[bool, Field(description="Also delete the documents that extend this one.")] = False,
    ) -> Deleted:
        """Delete a stored document for good. Do so only if the user asks for it."""
        async with self._client(ctx) as client:
            return await client.caches.delete(cache_id, cascade=cascade)

    async def _put(self, ctx: Context[Any, Any], **fields: Any) -> ShelvedDocument:
        """Store a document, and tell the caller how far it is."""
        result: CacheObject | list[CacheObject] | None = None
        async with self._client(ctx) as client:
            reported = 0
            async for event in client.caches.create_events(**fields):
                if isinstance(event, CreationProgress):
                    reported += 1  # of all phases: progress must never fall
                    await ctx.report_progress(reported, message=f"{event.phase} {event.done} of {event.total}")
                else:
                    result = event
        assert isinstance(result, CacheObject)  # one document at one level
        return ShelvedDocument.of(result)

    async def only_allowed(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Middleware of the server: a caller is told only of the tools that its key may use, or of all where the
        service does not say; calls of the others are refused by the service."""
        result = await call_next(ctx)
        if ctx.method != "tools/list" or not isinstance(result, dict):
            return result
        try:
            async with self._client(ctx.request, retries=Retries(max_retries=0)) as client:
                scopes = (await client.limits()).scopes
        except KvshelfError:  # each call says what is wrong
            return result
        if scopes is None or "write" in scopes:
            return result
        return result | {"tools": [tool for tool in result["tools"] if tool["annotations"].get("readOnlyHint")]}

    def _client(self, request: Any, retries: Retries | None = None) -> AsyncClient:
        """request: has the `headers` of a caller over HTTP."""
        key = bearer(getattr(request, "headers", None) or {}) if self.over_http else None
        return AsyncClient(self.url, api_key=key, retries=retries)


@asynccontextmanager
async def _sent(ctx: Context[Any, Any], text: str) -> AsyncIterator[dict[str, Any]]:
    """The text of a call as a field of a creation. One that is too large for this message came beside it, as bytes, and
    goes on as a file: as JSON it would hold the event loop."""
    apart = getattr(getattr(ctx.request_context.request, "state", None), "text", None)
    if apart is None:
        yield {"document": text}
        return
    with NamedTemporaryFile(suffix=".txt") as file:
        await asyncio.to_thread(_written, file, apart)
        yield {"file": Path(file.name)}


def _written(file: Any, data: bytes) -> None:
    file.write(data)
    file.flush()


def _refusal(error: KvshelfError) -> CallToolResult:
    fields = {"code": error.code, "type": error.type, "message": error.message, "param": error.param}
    text = TextContent(type="text", text=f"{error.code}: {error.message}")
    content = {"error": fields | ({"details": error.details} if error.details else {})}
    return CallToolResult(content=[text], structured_content=content, is_error=True)


def _inside(folder: Path, path: str) -> Path:
    """A file of the folder. Raises `InvalidRequest` for any other, also behind a link that leads out of the folder."""
    root = folder.resolve()
    file = (root / path).resolve()
    if not file.is_relative_to(root):
        raise InvalidRequest(f"{path!r} is not in {root}, the folder of --files", param="path")
    if not file.is_file():
        raise InvalidRequest(f"there is no file {path!r} in {root}", param="path")
    return file


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != address:
        raise InvalidRequest(f"--http {address!r} is not HOST:PORT; write 127.0.0.1:8766", param="http")
    return host, port


def _require_keys(url: str | None, host: str) -> None:
    """Raises `InvalidRequest` if the service serves anybody: then so would this server, to other machines."""
    with Client(url, api_key="") as client:
        try:
            client.models.list()
        except Unauthorized:
            return
    raise InvalidRequest(
        f"the service asks for no API key, so everybody who reaches {host} could use it; start it with --api-key-file, "
        "or listen on 127.0.0.1",
        param="http",
    )
