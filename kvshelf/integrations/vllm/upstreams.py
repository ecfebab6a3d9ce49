"""The vLLM servers behind the proxy: which one gets a request, and which do not answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import httpx
import structlog

from kvshelf.errors import DeadlineExceeded, InvalidRequest, KvshelfError, NoWorker, WorkerCrashed
from kvshelf.service.observe.logs import note
from kvshelf.service.observe.questions import QuestionMetrics

log = structlog.get_logger("kvshelf.vllm")

SLACK: Final = 4
"""Most open requests of a document's own server above the least loaded one, which would have to load it first."""

REST_S: Final = 5.0
"""How long a server that did not connect is asked last."""

_CONNECT_S: Final = 5.0


class ProxyMetrics(QuestionMetrics):
    """The proxy's metrics for Prometheus. upstream: the name of a vLLM server, all known at the start."""

    def __init__(self) -> None:
        super().__init__()
        about = "requests to vLLM servers, by HTTP status or by why they have none"
        self._sent = self._counter("upstream_requests", about, "upstream", "result")
        self._in_flight = self._gauge("upstream_in_flight", "requests that a vLLM server has from here", "upstream")
        self._up = self._gauge("upstream_up", "0 for seconds after a vLLM server did not connect, else 1", "upstream")

    def watch(self, upstream: str, in_flight: Callable[[], float], up: Callable[[], float]) -> None:
        """Reads a server's numbers whenever Prometheus asks for them."""
        self._in_flight.labels(upstream).set_function(in_flight)
        self._up.labels(upstream).set_function(up)

    def sent(self, upstream: str, result: str) -> None:
        """Records a request whose answer has ended, or that has none."""
        self._sent.labels(upstream, result).inc()

    def answered(self, model: str, cache_read_tokens: int, prefill_tokens: int) -> None:
        """Records an answered question. The tokens of answers are in vLLM's own metrics."""
        self._queries.labels("answered").inc()
        self._tokens_saved.labels(model).inc(cache_read_tokens)
        self._prefill_tokens.labels(model).inc(prefill_tokens)


@dataclass(eq=False)
class Upstream:
    """One server. open: requests that it has from here. rests_until: on the clock of `Upstreams`."""

    url: str
    open: int = 0
    rests_until: float = 0.0

    @property
    def name(self) -> str:
        """Its address for metrics and the log, where a password must not be."""
        parts = urlsplit(self.url)
        return parts.netloc.rpartition("@")[2] + parts.path

    def weight(self, key: str) -> bytes:
        """The server with the largest one owns the key: without another server only that one's keys move."""
        return hashlib.sha256(f"{self.url} {key}".encode()).digest()


class Upstreams:
    """Sends requests to one of several servers. silence_s: how long one may send nothing. Raises `InvalidRequest` for
    what is no HTTP URL.

    metrics: count the requests. api_key: what the servers ask for; a caller's own is for the proxy alone.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        silence_s: float,
        metrics: ProxyMetrics,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._all = [Upstream(_base(url)) for url in dict.fromkeys(urls)]
        self._clock = clock
        self._metrics = metrics
        for upstream in self._all:
            metrics.watch(upstream.name, partial(getattr, upstream, "open"), partial(self._is_up, upstream))
        # Each request gets its own connection. One that was kept may just be closing, and a request that fails on it
        # could not be told from one that vLLM has begun.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(silence_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    def order(self, key: str | None) -> list[Upstream]:
        """The servers in the order in which a request tries them. key: requests with the same key go to one server,
        unless it has more than `SLACK` requests more than the least loaded."""
        now = self._clock()
        ranked = sorted(self._all, key=lambda upstream: upstream.weight(key or ""), reverse=True)
        awake = [upstream for upstream in ranked if upstream.rests_until <= now] or ranked
        if key is None or awake[0].open > min(upstream.open for upstream in awake) + SLACK:
            awake.sort(key=lambda upstream: upstream.open)
        return awake + [upstream for upstream in ranked if upstream not in awake]

    @asynccontextmanager
    async def answer(
        self, method: str, path: str, *, key: str | None, headers: Mapping[str, str], content: bytes | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The answer of the first server that connects; its body is still to be read. Raises `NoWorker` if none does,
        `WorkerCrashed` and `DeadlineExceeded` if the server breaks off or is silent, also while the body is read."""
        for upstream in self.order(key):
            request = self._http.build_request(method, upstream.url + path, headers=headers, content=content)
            with self._counted(upstream) as sent, _named(upstream):
                try:
                    response = await self._http.send(request, stream=True)
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # the request cannot have begun
                    upstream.rests_until = self._clock() + REST_S
                    log.warning("vLLM does not connect", upstream=upstream.name, problem=str(error))
                    continue
                sent.result = str(response.status_code)
                try:
                    yield response
                finally:
                    await response.aclose()
            return
        raise NoWorker(
            f"none of the {len(self._all)} vLLM servers can be connected; try again when one is up", retry_after_s=1.0
        )

    @contextmanager
    def _counted(self, upstream: Upstream) -> Iterator[_Sent]:
        """Wraps a request to a server."""
        sent = _Sent()
        upstream.open += 1
        note(upstream=upstream.name)
        try:
            yield sent
        except KvshelfError as error:
            sent.result = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            sent.result = "cancelled"
            raise
        finally:
            upstream.open -= 1
            self._metrics.sent(upstream.name, sent.result)

    def _is_up(self, upstream: Upstream) -> float:
        return float(upstream.rests_until <= self._clock())


@dataclass
class _Sent:
    """What became of a request to a server, as its metric says."""

    result: str = "not_connected"


def _base(url: str) -> str:
    """The URL that paths are appended to; the `/v1` that clients of OpenAI's take may be given."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"--upstream {url!r} is no address such as http://127.0.0.1:8000", param="upstream")
    return url.rstrip("/").removesuffix("/v1")


@contextmanager
def _named(upstream: Upstream) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(f"vLLM at {upstream.name} sent nothing for too long; try again later") from error
    except httpx.TransportError as error:
        raise WorkerCrashed(
            f"vLLM at {upstream.name} broke off ({error or type(error).__name__}); the request may have been carried "
            "out. Try again",
            retry_after_s=1.0,
        ) from error
