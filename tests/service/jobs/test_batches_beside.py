"""Batches beside questions, and beside other front ends on the same store."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf.service.access.keyfile import KeyFile
from tests.service.conftest import created
from tests.service.jobs.test_batches import awaited, begun, ended, lines, long_rows, results, text
from tests.service.scrape import scrape
from tests.store.redis.servers import ValkeyServer

if TYPE_CHECKING:
    from tests.conftest import LiveService

Start = Callable[..., AbstractContextManager["LiveService"]]


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_batch_goes_on_after_the_death_of_whoever_runs_it(
    start_service: Start, tiny_folder: Path, tmp_path: Path, soak: bool
) -> None:
    """kill -9 of all processes of a service; another one that lives beside it goes on. With the full counts that one is
    killed, too, and the next start ends the batch. No row is missing or done twice. All that is known is in Redis."""
    count = 60 if soak else 5
    with ValkeyServer(tmp_path / "valkey") as server:

        def start(name: str) -> AbstractContextManager[LiveService]:
            return start_service(tmp_path / name, tiny_folder, store=f"{server.url}?timeout_s=10")

        with start_together(start("first"), start("second")) as services:
            batch = begun_at(services[0], count)
            other, victim = sorted(services, key=batches_running)
            victim.kill()
            if not soak:
                require_whole(other, batch, count)
                return
            with httpx.Client(base_url=other.url, timeout=60) as http:
                awaited(http, batch["id"], lambda now: now["request_counts"]["completed"] >= count // 2)
            other.kill()
        with start("third") as third:
            require_whole(third, batch, count)


@contextmanager
def start_together(*services: AbstractContextManager[LiveService]) -> Iterator[list[LiveService]]:
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        yield list(threads.map(stack.enter_context, services))


def begun_at(service: LiveService, count: int) -> dict[str, Any]:
    """A batch of which some rows are done."""
    with httpx.Client(base_url=service.url, timeout=60) as http:
        batch = begun(http, long_rows(count, salt=2) + b"nonsense\n", policy="streaming_llm")
        awaited(http, batch["id"], lambda now: now["request_counts"]["completed"] >= 2)
        return batch


def batches_running(service: LiveService) -> float:
    with httpx.Client(base_url=service.url, timeout=60) as http:
        return scrape(http)["kvshelf_batches", frozenset({("state", "running")})]


def require_whole(service: LiveService, batch: dict[str, Any], count: int) -> None:
    with httpx.Client(base_url=service.url, timeout=60) as http:
        after = ended(http, batch["id"])
        assert (after["status"], after["request_counts"]["total"]) == ("completed", count + 1)
        done, failed = results(http, after)
        assert {row["custom_id"] for row in done} == {f"long-{n}" for n in range(count)}
        assert len(done) == count, "each row stands there once"
        assert [row["line"] for row in failed] == [count + 1]
        shelf = http.get("/v1/caches", params={"limit": 1000}).json()["data"]
        assert sorted(cache["id"] for cache in shelf) == sorted(row["cache_id"] for row in done)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_batch_yields_to_questions(http: httpx.Client, cache: dict[str, Any]) -> None:
    """While a batch has the replica, a question waits for a layer of a document and no more. The model has two of them:
    so it is answered sooner than one document is compressed, of which three are always waiting."""

    def asked_s() -> float:
        began = time.monotonic()
        answer = http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Who keeps it?", "max_tokens": 16})
        assert answer.status_code == 200, answer.text
        return time.monotonic() - began

    alone_s = statistics.median(asked_s() for _ in range(15))
    batch = begun(http, long_rows(12, salt=3), policy="streaming_llm")
    awaited(http, batch["id"], lambda now: now["request_counts"]["completed"] >= 1)
    beside_s = statistics.median(asked_s() for _ in range(15))
    assert http.get(f"/v1/batches/{batch['id']}").json()["status"] == "in_progress", "it was at work all the time"
    http.post(f"/v1/batches/{batch['id']}/cancel")
    rows, _ = results(http, ended(http, batch["id"]))
    document_s = statistics.median(row["seconds"] for row in rows)
    print(
        f"a question took {alone_s:.3f} s alone and {beside_s:.3f} s beside a batch with {document_s:.3f} s a document"
    )
    assert beside_s < alone_s + document_s


@pytest.mark.timeout(900)
def test_a_batch_that_waits_for_its_tenant_s_quota_holds_up_no_other_tenant(
    start_service: Start, tiny_folder: Path, tmp_path: Path, soak: bool
) -> None:
    """Of the only place that there is. It goes on when there is room."""
    if not soak:
        pytest.skip(
            "a service of its own, and a minute; test_batch_rules.py has the rules and test_batch_store.py the place"
        )
    keys = KeyFile(tmp_path / "api-keys.json")
    tenants = [keys.create(name, ["read", "write"])[1] for name in ("cramped", "other")]
    limits = {"api_key_file": keys.path, "tenant_max_caches": 4, "max_running_batches": 1}
    with start_service(tmp_path / "home", tiny_folder, **limits) as service, ExitStack() as clients:
        cramped, other = (
            clients.enter_context(
                httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
            )
            for key in tenants
        )
        fillers = [created(cramped, document=text(n) + "filler")["id"] for n in range(2)]
        batch = begun(cramped, lines(*({"custom_id": f"row-{n}", "document": text(n)} for n in range(4))))
        waits = awaited(cramped, batch["id"], lambda now: now["status"] == "paused")
        assert "4 caches" in waits["progress"]["reason"]
        theirs = ended(other, begun(other, lines({"document": text(1)}, {"document": text(2)}))["id"])
        assert (theirs["status"], theirs["request_counts"]["completed"]) == ("completed", 2)
        waits = awaited(cramped, batch["id"], lambda now: now["status"] == "paused")
        assert (waits["request_counts"]["completed"], "4 caches" in waits["progress"]["reason"]) == (2, True)
        for cache_id in fillers:
            assert cramped.delete(f"/v1/caches/{cache_id}").status_code == 200
        after = ended(cramped, batch["id"])
        assert (after["status"], after["request_counts"]["completed"]) == ("completed", 4)
        assert {row["custom_id"] for row in results(cramped, after)[0]} == {f"row-{n}" for n in range(4)}
