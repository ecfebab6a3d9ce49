"""Questions to caches, through vLLM servers: what the proxy does with requests that name a cache."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvshelf.api import Usage
from kvshelf.api.answers import Answer, Piece
from kvshelf.engine.inputs.encode import Prompt
from kvshelf.errors import CacheUnusable, InvalidRequest, KvshelfError, WorkerCrashed
from kvshelf.integrations.vllm.request import QuestionBuilder, ShelfRequest
from kvshelf.integrations.vllm.upstreams import ProxyMetrics, Upstreams
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.observe.logs import note, request_id
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest


@dataclass(frozen=True)
class CacheAsk:
    """A question to a cache, its body for vLLM's `/v1/completions`, and what asks it."""

    asker: CacheAsker
    cache: Manifest
    request: ShelfRequest
    body: dict[str, Any]

    async def whole(self) -> dict[str, Any]:
        with self.asker.counted(self):
            return await self._whole()

    async def answer(self) -> Answer:
        with self.asker.counted(self):
            answer = await self._whole()
            (choice,) = answer["choices"]
            return self._answered(choice["text"], choice["finish_reason"], answer["usage"])

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of vLLM's stream, without its end."""
        with self.asker.counted(self):
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece | Answer], None]:
        """The pieces of one streamed answer, and the answer, each as of choice 0."""
        text, reason, usage = "", None, None
        with self.asker.counted(self):
            async with aclosing(self._events()) as events:
                async for event in events:
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        reason = choice["finish_reason"] or reason
                        if choice["text"]:
                            text += choice["text"]
                            yield 0, Piece(choice["text"])
            yield 0, self._answered(text, reason, usage)

    async def _whole(self) -> dict[str, Any]:
        async with self.asker.sent(self) as response:
            answer: dict[str, Any] = json.loads(await response.aread())
            return answer

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        ended = False
        async with self.asker.sent(self) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _Failed(500, event)
                    ended = ended or any(choice["finish_reason"] for choice in event["choices"])
                    yield event
                elif line == "data: [DONE]" and not ended:  # so vLLM 0.31 ends what it refuses
                    raise _Failed(500, None)

    def _answered(self, text: str, finish_reason: Any, usage: dict[str, Any] | None) -> Answer:
        """The answer, with the document's tokens as read from the shelf, not the entries that are left of them. usage:
        as vLLM counts. Raises `WorkerCrashed` for an answer that did not come to its end."""
        if finish_reason not in ("stop", "length") or usage is None:
            raise WorkerCrashed(f"vLLM broke the answer off ({finish_reason}); try again", retry_after_s=1.0)
        tokens = Usage(
            cache_read_tokens=self.cache.num_tokens,
            read_tokens=self.request.entries,
            prefill_tokens=len(self.request.question),
            completion_tokens=usage["completion_tokens"],
        )
        return Answer(text, [], finish_reason, tokens)


class CacheAsker:
    """Asks vLLM servers about the caches of a store. Errors of the store are raised before a server is asked."""

    def __init__(self, store: Store, questions: QuestionBuilder, upstreams: Upstreams, metrics: ProxyMetrics) -> None:
        self._store = store
        self._questions = questions
        self._upstreams = upstreams
        self._metrics = metrics

    async def prepare(
        self, cache_id: str, tenant: str, prompt: Prompt, model: str | None, fields: dict[str, Any]
    ) -> CacheAsk:
        """model: None, the cache's, or vLLM's name. fields: more of the body. Raises as `Store.stat`,
        `shelf_request`."""
        with self._metrics.asking():
            cache = await off_loop(self._store.stat, cache_id, tenant=tenant)
            request = await off_loop(self._questions.request, cache, prompt)
        note(cache_id=cache.id, cache_read_tokens=cache.num_tokens, prefill_tokens=len(request.question))
        return CacheAsk(self, cache, request, request.body(None if model == cache.model else model, **fields))

    @contextmanager
    def counted(self, ask: CacheAsk) -> Iterator[None]:
        with self._metrics.asking():
            yield
        self._metrics.answered(ask.cache.model, ask.cache.num_tokens, len(ask.request.question))

    @asynccontextmanager
    async def sent(self, ask: CacheAsk) -> AsyncIterator[httpx.Response]:
        # vLLM's log then names the request as ours does.
        headers = {"content-type": "application/json", "x-request-id": request_id()}
        content = json.dumps(ask.body).encode()
        try:
            async with self._upstreams.answer(
                "POST", "/v1/completions", key=ask.cache.id, headers=headers, content=content
            ) as response:
                if not response.is_success:
                    raise _Failed(response.status_code, _parsed(await response.aread()))
                yield response
        except _Failed as failed:
            raise await self._reason(ask.cache, failed) from failed

    async def _reason(self, cache: Manifest, failed: _Failed) -> KvshelfError:
        """vLLM tells callers that a request failed, not why: the store is asked what has become of the cache."""
        if failed.status < 500:
            return InvalidRequest(f"vLLM refused the request: {failed}")
        try:
            await off_loop(self._store.stat, cache.id, tenant=cache.tenant)
        except KvshelfError as error:
            return error
        return CacheUnusable(
            f"vLLM failed the request on cache {cache.id} ({failed}), and the store still has the cache; vLLM's log "
            f"says why, in a line with code= and the request id {request_id()}"
        )


class _Failed(Exception):
    """vLLM's refusal. Its text is vLLM's own message."""

    def __init__(self, status: int, body: Any) -> None:
        error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        super().__init__(f"{message or 'without a message'}"[:1000])
        self.status = status


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
