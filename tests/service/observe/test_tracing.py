"""Traces, as a collector gets them."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kvshelf._extras import install_command
from kvshelf.errors import MissingExtra
from kvshelf.service.observe.tracing import tracer_to
from tests.collector import Collector
from tests.service.conftest import created

if TYPE_CHECKING:
    pass

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def attributes(span: Span) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def request_named(response: httpx.Response) -> Callable[[list[Span]], list[Span]]:
    """The span of one request, by its id."""
    name = response.headers["x-request-id"]
    return lambda spans: [span for span in spans if attributes(span).get("kvshelf.request_id") == name]


def below(spans: list[Span], parent: Span) -> list[Span]:
    found = [span for span in spans if span.parent_span_id == parent.span_id]
    assert all(span.trace_id == parent.trace_id for span in found)
    return sorted(found, key=lambda span: span.start_time_unix_nano)


def test_a_creation_shows_its_phases(http: httpx.Client, collector: Collector) -> None:
    response = http.post("/v1/caches", json={"document": "Rope is spliced here. " * 20}, headers=TRACEPARENT)
    (root,) = collector.wait(request_named(response))
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert (root.name, root.kind) == ("POST /v1/caches", Span.SPAN_KIND_SERVER)
    told = attributes(root)
    assert (told["http.response.status_code"], told["http.route"]) == (201, "/v1/caches")
    cache = response.json()
    assert (told["kvshelf.cache_id"], told["kvshelf.tokens"]) == (cache["id"], cache["tokens"]["document"])
    (call,) = below(collector.spans(), root)
    assert call.name == "create"
    assert root.start_time_unix_nano <= call.start_time_unix_nano
    assert call.end_time_unix_nano <= root.end_time_unix_nano
    phases = below(collector.spans(), call)
    assert [phase.name for phase in phases] == ["queue", "prefill", "compress", "measure", "store"]
    for phase in (phase for phase in phases if phase.name != "measure"):
        seconds = (phase.end_time_unix_nano - phase.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(cache["timings"][f"{phase.name}_s"], abs=1e-6)
        assert call.start_time_unix_nano <= phase.start_time_unix_nano
        assert phase.end_time_unix_nano <= call.end_time_unix_nano


@pytest.mark.parametrize("stream", [False, True])
def test_a_query_shows_load_first_token_and_decode(http: httpx.Client, collector: Collector, stream: bool) -> None:
    cache = created(http, document=f"Chart {stream} is on the wall. " * 15)
    body = {"prompt": "Which?", "max_tokens": 5, "stream": stream, "conversation": f"conv_{stream}"}
    response = http.post(f"/v1/caches/{cache['id']}/query", json=body)
    (root,) = collector.wait(request_named(response))
    assert root.parent_span_id == b""
    assert root.name == "POST /v1/caches/{cache_id}/query"
    told = {name: value for name, value in attributes(root).items() if name.startswith("gen_ai.")}
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvshelf",
        "gen_ai.conversation.id": f"conv_{stream}",
        "gen_ai.request.model": cache["model"],
        "gen_ai.response.model": cache["model"],
        "gen_ai.usage.input_tokens": cache["tokens"]["document"] + attributes(root)["kvshelf.prefill_tokens"],
        "gen_ai.usage.cache_read.input_tokens": cache["tokens"]["document"],
        "gen_ai.usage.output_tokens": attributes(root)["kvshelf.completion_tokens"],
    }
    (call,) = below(collector.spans(), root)
    assert call.name == ("stream" if stream else "query")
    phases = {phase.name: phase for phase in below(collector.spans(), call)}
    assert phases.keys() == {"load", "queue", "prefill", "decode"}
    first_token = phases["prefill"].end_time_unix_nano
    assert abs(first_token - phases["decode"].start_time_unix_nano) < 1000
    assert phases["load"].start_time_unix_nano < first_token < phases["decode"].end_time_unix_nano
    assert phases["decode"].end_time_unix_nano <= call.end_time_unix_nano


def test_a_call_that_fails_is_marked_with_its_code_and_no_message(http: httpx.Client, collector: Collector) -> None:
    response = http.post("/v1/caches", json={"document": "zanzibar " * 20_000})
    (root,) = collector.wait(request_named(response))
    assert attributes(root)["kvshelf.code"] == "document_too_long"
    assert root.status.code != 2, "the caller's error is not the server's"
    (call,) = below(collector.spans(), root)
    assert (call.status.code, attributes(call)["error.type"]) == (2, "document_too_long")
    assert not root.events
    assert not call.events


def test_a_creation_in_the_background_is_a_trace_of_its_own(http: httpx.Client, collector: Collector) -> None:
    body = {"document": "The tide gauge is read twice a day. " * 15}
    accepted = http.post("/v1/caches", json=body, headers={"prefer": "respond-async"})
    done = http.get(f"/v1/requests/{accepted.json()['id']}", params={"wait_s": 60}).json()
    assert done["state"] == "done"
    (root,) = collector.wait(request_named(accepted))
    assert below(collector.spans(), root) == []
    collector.wait(lambda spans: [span for span in spans if span.name == "create" and span.parent_span_id == b""])


def test_traces_say_who_sends_them_and_nothing_of_texts(http: httpx.Client, collector: Collector) -> None:
    cache = created(http, document="The password is zanzibar. " * 15, name="zanzibar", labels={"a": "zanzibar"})
    headers = {"authorization": "Bearer zanzibar"}
    response = http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "zanzibar?"}, headers=headers)
    collector.wait(request_named(response))
    named = [a for r in collector.requests for s in r.resource_spans for a in s.resource.attributes]
    assert {a.value.string_value for a in named if a.key == "service.name"} == {"kvshelf"}
    assert b"zanzibar" not in b"".join(request.SerializeToString() for request in collector.requests)


def test_a_traceparent_that_is_none_begins_a_trace(http: httpx.Client, collector: Collector) -> None:
    response = http.get("/v1/models", headers={"traceparent": "00-zanzibar-\xff".encode("latin-1")})  # type: ignore[dict-item]
    (root,) = collector.wait(request_named(response))
    assert root.parent_span_id == b""
    assert root.name == "GET /v1/models"


# Without a service


def test_the_standard_variable_counts_where_there_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.removesuffix("/v1/traces"))
        with tracer_to(None) as tracer:
            tracer.start_span("a").end()
        assert [span.name for span in collector.spans()] == ["a"], "what is left is sent at the end"


def test_without_an_endpoint_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with tracer_to(None) as tracer:
        assert not tracer.start_span("a").is_recording()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_collector_that_is_gone_or_hangs_does_not_hold_up_the_end(hangs: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not hangs:
            server.close()
        with tracer_to(f"http://127.0.0.1:{port}/v1/traces") as tracer:
            tracer.start_span("a").end()
            started = time.monotonic()
        assert time.monotonic() - started < 6


def test_without_the_extra_an_endpoint_is_refused_and_the_variable_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with (
        pytest.raises(MissingExtra, match=re.escape(install_command("otel"))),
        tracer_to("http://127.0.0.1:1/v1/traces"),
    ):
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with tracer_to(None) as tracer:
        assert not tracer.start_span("a").is_recording()
