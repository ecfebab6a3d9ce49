"""What the clients send about files and batches, and how they follow one over broken connections. The real service is
asked in tests/service/jobs/test_batches.py."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvshelf import errors
from kvshelf.client import Retries
from kvshelf.client._stream import BatchReader
from tests.client.test_exchange import call  # noqa: F401 - a fixture

FILE = {"id": "file_1", "object": "file", "bytes": 4, "created_at": 1, "filename": "rows.jsonl", "purpose": "batch"}
BATCH = {
    "id": "batch_1",
    "object": "batch",
    "endpoint": "/v1/caches",
    "input_file_id": "file_1",
    "completion_window": "24h",
    "status": "in_progress",
    "created_at": 1,
}
Call = Callable[..., Any]


class Service:
    """Answers one after the other; what it was asked stands in `requests`, read to its end."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def bodies(self) -> list[bytes]:
        return [request.content for request in self.requests]


@pytest.mark.parametrize("kind", ["path", "bytes", "named", "open"])
def test_whatever_a_file_is_its_content_and_name_are_sent(call: Call, tmp_path: Path, kind: str) -> None:  # noqa: F811
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"ROWS")
    given: Any = {"path": path, "bytes": b"ROWS", "named": ("rows.jsonl", b"ROWS"), "open": path.open("rb")}[kind]
    service = Service(httpx.Response(200, json=FILE))
    found = call(service, lambda c: c.files.create(file=given, expires_after={"seconds": 60}))
    assert found.id == "file_1"
    (body,) = service.bodies
    name = b"input.jsonl" if kind == "bytes" else b"rows.jsonl"
    assert b'name="file"; filename="' + name + b'"' in body
    for part in (b"ROWS", b'name="purpose"\r\n\r\nbatch', b'name="expires_after[seconds]"\r\n\r\n60'):
        assert part in body


def test_an_upload_is_sent_whole_again_where_the_service_was_busy(call: Call) -> None:  # noqa: F811
    busy = httpx.Response(503, json={"error": {"message": "x", "type": "x", "param": None, "code": "no_worker"}})
    service = Service(busy, httpx.Response(200, json=FILE))
    call(service, lambda c: c.files.create(file=("r", b"ROWS" * 1000)))
    assert all(body.count(b"ROWS") == 1000 for body in service.bodies)
    assert len(service.bodies) == 2


def test_what_may_have_been_done_is_not_repeated(call: Call) -> None:  # noqa: F811
    for use in (
        lambda c: c.files.create(file=b"x"),
        lambda c: c.batches.create(input_file_id="file_1"),
        lambda c: c.batches.retry("batch_1"),
        lambda c: c.files.delete("file_1"),
    ):
        service = Service(httpx.ReadError("reset"))
        with pytest.raises(errors.ConnectionFailed):
            call(service, use)
        assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda c: c.files.create(file=b"x", purpose="fine-tune"), "purpose"),
        (lambda c: c.files.create(file=b"x", expires_after={"seconds": 0}), "expires_after.seconds"),
        (lambda c: c.files.create(file="/nothing/here.jsonl"), "file"),
        (lambda c: c.files.retrieve(""), "id"),
        (lambda c: c.batches.create(input_file_id="file_1", compression_ratio=2), "compression_ratio"),
        (lambda c: c.batches.create(input_file_id="file_1", completion_window="soon"), "completion_window"),
        (lambda c: c.batches.cancel(""), "id"),
        (lambda c: c.batches.list(limit=0), "limit"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_sent(call: Call, use: Any, error: str) -> None:  # noqa: F811
    service = Service()
    with pytest.raises(errors.InvalidRequest) as caught:
        call(service, use)
    assert caught.value.param == error
    assert service.requests == []


def test_a_batch_is_asked_for_with_what_was_given_only(call: Call) -> None:  # noqa: F811
    service = Service(httpx.Response(200, json=BATCH))
    fields = {"metadata": {"a": "b"}, "policy": "lagkv", "window": None, "labels": {"k": "v"}}
    assert call(service, lambda c: c.batches.create(input_file_id="file_1", **fields)).status == "in_progress"
    assert json.loads(service.bodies[0]) == {
        "input_file_id": "file_1",
        "endpoint": "/v1/caches",
        "metadata": {"a": "b"},
        "policy": "lagkv",
        "labels": {"k": "v"},
    }


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume", "retry"])
def test_verbs(call: Call, verb: str) -> None:  # noqa: F811
    service = Service(httpx.Response(200, json=BATCH))
    assert call(service, lambda c: getattr(c.batches, verb)("batch_1")).id == "batch_1"
    assert (service.requests[0].method, service.requests[0].url.path) == ("POST", f"/v1/batches/batch_1/{verb}")


def test_lists_are_fetched_page_by_page(call: Call) -> None:  # noqa: F811
    for group, one in (("files", FILE), ("batches", BATCH)):
        first = {"data": [one | {"id": "a"}], "has_more": True, "last_id": "a"}
        rest = {"data": [one | {"id": "b"}], "has_more": False, "last_id": "b"}
        service = Service(httpx.Response(200, json=first), httpx.Response(200, json=rest))
        found = call(service, lambda c, group=group: getattr(c, group).list(limit=1))
        assert [each.id for each in found] == ["a", "b"]
        assert service.requests[1].url.params["after"] == "a"


def stream(*events: str) -> httpx.Response:
    return httpx.Response(200, content="".join(events).encode(), headers={"content-type": "text/event-stream"})


def event(number: int, status: str) -> str:
    return f"id: {number}-{status}\ndata: {json.dumps(BATCH | {'status': status})}\n\n"


def test_events_go_on_where_a_connection_broke(call: Call) -> None:  # noqa: F811
    service = Service(
        stream(event(1, "validating"), ":\n\n", event(2, "in_progress")),
        httpx.ConnectError("refused"),
        stream(event(7, "completed"), "data: [DONE]\n\n"),
    )
    found = call(service, lambda c: c.batches.events("batch_1"))
    assert [each.status for each in found] == ["validating", "in_progress", "completed"]
    assert [request.headers.get("last-event-id") for request in service.requests] == [None, *["2-in_progress"] * 2]


def test_a_stream_that_breaks_at_once_is_opened_again_after_longer_and_longer_pauses(call: Call) -> None:  # noqa: F811
    arrivals: list[float] = []
    service = Service(*[stream()] * 4, stream(event(1, "completed")))

    def handler(request: httpx.Request) -> httpx.Response:
        arrivals.append(time.monotonic())
        return service(request)

    call(handler, lambda c: c.batches.events("batch_1"), retries=Retries(backoff_s=0.04, max_backoff_s=0.1))
    pauses = [later - earlier for earlier, later in pairwise(arrivals)]
    # A random part up to a quarter of each pause is taken off.
    assert [pause >= 0.75 * planned for pause, planned in zip(pauses, (0.04, 0.08, 0.1, 0.1), strict=True)] == [
        True
    ] * 4


def test_an_event_shortens_the_next_pause_again() -> None:
    reader = BatchReader(Retries(backoff_s=1.0, max_backoff_s=8.0))
    for longest in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert 0.75 * longest <= reader.pause_after_break() <= longest
    for line in event(1, "in_progress").splitlines():
        reader.feed(line)
    assert 0.75 <= reader.pause_after_break() <= 1.0


def test_an_error_in_the_events_is_raised(call: Call) -> None:  # noqa: F811
    gone = {"error": {"message": "away", "type": "x", "param": None, "code": "store_unavailable"}}
    service = Service(stream(event(1, "in_progress"), f"data: {json.dumps(gone)}\n\n"))
    with pytest.raises(errors.StoreUnavailable, match="away"):
        call(service, lambda c: c.batches.events("batch_1"))


def test_what_is_no_event_is_said_to_be_none(call: Call) -> None:  # noqa: F811
    for text in ("data: nonsense\n\n", 'data: {"object": "batch"}\n\n', "data: 3\n\n"):
        with pytest.raises(errors.ConnectionFailed, match="no event of kvshelf"):
            call(Service(stream(text)), lambda c: c.batches.events("batch_1"))


def test_an_upload_closes_the_file_that_it_opened_and_no_other(call: Call, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"ROWS")
    with warnings.catch_warnings(), path.open("rb") as given:
        warnings.simplefilter("error", ResourceWarning)
        for file in (path, given):
            call(Service(httpx.Response(200, json=FILE)), lambda c, file=file: c.files.create(file=file))
        gc.collect()
        assert not given.closed
