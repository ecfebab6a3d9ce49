"""The logs of all processes: what happened to each request, under one id, and nothing of what it was about."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.service.conftest import created

if TYPE_CHECKING:
    from tests.conftest import LiveService

Line = dict[str, Any]


def front_end_log(service: LiveService) -> str:
    return service.log.read_text()


def replica_log(service: LiveService) -> str:
    """Everything that the replicas wrote, Ray's own lines included."""
    outputs = {os.readlink(f"/proc/{pid}/fd/{number}") for pid in service.replica_pids() for number in (1, 2)}
    assert outputs
    return "\n".join(Path(output).read_text() for output in outputs)


def lines(text: str, request_id: str) -> list[Line]:
    """The lines about one request."""
    structured = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in structured if line.get("request_id") == request_id]


def the_line(service: LiveService, response: httpx.Response) -> Line:
    """The one line about a request in the front end's log, which is written as its answer ends."""
    end = time.monotonic() + 10
    while not (found := lines(front_end_log(service), response.headers["x-request-id"])):
        assert time.monotonic() < end, "there is no line about this request"
        time.sleep(0.05)
    (line,) = found
    return line


def test_the_parts_of_the_start_have_their_lines_and_their_seconds(service: LiveService) -> None:
    structured = [json.loads(line) for line in front_end_log(service).splitlines() if line.startswith("{")]
    assert structured[0]["event"] == "starting; opening the store"
    parts = re.compile("the store is open|Ray is up|the models are up")
    told = {line["event"]: line["seconds"] for line in structured if parts.match(line["event"])}
    assert list(told) == [
        "the store is open; starting Ray",
        "Ray is up; loading the models",
        "the models are up",
    ]
    assert all(0 <= seconds < 300 for seconds in told.values())
    assert told["Ray is up; loading the models"] > 0.5, "Ray starts four processes"


def test_a_creation_has_its_line_here_and_in_the_replica(http: httpx.Client, service: LiveService) -> None:
    response = http.post("/v1/caches", json={"document": "Oil is brought on Thursdays. " * 15})
    cache = response.json()
    line = the_line(service, response)
    assert line["event"] == "request"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/caches", 201)
    assert 0 < line["seconds"] < 60
    assert (line["cache_id"], line["tokens"], line["existing"]) == (cache["id"], cache["tokens"]["document"], False)
    (there,) = lines(replica_log(service), response.headers["x-request-id"])
    assert (there["event"], there["cache_id"]) == ("compressed", cache["id"])
    assert (there["tokens"], there["kept"]) == (cache["tokens"]["document"], cache["tokens"]["kept"])
    assert there["prefill_s"] == pytest.approx(cache["timings"]["prefill_s"], abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_query_has_its_line_here_and_in_the_replica(http: httpx.Client, service: LiveService, stream: bool) -> None:
    cache = created(http, document="The brass is polished weekly. " * 15)
    body = {"prompt": "What is polished?", "max_tokens": 3, "stream": stream}
    response = http.post(f"/v1/caches/{cache['id']}/query", json=body)
    line = the_line(service, response)
    assert (line["route"], line["status"]) == ("/v1/caches/{cache_id}/query", 200)
    assert (line["cache_id"], line["cache_read_tokens"]) == (cache["id"], cache["tokens"]["document"])
    assert line["completion_tokens"] == 3
    (there,) = lines(replica_log(service), response.headers["x-request-id"])
    assert (there["event"], there["cache_id"], there["completion_tokens"]) == ("answered", cache["id"], 3)
    assert there["prefill_tokens"] == line["prefill_tokens"] > 0


def test_a_request_that_is_refused_says_why_by_its_code(http: httpx.Client, service: LiveService) -> None:
    unknown = "kvs_" + "1" * 40
    line = the_line(service, http.post(f"/v1/caches/{unknown}/query", json={"prompt": "?"}))
    assert (line["status"], line["code"], line["cache_id"]) == (404, "cache_not_found", unknown)
    line = the_line(service, http.get("/v1/nowhere"))
    assert (line["status"], line["route"]) == (404, "unmatched")
    assert "nowhere" not in str(line)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/caches/kvsk_{}",
        "/v1/caches/zanzibar{}/query",
        "/v1/requests/{}",
        "/v1/{}",
        "/{}/v1/caches",
        "/v1/batches/{}",
    ],
)
def test_of_a_path_only_ids_are_logged(http: httpx.Client, service: LiveService, path: str) -> None:
    """Who mistakes a path may have put a key or a text there."""
    response = http.get(path.format("0123456789abcdef_" + "5ec4e7" * 10))
    line = the_line(service, response)
    assert response.status_code in (404, 405)
    assert "5ec4e7" not in str(line)
    assert "zanzibar" not in str(line)


def test_a_creation_in_the_background_is_logged_under_the_id_of_its_request(
    http: httpx.Client, service: LiveService
) -> None:
    body = {"document": "The wick is trimmed at dusk. " * 15}
    response = http.post("/v1/caches", json=body, headers={"prefer": "respond-async"})
    request_id = response.json()["id"]
    assert the_line(service, response)["request"] == request_id
    waited = http.get(f"/v1/requests/{request_id}", params={"wait_s": 60})
    done = waited.json()
    assert the_line(service, waited)["request"] == request_id
    (there,) = lines(replica_log(service), request_id)
    assert (there["event"], there["cache_id"]) == ("compressed", done["cache_id"])
    end = time.monotonic() + 10
    while not (found := lines(front_end_log(service), request_id)):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert [(line["event"], line["cache_ids"]) for line in found] == [("created", done["cache_ids"])]


def test_no_log_holds_a_text_a_key_or_an_answer(http: httpx.Client, service: LiveService) -> None:
    """Whatever is sent, also where it is refused, and whatever is answered."""
    headers = {"authorization": "Bearer kvsk_zanzibar_1", "x-api-key": "zanzibar-2", "cookie": "zanzibar=3"}
    document = "The password is zanzibar-4. " * 15
    send = [
        {"document": document, "keep_source": True, "name": "zanzibar-5", "labels": {"zanzibar6": "zanzibar-7"}},
        {"document": document, "policy": "zanzibar-8"},
        {"document": document, "zanzibar-9": 1},
        {"messages": [{"role": "user", "content": document}, {"role": "zanzibar-10", "content": "x"}]},
        {"document": "zanzibar-11 " * 20_000},
        {"document": document, "expected_questions": ["zanzibar-12?"]},
    ]
    responses = [http.post("/v1/caches", json=body, headers=headers) for body in send]
    assert {response.status_code for response in responses} >= {201, 400, 413}
    cache_id = responses[0].json()["id"]
    query = f"/v1/caches/{cache_id}/query"
    answers = []
    for body in ({"prompt": "zanzibar-13?"}, {"messages": [{"role": "user", "content": "zanzibar-14"}]}):
        answered = http.post(query, json=body | {"max_tokens": 40, "stop": ["zanzibar-15"]}, headers=headers)
        answers.append(answered.json()["text"])
    http.post(query, json={"prompt": "zanzibar-16", "stream": True, "max_tokens": 5})
    http.post(query, content=b'{"prompt": "zanzibar-17', headers={"content-type": "application/json"})
    http.post(
        "/v1/chat/completions", json={"cache_id": cache_id, "messages": [{"role": "user", "content": "zanzibar"}]}
    )
    last = http.get("/v1/caches", params={"label.zanzibar6": "zanzibar-18", "api_key": "zanzibar-19"})
    the_line(service, last)
    logged = front_end_log(service) + replica_log(service)
    assert cache_id in logged
    assert "zanzibar" not in logged.lower()
    for answer in answers:
        assert len(answer) > 20
        assert answer not in logged
        assert json.dumps(answer)[1:-1] not in logged


STEPS = """
import sys
import structlog
from kvshelf.service.observe import logs

written = []

class Steps:
    def write(self, text): written.append(text)
    def flush(self): pass
    def isatty(self): return False

sys.stderr = Steps()
logs.configure("info")
structlog.get_logger("kvshelf").info("created", cache_id="kvs")
print(*written, sep="|", end="")
"""


def test_a_line_is_written_in_one_step() -> None:
    """Else lines of other threads, which write to the same stream, come between its text and its end."""
    ran = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    (line,) = ran.stdout.split("|")
    assert line.endswith("\n")
    assert json.loads(line)["event"] == "created"
