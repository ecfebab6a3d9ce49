"""/metrics: every number moves by exactly what was done, and says nothing about whose caches they are."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import open_store
from kvshelf.errors import (
    CacheCorrupt,
    CacheExpired,
    CacheNotFound,
    KvshelfError,
    ModelMismatch,
    QueueFull,
    StoreUnavailable,
)
from tests.service.conftest import created, other_model, refused, stopped
from tests.service.scrape import Numbers, moving, parsed, scrape
from tests.store.redis.servers import ValkeyServer

if TYPE_CHECKING:
    from kvshelf.service.observe.metrics import Metrics
    from tests.conftest import LiveService

DOCUMENT = "The keeper counts the waves and writes the number down. " * 12
UNKNOWN = "kvs_" + "0" * 40
MODEL = "random-tiny"


@pytest.fixture(scope="module")
def counted(http: httpx.Client) -> dict[str, Any]:
    """A cache that the tests of this file ask."""
    return created(http, document=DOCUMENT)


def ask(http: httpx.Client, cache_id: str, **body: Any) -> httpx.Response:
    return http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "How many?", "max_tokens": 4} | body)


def once(http: httpx.Client, read: Callable[[Numbers], bool]) -> None:
    """Wait until the numbers are as they should be: what is cancelled takes a moment to end."""
    end = time.monotonic() + 20
    while not read(scrape(http)):
        assert time.monotonic() < end, "the numbers never were as expected"
        time.sleep(0.1)


# Requests


def test_requests_are_counted_by_template_and_status(http: httpx.Client, counted: dict[str, Any]) -> None:
    with moving(http) as moved:
        for _ in range(3):
            http.get(f"/v1/caches/{counted['id']}")
        http.get(f"/v1/caches/{UNKNOWN}")
        http.request("DELETE", "/v1/models")
    shown = "/v1/caches/{cache_id}"
    assert moved("kvshelf_http_requests_total", route=shown, method="GET", status="200") == 3
    assert moved("kvshelf_http_requests_total", route=shown, method="GET", status="404") == 1
    assert moved("kvshelf_http_requests_total", route="/v1/models", method="DELETE", status="405") == 1
    assert moved("kvshelf_http_request_seconds_count", route=shown, method="GET") == 4
    assert moved("kvshelf_http_requests_total") == 6  # the scrape before the block was not in itself


def test_what_callers_make_up_becomes_no_label(http: httpx.Client) -> None:
    def send(number: int) -> None:
        http.get(f"/v1/nothing-{number}")
        http.request(f"M{number}AKEUP", "/livez")
        http.get(f"/v1/caches/kvs_{number:040x}")
        http.post("/v1/caches", json={"document": "x", "policy": f"policy-{number}"})
        http.post("/v1/caches", json={"document": "x", "model": f"model-{number}"})
        http.post("/v1/chat/completions", json={"cache_id": UNKNOWN, "model": f"m{number}", "messages": []})

    send(0)
    before = scrape(http)
    for number in range(1, 6):
        send(number)
    assert scrape(http).keys() == before.keys()
    text = http.get("/metrics").text
    assert [word for word in ("nothing", "kvs_", "policy-", "model-", "doc_", "req_", "default") if word in text] == []


def test_labels_are_few_and_known(http: httpx.Client, counted: dict[str, Any]) -> None:
    ask(http, counted["id"])
    labels = {label for (name, has), _ in scrape(http).items() for label, _ in has if name.startswith("kvshelf_")}
    assert labels <= {
        "call", "event", "kind", "le", "method", "model", "phase", "policy", "read_from", "reason", "result", "route",
        "state", "status",
    }  # fmt: skip


def test_open_metrics_is_spoken_to_those_who_ask_for_it(http: httpx.Client) -> None:
    plain = http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    asked = http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")


# Creations


def test_a_creation_is_new_once_and_existing_afterwards(http: httpx.Client) -> None:
    body = {"document": "Nobody rows at night. " * 30, "policy": "snapkv", "compression_ratio": 0.75}
    with moving(http) as moved:
        cache = created(http, **body)
        created(http, **body)
        created(http, **body)
    assert moved("kvshelf_creations_total", model=MODEL, policy="snapkv", result="new") == 1
    assert moved("kvshelf_creations_total", model=MODEL, policy="snapkv", result="existing") == 2
    assert moved("kvshelf_creations_total") == 3
    assert moved("kvshelf_document_tokens_total", model=MODEL) == cache["tokens"]["document"]
    assert moved("kvshelf_kept_tokens_total", model=MODEL) == cache["tokens"]["kept"]
    assert moved("kvshelf_full_bytes_total", model=MODEL) == cache["bytes"]["full"]
    assert moved("kvshelf_full_16bit_bytes_total", model=MODEL) == cache["bytes"]["full_16bit"]
    assert moved("kvshelf_stored_bytes_total", model=MODEL) == cache["bytes"]["stored"]
    for phase in ("queue", "prefill", "compress", "store"):
        assert moved("kvshelf_creation_phase_seconds_count", phase=phase) == 1
        taken = cache["timings"][f"{phase}_s"]
        assert moved("kvshelf_creation_phase_seconds_sum", phase=phase) == pytest.approx(taken, abs=1e-6)


def test_a_creation_that_fails_is_counted_by_its_code(http: httpx.Client) -> None:
    with moving(http) as moved:
        refused(http.post("/v1/caches", json={"document": "a b " * 20_000}), 413, "document_too_long")
    assert moved("kvshelf_creations_total", result="document_too_long") == moved("kvshelf_creations_total") == 1
    assert moved("kvshelf_creation_phase_seconds_count") == 0


def test_a_creation_in_the_background_counts_like_any_other(http: httpx.Client) -> None:
    with moving(http) as moved:
        body = {"document": "The fog horn is tested on Mondays. " * 20}
        accepted = http.post("/v1/caches", json=body, headers={"prefer": "respond-async"}).json()
        done = http.get(f"/v1/requests/{accepted['id']}", params={"wait_s": 60}).json()
        assert done["state"] == "done"
        once(http, lambda numbers: not any(value for (n, _), value in numbers.items() if n.endswith("_in_flight")))
    assert moved("kvshelf_creations_total", result="new") == moved("kvshelf_creations_total") == 1
    assert moved("kvshelf_creation_phase_seconds_count", phase="prefill") == 1


# Queries


def test_tokens_and_times_of_answers(http: httpx.Client, counted: dict[str, Any]) -> None:
    with moving(http) as moved:
        one = ask(http, counted["id"], conversation="conv_1").json()["usage"]
    assert moved("kvshelf_queries_total", result="answered") == moved("kvshelf_queries_total") == 1
    assert moved("kvshelf_cache_hits_total") == 1
    assert moved("kvshelf_tokens_saved_total", model=MODEL) == one["cache_read_tokens"] == counted["tokens"]["document"]
    assert moved("kvshelf_prefill_tokens_total", model=MODEL) == one["prefill_tokens"]
    assert moved("kvshelf_completion_tokens_total", model=MODEL) == one["completion_tokens"] == 4
    assert moved("kvshelf_first_token_seconds_count", model=MODEL) == 1
    assert moved("kvshelf_turn_hit_share_count", model=MODEL) == 1
    share = one["cache_read_tokens"] / (one["cache_read_tokens"] + one["prefill_tokens"])
    assert moved("kvshelf_turn_hit_share_sum", model=MODEL) == pytest.approx(share)
    for phase in ("load", "queue", "prefill", "decode"):
        assert moved("kvshelf_answer_phase_seconds_count", phase=phase) == 1
    first_s = moved("kvshelf_first_token_seconds_sum")
    assert 0 < moved("kvshelf_answer_phase_seconds_sum", phase="prefill") <= first_s < 60
    assert moved("kvshelf_answer_phase_seconds_sum", phase="decode") > 0


def test_a_query_of_several_prompts_is_one_hit_and_several_answers(http: httpx.Client, counted: dict[str, Any]) -> None:
    with moving(http) as moved:
        answers = ask(http, counted["id"], prompt=["How many?", "When?", "Who?"]).json()["data"]
    assert moved("kvshelf_queries_total", result="answered") == moved("kvshelf_cache_hits_total") == 1
    assert moved("kvshelf_tokens_saved_total") == 3 * counted["tokens"]["document"]
    assert moved("kvshelf_prefill_tokens_total") == sum(answer["usage"]["prefill_tokens"] for answer in answers)
    assert moved("kvshelf_first_token_seconds_count") == 3
    assert moved("kvshelf_turn_hit_share_count") == 0, "they named no conversation"


def test_streams_and_chats_count_like_any_other_query(http: httpx.Client, counted: dict[str, Any]) -> None:
    with moving(http) as moved:
        assert ask(http, counted["id"], stream=True).text.endswith("data: [DONE]\n\n")
        messages = [{"role": "user", "content": "How many?"}]
        chat = {"cache_id": counted["id"], "messages": messages, "max_tokens": 4}
        usage = http.post("/v1/chat/completions", json=chat).json()["usage"]
        http.post("/v1/chat/completions", json=chat | {"stream": True})
    assert moved("kvshelf_queries_total", result="answered") == moved("kvshelf_cache_hits_total") == 3
    assert moved("kvshelf_tokens_saved_total") == 3 * counted["tokens"]["document"]
    assert moved("kvshelf_completion_tokens_total") == 3 * usage["completion_tokens"]
    assert moved("kvshelf_http_requests_total", route="/v1/chat/completions", status="200") == 2


def test_a_cache_is_read_from_the_shelf_once_and_then_from_memory(http: httpx.Client) -> None:
    cache = created(http, document="Gulls nest under the stairs. " * 15)
    with moving(http) as moved:
        for _ in range(3):
            ask(http, cache["id"])
    assert moved("kvshelf_cache_hits_total", read_from="home") == 1
    assert moved("kvshelf_cache_hits_total", read_from="memory") == 2


def test_a_caller_that_hangs_up_is_counted_as_that(http: httpx.Client, counted: dict[str, Any]) -> None:
    body = {"prompt": "How many?", "max_tokens": 15_000, "stream": True}
    with moving(http) as moved:
        with http.stream("POST", f"/v1/caches/{counted['id']}/query", json=body) as response:
            lines = response.iter_lines()  # to be kept: what collects it hangs up
            next(lines)
            running = scrape(http)["kvshelf_calls_in_flight", frozenset({("model", MODEL), ("call", "stream")})]
            assert running == 1
        once(http, lambda numbers: not any(value for (n, _), value in numbers.items() if n.endswith("_in_flight")))
    assert moved("kvshelf_queries_total", result="cancelled") == moved("kvshelf_queries_total") == 1
    assert moved("kvshelf_cache_hits_total") == moved("kvshelf_cache_misses_total") == 0


def test_what_waits_for_its_turn_is_shown(http: httpx.Client, service: LiveService) -> None:
    """While the worker does nothing, two are at it and the others wait."""

    def shown(numbers: Numbers, state: str) -> float:
        return numbers["kvshelf_background_requests", frozenset({("state", state)})]

    documents = [f"Log {number}: calm, calm, calm, a sail, calm. " * 400 for number in range(6)]
    (replica,) = service.replica_pids()
    with stopped(replica):
        accepted = [
            http.post("/v1/caches", json={"document": document}, headers={"prefer": "respond-async"}).json()
            for document in documents
        ]
        once(http, lambda numbers: (shown(numbers, "running"), shown(numbers, "queued")) == (2, 4))
    for request in accepted:
        assert http.get(f"/v1/requests/{request['id']}", params={"wait_s": 120}).json()["state"] == "done"
    once(http, lambda numbers: shown(numbers, "running") == shown(numbers, "queued") == 0)


def test_what_refuses_a_question_is_no_miss(http: httpx.Client, counted: dict[str, Any]) -> None:
    with moving(http) as moved:
        refused(ask(http, counted["id"], prompt="word " * 20_000), 400, "invalid_request")
    assert moved("kvshelf_queries_total", result="invalid_request") == moved("kvshelf_queries_total") == 1
    assert moved("kvshelf_cache_misses_total") == moved("kvshelf_cache_hits_total") == 0


# Misses


def missed(http: httpx.Client, cache_id: str, reason: str, status: int) -> None:
    """A query and a chat each count as one miss, for this reason."""
    messages = [{"role": "user", "content": "?"}]
    with moving(http) as moved:
        one = ask(http, cache_id)
        two = http.post("/v1/chat/completions", json={"cache_id": cache_id, "messages": messages})
    assert (one.status_code, two.status_code) == (status, status)
    code = one.json()["error"]["code"]
    assert moved("kvshelf_cache_misses_total", reason=reason) == moved("kvshelf_cache_misses_total") == 2
    assert moved("kvshelf_queries_total", result=code) == moved("kvshelf_queries_total") == 2
    assert moved("kvshelf_cache_hits_total") == moved("kvshelf_tokens_saved_total") == 0


def test_a_cache_that_never_was_is_a_miss(http: httpx.Client) -> None:
    missed(http, UNKNOWN, "not_found", 404)


def test_an_expired_cache_is_a_miss(http: httpx.Client) -> None:
    cache = created(http, document="The ink has dried. " * 9, ttl_s=0.3)
    time.sleep(0.5)
    missed(http, cache["id"], "expired", 410)


def test_a_corrupt_cache_is_a_miss(http: httpx.Client, service: LiveService) -> None:
    cache = created(http, document="The glass is cracked. " * 20)
    (blob,) = (service.home / "shelf").rglob(f"*{cache['id'].removeprefix('kvs_')}*")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    missed(http, cache["id"], "corrupt", 424)


def test_a_cache_of_another_model_is_a_miss(http: httpx.Client, service: LiveService, tiny_folder: Path) -> None:
    with open_store(f"disk://{service.home}/shelf") as store:
        manifest = store.put(other_model(tiny_folder).compress("Nobody knows whose. " * 9))
    missed(http, manifest.id, "model_changed", 409)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CacheNotFound("x"), "not_found"),
        (CacheExpired("x", reason="expired"), "expired"),
        (CacheExpired("x", reason="evicted"), "evicted"),
        (CacheCorrupt("x", reason="digest"), "corrupt"),
        (CacheCorrupt("x", reason="newer_version"), "version"),
        (ModelMismatch("x"), "model_changed"),
        (StoreUnavailable("x"), "store_unavailable"),
        (QueueFull("x"), None),
    ],
)
def test_each_error_has_its_reason(numbers: Metrics, error: KvshelfError, reason: str | None) -> None:
    with pytest.raises(KvshelfError), numbers.asking():
        raise error
    found = samples(numbers)
    misses = {dict(has)["reason"] for (name, has), v in found.items() if name == "kvshelf_cache_misses_total" and v}
    assert misses == ({reason} if reason else set())
    assert found["kvshelf_queries_total", frozenset({("result", error.code)})] == 1


# The shelf, the workers


@pytest.fixture
def numbers() -> Metrics:
    from kvshelf.service.observe.metrics import Metrics

    return Metrics()


def samples(numbers: Metrics) -> Numbers:
    from prometheus_client import generate_latest

    return parsed(generate_latest(numbers.registry).decode())


def test_the_shelf_and_the_workers_are_shown(http: httpx.Client, service: LiveService) -> None:
    created(http, document="The last boat has left. " * 9)
    with open_store(f"disk://{service.home}/shelf") as store:

        def shows_what_is_there(numbers: Numbers) -> bool:
            usage = store.usage()
            shown = numbers["kvshelf_caches", frozenset()], numbers["kvshelf_shelf_bytes", frozenset()]
            return shown == (usage.caches, usage.bytes)

        once(http, shows_what_is_there)
    found = scrape(http)
    assert found["kvshelf_store_up", frozenset()] == 1
    assert found["kvshelf_replicas", frozenset({("model", MODEL), ("state", "running")})] == 1
    assert found["kvshelf_replicas", frozenset({("model", MODEL), ("state", "wanted")})] == 1
    assert found["kvshelf_background_requests", frozenset({("state", "queued")})] == 0
    assert found["kvshelf_waiting_requests", frozenset({("model", MODEL), ("kind", "question")})] == 0


def test_a_made_up_method_is_one_of_the_others(numbers: Metrics) -> None:
    for method in ("BREW", "STEEP", "POUR"):
        numbers.request("/livez", method, 405, 0.1)
    label = frozenset({("route", "/livez"), ("method", "other"), ("status", "405")})
    assert samples(numbers)["kvshelf_http_requests_total", label] == 3


def test_two_apps_do_not_share_numbers(numbers: Metrics) -> None:
    from kvshelf.service.observe.metrics import Metrics

    other = Metrics()
    numbers.request("/livez", "GET", 200, 0.1)
    assert ("kvshelf_http_requests_total", frozenset({("route", "/livez"), ("method", "GET"), ("status", "200")})) in (
        samples(numbers)
    )
    assert not any(name == "kvshelf_http_requests_total" for name, _ in samples(other))


@pytest.mark.anyio
async def test_a_store_that_hangs_is_shown_as_down_and_holds_up_nobody(numbers: Metrics, tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as valkey, open_store(valkey.url) as store:
        await numbers.read_shelf(store)
        assert samples(numbers)["kvshelf_store_up", frozenset()] == 1
        valkey.pause()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        assert samples(numbers)["kvshelf_caches", frozenset()] == 0, "numbers of a moment ago are good enough"
        numbers._usage_until = 0.0
        started = time.monotonic()
        await numbers.read_shelf(store)
        assert time.monotonic() - started < 2.5
        ticking.cancel()
        assert ticks > 5
        found = samples(numbers)
        assert found["kvshelf_store_up", frozenset()] == 0
        assert math.isnan(found["kvshelf_caches", frozenset()])
        valkey.resume()


@pytest.mark.anyio
async def test_many_scrapes_ask_the_store_once(numbers: Metrics, tmp_path: Path) -> None:
    with open_store(f"disk://{tmp_path}/shelf") as store:
        asked = 0
        usage = store.usage

        def counting() -> Any:
            nonlocal asked
            asked += 1
            return usage()

        store.usage = counting  # type: ignore[method-assign,assignment]
        await asyncio.gather(*(numbers.read_shelf(store) for _ in range(20)))
    assert asked == 1
