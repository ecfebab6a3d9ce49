"""Texts cost what a model could take of them, whoever sends them: they are refused before they become tokens, a replica
has the memory afterwards that it had, and another tenant's question waits for none of it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.attack.conftest import Attacked
from tests.attack.watch import memory_of
from tests.service.conftest import created

MB = 1 << 20
KEPT_BYTES = 20 * MB
NOISE_S = 1.0
"""For processor time that the attack itself takes on a machine of two cores: the suite keeps both busy."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}

Body = Callable[[str, str], dict[str, Any]]


def said(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def counted(model: str, text: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": said(("user", text))} | more


ROUTES: dict[str, tuple[str, Body]] = {
    "document": ("/v1/caches", lambda text, _: {"document": text}),
    "messages": ("/v1/caches", lambda text, _: {"messages": said(("user", text), ("assistant", "x"))}),
    "expected questions": ("/v1/caches", lambda text, _: {"document": "x y z", "expected_questions": [text]}),
    "estimate": ("/v1/estimate", lambda text, _: {"document": text}),
    "prompt": ("/v1/caches/{id}/query", lambda text, _: {"prompt": text}),
    "system": ("/v1/caches/{id}/query", lambda text, _: {"messages": said(("system", text), ("user", "x"))}),
    "many messages": (
        "/v1/caches/{id}/query",
        lambda text, _: {"messages": said(*[("user" if n % 2 == 0 else "assistant", text[n::99]) for n in range(99)])},
    ),
    "tools": (
        "/v1/chat/completions",
        lambda text, id: {
            "cache_id": id,
            "model": "random-tiny",
            "messages": said(("user", "x")),
            "tools": [{"type": "function", "function": TOOL["function"] | {"description": text}}],
        },
    ),
    "results": (
        "/v1/chat/completions",
        lambda text, id: {
            "cache_id": id,
            "model": "random-tiny",
            "messages": [
                *said(("user", "x")),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": text},
            ],
            "tools": [TOOL],
        },
    ),
    "append": ("/v1/caches/{id}/append", lambda text, _: {"document": text}),
    "search": ("/v1/caches/search", lambda text, _: {"query": text}),
    "count": ("/v1/messages/count_tokens", lambda text, _: counted("random-tiny", text)),
    "count of a system text": ("/v1/messages/count_tokens", lambda text, _: counted("random-tiny", "x", system=text)),
    "kept": ("/v1/caches/{id}/kept", lambda text, _: {"document": text}),
}


@pytest.fixture(scope="module")
def mine(attacked: Attacked) -> str:
    with attacked.client("mallory") as client:
        return str(created(client, document="The quay keeper writes in the ledger. " * 20, policy="full")["id"])


@pytest.fixture(scope="module")
def hers(attacked: Attacked) -> str:
    with attacked.client("alice") as client:
        return str(created(client, document="The lamp burns whale oil. " * 20, policy="full")["id"])


def send(client: httpx.Client, name: str, text: str, cache_id: str) -> httpx.Response:
    path, body = ROUTES[name]
    return client.post(path.format(id=cache_id), json=body(text, cache_id))


@pytest.mark.slow
def test_no_text_takes_memory_that_stays(attacked: Attacked, mallory: httpx.Client, mine: str, soak: bool) -> None:
    """100 of 2 MB are 15 s of tokenization each and 170 MB that stay, where they become tokens."""
    (replica,) = attacked.service.replica_pids()
    text = "The quay keeper writes 17 in the ledger. " * (2 * MB // 41)
    for name in ROUTES:
        send(mallory, name, text[: 30 * 1024], mine)  # what a text that may fit takes has been taken
    before, slow = memory_of(replica, "VmRSS"), {}
    with ThreadPoolExecutor(4) as senders:
        for name in ROUTES:
            started = time.perf_counter()
            answers = list(senders.map(lambda _: send(mallory, name, text, mine), range(100 if soak else 4)))  # noqa: B023
            slow[name] = (time.perf_counter() - started) / len(answers)
            assert {answer.status_code for answer in answers} <= {400, 413}, (name, answers[0].text[:300])
        if soak:
            assert send(mallory, "count", "word and " * (60 * MB // 9), mine).status_code in (400, 413)
    grown = memory_of(replica, "VmRSS") - before
    print(f"{grown / MB:.0f} MB", {name: round(seconds, 2) for name, seconds in slow.items()})
    assert grown < KEPT_BYTES


def asked_s(client: httpx.Client, cache_id: str) -> float:
    started = time.perf_counter()
    answer = client.post(f"/v1/caches/{cache_id}/query", json={"prompt": "Which oil?", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - started


HEAVY = [
    pytest.param(name, marks=pytest.mark.faults)
    for name in ("estimate", "kept", "append", "grammar", "listing", "joint")
]


@pytest.mark.parametrize("name", ["count", "search", *HEAVY])
def test_a_question_waits_for_no_other_tenant_s_work(
    mallory: httpx.Client, alice: httpx.Client, mine: str, hers: str, name: str, soak: bool
) -> None:
    """Of texts that fit, as much as may be in flight at once: a question waits for two of them at most. With turns in
    the order of arrival it waits for all that came before."""
    text, many = "The quay keeper writes 17 in the ledger. " * 900, 200 if soak else 40
    numbers, document = itertools.count(), text if name == "kept" else f"{name} " * 90
    other = created(mallory, document=document, policy="full")["id"]

    def attack() -> float:
        started = time.perf_counter()
        if name == "listing":
            mallory.get("/v1/caches?limit=1000")
        elif name == "joint":
            body = {"cache_ids": [mine, other], "prompt": "x", "max_tokens": 1}
            assert mallory.post("/v1/query", json=body).status_code == 200
        elif name == "grammar":
            pattern = f"^[a-z]{{1,50}}{next(numbers)}$"
            schema = {
                "type": "object",
                "properties": {f"p{n}": {"type": "string", "pattern": pattern} for n in range(99)},
            }
            shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            body = {"prompt": "x", "max_tokens": 1, "response_format": shape}
            assert mallory.post(f"/v1/caches/{mine}/query", json=body).status_code == 200
        else:
            said = "quay " * 400 if name == "search" else f"{next(numbers)} {text[:9000]}" if name == "append" else text
            answer = send(mallory, name, said, other if name == "kept" else mine)
            assert answer.status_code in (200, 201), answer.text
        return time.perf_counter() - started

    one, alone = statistics.median(attack() for _ in range(3)), max(asked_s(alice, hers) for _ in range(5))
    with ThreadPoolExecutor(many) as senders:
        attacks = [senders.submit(attack) for _ in range(many)]
        time.sleep(0.05)
        waited = []
        while not all(each.done() for each in attacks):
            waited.append(asked_s(alice, hers))
        assert [each.exception() for each in attacks if each.exception()] == []
    print(f"{name}: alone {alone:.3f}, one {one:.3f}, {len(waited)} asked, longest {max(waited, default=0):.3f} s")
    assert max(waited, default=0) <= alone + 2 * one + NOISE_S
