"""A corpus on its way to a service and back. The real service is asked in tests/service/jobs/test_batches.py."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvshelf.client import Client
from kvshelf.corpus.input.files import FileCorpus
from kvshelf.corpus.input.rows import parse_jsonl
from kvshelf.corpus.row import Row, RowError
from kvshelf.corpus.run import remote
from kvshelf.corpus.run.progress import INTERRUPTED, RunState
from kvshelf.corpus.run.remote import run_at, uploaded_rows
from tests.corpus.hostile import shards
from tests.corpus.results import failure, success

FILE = {"id": "file_input", "object": "file", "bytes": 4, "created_at": 1, "filename": "c.jsonl", "purpose": "batch"}
BATCH = {
    "id": "batch_1",
    "endpoint": "/v1/caches",
    "input_file_id": "file_input",
    "output_file_id": "file_output",
    "error_file_id": "file_error",
    "completion_window": "24h",
    "status": "completed",
    "created_at": 1,
}


def sent(lines: list[Any]) -> tuple[list[Row], bytes]:
    upload = io.BytesIO()
    return list(uploaded_rows(shards(lines), upload)), upload.getvalue()


def test_a_line_that_the_service_would_not_read_is_an_error_row_and_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A document within the limit may exceed it as a line of JSON."""
    document = {"document": 'as "JSON"\n' * 50}
    _, whole = sent([document])
    limit = len(whole) - 1  # without its end
    monkeypatch.setattr(remote, "MAX_DOCUMENT_BYTES", limit)
    rows, upload = sent([document, {"document": document["document"] + "."}, {"document": "short"}])
    assert [row.error and row.error.code for row in rows] == [None, "body_too_large", None]
    assert f"{limit + 1} bytes" in (rows[1].error.message if rows[1].error else "")
    read = list(parse_jsonl(io.BytesIO(upload), "c.jsonl", {}, max_line_bytes=limit))
    assert [(row.custom_id, row.error) for row in read] == [("0", None), ("2", None)]


def test_a_null_of_a_row_keeps_the_batch_s_default_away_from_it_at_the_service_too(tmp_path: Path) -> None:
    defaults = {"ttl_s": 60.0, "labels": {"by": "cli"}, "compression_ratio": 0.5}
    lines = [{"document": "x", "ttl_s": None}, {"document": "y", "budget_tokens": 8, "labels": {"of": "me"}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    upload = io.BytesIO()
    list(uploaded_rows(FileCorpus(str(tmp_path), defaults).shards(), upload))
    at_service = parse_jsonl(io.BytesIO(upload.getvalue()), "c.jsonl", defaults)
    specs = [row.spec for row in at_service if row.spec is not None]
    assert [(spec.ttl_s, spec.compression_ratio, spec.labels) for spec in specs] == [
        (None, 0.5, {"by": "cli"}),
        (60.0, None, {"by": "cli", "of": "me"}),
    ]


def test_ctrl_c_cancels_the_batch_and_is_the_reason_of_its_end() -> None:
    calls: list[str] = []

    def service(request: httpx.Request) -> httpx.Response:
        calls.append(f"{request.method} {request.url.path}")
        running, cancelled = BATCH | {"status": "in_progress"}, BATCH | {"status": "cancelled"}
        if request.url.path.endswith("/events"):
            return httpx.Response(200, content=f"id: 1\ndata: {json.dumps(running)}\n\n")
        if request.url.path.endswith("/cancel"):
            return httpx.Response(200, json=cancelled)
        if request.method == "DELETE":
            return httpx.Response(200, json={"id": "file_input", "object": "file", "deleted": True})
        if request.url.path.endswith("/content"):
            return httpx.Response(200, content=b"")
        return httpx.Response(200, json=FILE if "files" in request.url.path else running)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with Client("http://service.test:1", transport=httpx.MockTransport(service)) as client:
        summary, results = run_at(client, shards([{"document": "x"}]), {}, "rows.jsonl", interrupt)
    assert (summary.state, summary.reason, results) == (RunState.CANCELLED, INTERRUPTED, [])
    assert "POST /v1/batches/batch_1/cancel" in calls


def test_every_result_that_the_service_has_is_brought_whatever_one_of_them_is() -> None:
    """The service could not read the second line, so its result has no custom id; one result matches no row; the last
    row was left undone, which is no result."""
    lines = [{"custom_id": "a", "document": "x"}, b"no json", {"custom_id": "c", "document": "y"}]
    lines += [{"custom_id": "d", "document": "z"}, {"custom_id": "e", "document": "u"}]
    output = [success(1, custom_id="0"), success(9, custom_id="77"), success(3, custom_id="3")]
    undone = failure(5, custom_id="4", error=RowError("batch_cancelled", "too soon"))
    files = {"file_output": output, "file_error": [failure(2, custom_id=None), undone], "file_input": []}

    def service(request: httpx.Request) -> httpx.Response:
        _, _, kind, *rest = request.url.path.split("/")
        if request.method == "DELETE":
            del files[rest[0]]
            return httpx.Response(200, json={"id": rest[0], "object": "file", "deleted": True})
        if rest:
            texts = [json.dumps(result.output(file=False)).encode() for result in files[rest[0]]]
            return httpx.Response(200, content=b"\n".join(texts))
        return httpx.Response(200, json=FILE if kind == "files" else BATCH)

    with Client("http://service.test:1", transport=httpx.MockTransport(service)) as client:
        summary, results = run_at(client, shards(lines), {}, "rows.jsonl", lambda _: None)
    assert summary.state is RunState.COMPLETED
    assert {(result.line, result.custom_id): result.error and result.error.code for result in results} == {
        (1, "a"): None,
        (2, None): "invalid_request",
        (3, "c"): "worker_crashed",
        (4, "d"): None,
    }
    assert files == {}, "nothing is left there"
