"""Another tenant's work delays a question by two slots at most, and the row of a batch by seconds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attack.conftest import Attacked
from tests.service.conftest import created

pytestmark = pytest.mark.faults  # they keep all processors busy for some time

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20
PROMPTS, SLOTS = 256, 64
"""The most prompts of one request, and the answers that a replica gives at once by default."""


def ask(client: httpx.Client, cache_id: str, prompt: str | list[str], max_tokens: int) -> tuple[int, float]:
    """The status of an answer, and its seconds."""
    began = time.monotonic()
    body = {"prompt": prompt, "max_tokens": max_tokens}
    answer = client.post(f"/v1/caches/{cache_id}/query", json=body)
    return answer.status_code, time.monotonic() - began


def test_many_prompts_of_one_request_delay_another_tenant_by_two_slots(
    attacked: Attacked, mallory: httpx.Client, alice: httpx.Client, soak: bool
) -> None:
    """A question of 0.04 s took 1.7 s, and some got 429."""
    hers, theirs = (created(client, document=DOCUMENT)["id"] for client in (alice, mallory))
    alone_s = statistics.median(ask(alice, hers, "Who keeps it?", 4)[1] for _ in range(9))
    took: list[float] = []
    ended, answers = threading.Event(), Counter[int]()

    def flood() -> None:
        with attacked.client("mallory") as client:
            while not ended.is_set():
                status, seconds = ask(client, theirs, [f"Which {number}?" for number in range(PROMPTS)], 48)
                answers[status] += 1
                took.append(seconds)

    flooding = [threading.Thread(target=flood) for _ in range(2)]
    for thread in flooding:
        thread.start()
    time.sleep(1)
    beside = [ask(alice, hers, "Who keeps it?", 4) for _ in range(60 if soak else 12)]
    ended.set()
    for thread in flooding:
        thread.join()
    slot_s = statistics.median(took) / (len(flooding) * PROMPTS / SLOTS)
    delays = sorted(seconds - alone_s for _, seconds in beside)
    middle_s, longest_s = statistics.median(delays), delays[-1]
    print(f"alone {alone_s:.3f} s, a slot {slot_s:.3f} s, delay {middle_s:.3f} s, at most {longest_s:.3f} s")
    print(f"another tenant got {Counter(status for status, _ in beside)}, this one {answers}")
    assert {status for status, _ in beside} == {200}
    assert middle_s < 2 * slot_s
    assert longest_s < 4 * slot_s  # the machine does other things, too


LONG = "The quay keeper writes 17 in the ledger of the lamp. " * 400

_NOTHING_S = 0.1
"""A delay that nobody who asks notices."""

SCHEMA = {"type": "object", "properties": {f"p{at}_%N": {"type": "string"} for at in range(60)}}

_ROW = json.dumps({"document": "The harbour master keeps the tide tables. %N"})
_FORM = "".join(
    f"--%B\r\ncontent-disposition: form-data; name={part}\r\n\r\n{value}\r\n"
    for part, value in (("purpose", "batch"), ("file; filename=rows.jsonl", f"{_ROW}\n" * 2000))
)
_FORM = _FORM.replace("%B", "of-a-form") + "--of-a-form--\r\n"

WORK: dict[str, tuple[str, str, Any]] = {
    "kept": ("GET", "/v1/caches/%C/kept", None),
    "kept of a text": ("POST", "/v1/caches/%C/kept", {"document": LONG}),
    "prompt": ("POST", "/v1/caches/%C/prompt", {"prompt": "Who %N?"}),
    "grammar": (
        "POST",
        "/v1/caches/%C/query",
        {
            "prompt": "Who?",
            "max_tokens": 400,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "stop": "{",
        },
    ),
    "prompts": ("POST", "/v1/caches/%C/query", {"prompt": [f"Which {at} %N?" for at in range(256)], "max_tokens": 1}),
    "search": ("POST", "/v1/caches/search", {"query": "Where is the keeper of the lamp %N?"}),
    "count": ("POST", "/v1/messages/count_tokens", {"model": "%M", "messages": [{"role": "user", "content": LONG}]}),
    "estimate": ("POST", "/v1/estimate", {"document": LONG + "%N"}),
    "append": ("POST", "/v1/caches/%C/append", {"document": DOCUMENT + "%N"}),
    "creation": ("POST", "/v1/caches", {"document": DOCUMENT + "%N", "policy": "streaming_llm"}),
    "list": ("GET", "/v1/caches?limit=1000", None),
    "export": ("GET", "/v1/caches/%C/blob?about=true", None),
    "verify": ("POST", "/v1/caches/%C/verify", None),
    "a body of 240 KB": ("POST", "/v1/caches", {"policy_params": {"a": [0] * 80_000}}),
    "batches": ("GET", "/v1/batches?limit=100", None),
    "upload": ("POST", "/v1/files", _FORM),
    "erasure": ("POST", "/v1/erasures", {"labels": {"subject": "%N"}}),
    "erasure of much": ("POST", "/v1/erasures", {"labels": {"fleet": "north"}, "dry_run": True}),
    "mcp": (
        "POST",
        "/mcp",
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "list", "arguments": {}}},
    ),
}
"""Kinds of work: method, path and body of a request. `%C` is a cache of who attacks, `%M` its model, `%N` a number.
"mcp" goes through `kvshelf mcp --http`."""


@pytest.fixture(scope="module")
def shelved(attacked: Attacked) -> str:
    """A cache of mallory's with its source, beside 100 more; its id."""
    with attacked.client("mallory") as client:
        for number in range(100):
            about = {"labels": {"fleet": "north"}, "policy": "streaming_llm"}
            created(client, document=f"Ship {number} is at sea. " * 8, **about)
        found: str = created(client, document=LONG, policy="full", keep_source=True)["id"]
    return found


@pytest.mark.parametrize("kind", WORK)
def test_work_of_one_tenant_delays_anothers_question_by_two_slots(
    attacked: Attacked, shelved: str, mcp_server: tuple[str, int], alice: httpx.Client, kind: str, soak: bool
) -> None:
    """48 lists delayed it by 50, bodies by 170, prompts by 3. A slot is one of them alone, or one question."""
    hers = created(alice, document=DOCUMENT)
    method, path, body = WORK[kind]
    headers = attacked.headers("mallory") | {"accept": "application/json, text/event-stream"}
    if body is _FORM:
        headers["content-type"] = "multipart/form-data; boundary=of-a-form"
    url = mcp_server[0] if kind == "mcp" else attacked.url
    told = {"url": url, "headers": headers, "method": method, "path": path, "body": body}
    told |= {"at_once": 48 if soak else 24, "seconds": 8 if soak else 3}
    sent = json.dumps(told).replace("%C", shelved).replace("%M", hers["model"])
    alone = sorted(ask(alice, hers["id"], "Who keeps it?", 1)[1] for _ in range(15))
    flood = [sys.executable, str(Path(__file__).with_name("flood.py"))]
    with subprocess.Popen(flood, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flooding:
        assert flooding.stdin is not None
        assert flooding.stdout is not None
        flooding.stdin.write(sent)
        flooding.stdin.close()
        assert flooding.stdout.readline() == "begun\n"
        time.sleep(0.3)
        beside, ends_at = list[tuple[int, float]](), time.monotonic() + told["seconds"] - 0.5
        while time.monotonic() < ends_at:
            beside.append(ask(alice, hers["id"], "Who keeps it?", 1))
        ended = json.loads(flooding.stdout.readline())
    slot_s = max(ended["alone_s"], statistics.median(alone))
    delays = sorted(seconds - statistics.median(alone) for _, seconds in beside)
    slots = [
        round(delay / slot_s, 1) for delay in (statistics.median(delays), delays[len(delays) * 9 // 10], delays[-1])
    ]
    print(f"{kind}: a slot {slot_s:.3f} s; median, 9 of 10 and longest of {len(delays)} in slots {slots}; {ended}")
    assert {status for status, _ in beside} == {200}
    # Work of 10 ms, 200 times a second, delays by the share of two processors that four processes have.
    assert slots[0] < 2 or statistics.median(delays) < _NOTHING_S


def begun(client: httpx.Client, rows: list[dict[str, Any]]) -> str:
    content = "\n".join(map(json.dumps, rows)).encode()
    uploaded = client.post("/v1/files", files={"file": ("rows.jsonl", content)}, data={"purpose": "batch"})
    assert uploaded.status_code in (200, 201), uploaded.text
    body = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/caches", "policy": "streaming_llm"}
    batch = client.post("/v1/batches", json=body)
    assert batch.status_code in (200, 201), batch.text
    found: str = batch.json()["id"]
    return found


def test_batches_of_one_tenant_hold_up_no_other(mallory: httpx.Client, alice: httpx.Client, soak: bool) -> None:
    """A single row waited for 71 s behind two batches of another tenant. A slot of a question is one of their rows."""
    hers = created(alice, document=DOCUMENT)["id"]
    alone_s = statistics.median(ask(alice, hers, "Who keeps it?", 1)[1] for _ in range(9))
    began = time.monotonic()
    created(mallory, document="Ship 0 was at sea. " * 400, policy="streaming_llm")
    slot_s = time.monotonic() - began
    many = [
        begun(mallory, [{"document": f"Ship {batch}.{row} is at sea. " * 400} for row in range(400 if soak else 150)])
        for batch in range(3 if soak else 2)
    ]
    while not any(mallory.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"] for batch in many):
        time.sleep(0.1)
    delays = sorted(ask(alice, hers, "Who keeps it?", 1)[1] - alone_s for _ in range(15))
    began = time.monotonic()
    mine = begun(alice, [{"document": "One row. " * 20}])
    seen_s = None
    while (batch := alice.get(f"/v1/batches/{mine}").json())["status"] != "completed":
        if seen_s is None and batch["status"] == "in_progress":
            seen_s = time.monotonic() - began
        assert time.monotonic() - began < 60, batch
        time.sleep(0.05)
    took_s = time.monotonic() - began
    busy = [mallory.get(f"/v1/batches/{batch}").json()["status"] for batch in many]
    for batch_id in many:
        mallory.post(f"/v1/batches/{batch_id}/cancel")
    middle_s = statistics.median(delays)
    print(f"a row alone {slot_s:.2f} s; a question beside rows waits {middle_s:.3f} s, at most {delays[-1]:.3f}")
    print(f"one row took {took_s:.1f} s, seen to begin after {seen_s or took_s:.1f} s, beside {Counter(busy)}")
    assert "in_progress" in busy, "the other tenant's batches were at work all the time"
    assert took_s < 20
    assert middle_s < max(2 * slot_s, _NOTHING_S)
