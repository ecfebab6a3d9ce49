"""What the service says about itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from kvshelf.methods.policies import POLICIES
from kvshelf.service.service import THREADS
from tests.service.conftest import stopped

if TYPE_CHECKING:
    from tests.conftest import LiveService

DOCUMENT = "Xylophones are never mentioned in any log. " * 9


def test_models_and_policies(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("random-tiny", "model", "kvshelf")
    assert (model["max_tokens"], model["default_layout"], model["dtype"]) == (16384, "chat", "float32")
    policies = http.get("/v1/policies").json()["data"]
    assert {policy["id"] for policy in policies} == set(POLICIES)
    lagkv = next(policy for policy in policies if policy["id"] == "lagkv")
    assert lagkv["parameters"]["lag"]["type"] == "int"


def test_limits_tell_what_one_request_and_one_tenant_may_ask(http: httpx.Client) -> None:
    limits = http.get("/v1/limits").json()
    assert limits["models"] == {"random-tiny": 16384}
    assert (limits["max_file_bytes"], limits["max_batch_rows"], limits["max_document_tokens"]) == (8 << 20, 200, None)
    batches = limits["tenant"]["batches"]
    assert batches["limit"] == 100 == batches["used"] + batches["left"]
    assert limits["tenant"]["tokens_per_minute"] == {"limit": None, "used": None, "left": None}


def test_health(http: httpx.Client) -> None:
    assert http.get("/livez").status_code == 200
    response = http.get("/readyz")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ready",
        "parts": [
            {"name": "store", "ready": True, "reason": ""},
            {"name": "workers:random-tiny", "ready": True, "reason": ""},
        ],
    }


def test_while_ray_hangs_health_answers_and_nothing_else_waits(
    http: httpx.Client, service: LiveService, cache: dict[str, Any]
) -> None:
    """Health is asked for more often than there are threads: none of those that the store needs may wait for Ray."""
    (replica,) = service.replica_pids()
    with stopped(service.controller_pid()):
        with ThreadPoolExecutor(THREADS + 4) as threads:
            asked = [threads.submit(http.get, "/readyz", timeout=30) for _ in range(THREADS + 4)]
            answers = [each.result() for each in asked]
        assert {answer.status_code for answer in answers} == {200}
        reasons = {answer.json()["parts"][1]["reason"] for answer in answers}
        assert reasons == {"Ray does not say within 2 s how many of 1 replicas run"}
        assert http.get("/v1/caches", timeout=10).status_code == 200
        asked_now = http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "?", "max_tokens": 1})
        assert asked_now.status_code == 200, asked_now.text
        with stopped(replica):
            nobody = http.get("/readyz", timeout=10)
    assert nobody.status_code == 503
    assert nobody.json()["parts"][1] == {
        "name": "workers:random-tiny",
        "ready": False,
        "reason": "neither a replica nor Ray answers within 2 s",
    }


def test_openapi_describes_every_route_and_body(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/caches", "/v1/caches/{cache_id}", "/v1/caches/{cache_id}/blob", "/v1/caches/{cache_id}/query",
        "/v1/caches/{cache_id}/append", "/v1/caches/{cache_id}/turns",
        "/v1/caches/import", "/v1/caches/{cache_id}/verify", "/v1/caches/{cache_id}/kept", "/v1/estimate",
        "/v1/caches/{cache_id}/prompt", "/v1/caches/{cache_id}/export",
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
        "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel", "/v1/batches/{batch_id}/pause",
        "/v1/batches/{batch_id}/resume", "/v1/batches/{batch_id}/retry", "/v1/batches/{batch_id}/events",
        "/v1/requests/{request_id}", "/v1/query", "/v1/erasures", "/v1/certificates", "/v1/certificates/{name}",
        "/v1/workflows", "/v1/workflows/{id}", "/v1/caches/search", "/v1/chat/completions",
        "/v1/models",
        "/v1/policies", "/v1/selectors", "/v1/suffix_policies", "/v1/limits", "/v1/usage", "/v1/responses",
        "/v1/caches/warm",
        "/v1/responses/{response_id}",
        "/v1/messages", "/v1/messages/count_tokens", "/v1/caches/{cache_id}/remake", "/v1/models/{model_id}",
        "/livez", "/metrics", "/readyz",
    }  # fmt: skip
    schemas = document["components"]["schemas"]
    assert schemas["CreateCache"]["additionalProperties"] is False
    references: list[str] = []

    def collect(node: object) -> None:
        if isinstance(node, dict):
            references.extend(value for key, value in node.items() if key == "$ref")
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(document)
    assert references
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= schemas.keys()


def test_request_ids_differ_and_an_authorization_header_says_nothing(http: httpx.Client) -> None:
    headers = {"authorization": "Bearer not-a-key"}
    ids = {http.get("/livez", headers=headers).headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


def test_the_log_has_every_request_and_no_text(http: httpx.Client, service: LiveService) -> None:
    created = http.post("/v1/caches", json={"document": DOCUMENT})
    asked = http.post(f"/v1/caches/{created.json()['id']}/query", json={"prompt": "Any Xylophones?", "max_tokens": 2})
    http.post("/v1/caches", json={"document": "x", "policy": "Xylophones"})
    log = Path(service.log).read_text()
    assert created.headers["x-request-id"] in log
    assert asked.headers["x-request-id"] in log
    assert "Xylophones" not in log
