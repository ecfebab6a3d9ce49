"""Counters and timers of the proxy, for Prometheus: those of questions, and of the vLLM servers behind it."""

from __future__ import annotations

from collections.abc import Callable

from kvshelf.service.observe.questions import QuestionMetrics


class ProxyMetrics(QuestionMetrics):
    """The instruments of one proxy. upstream: the name of a vLLM server, all given at the start."""

    def __init__(self) -> None:
        super().__init__()
        about = "requests to vLLM servers, by HTTP status or by why they have none"
        self._sent = self._counter("upstream_requests", about, "upstream", "result")
        self._in_flight = self._gauge("upstream_in_flight", "requests that a vLLM server has from here", "upstream")
        self._up = self._gauge("upstream_up", "0 for seconds after a vLLM server did not connect, else 1", "upstream")

    def watch(self, upstream: str, in_flight: Callable[[], float], up: Callable[[], float]) -> None:
        """Reads a server's numbers whenever they are asked for."""
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
