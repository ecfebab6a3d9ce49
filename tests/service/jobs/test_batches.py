"""/v1/batches: every row accounted for, whatever happens in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from kvshelf import Client
from kvshelf.cli import app
from tests.service.conftest import created, refused
from tests.service.routes.test_files import uploaded
from tests.service.scrape import moving

ENDED = ("completed", "failed", "expired", "cancelled")
OPTIONS: dict[str, Any] = {"policy": "keydiff", "compression_ratio": 0.5, "labels": {"by": "night"}}
LONG_TOKENS = 15_000
MANY_ROWS = 12  # a second each, or two: more than end while a test waits for the first of them


def text(number: int) -> str:
    return f"Lighthouse number {number} is painted white and keeps its lamp behind glass. " * (3 + number % 5)


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def long_rows(count: int, salt: int) -> bytes:
    """Documents that take seconds each, so that there is time to do something meanwhile."""
    rows = (
        {"custom_id": f"long-{n}", "token_ids": [5 + (salt + n * 7 + i * 3) % 600 for i in range(LONG_TOKENS)]}
        for n in range(count)
    )
    return lines(*rows)


def begun(http: httpx.Client, data: bytes, **fields: Any) -> dict[str, Any]:
    body = {"input_file_id": uploaded(http, data)["id"], "endpoint": "/v1/caches"} | fields
    response = http.post("/v1/batches", json=body)
    assert response.status_code == 200, response.text
    batch: dict[str, Any] = response.json()
    assert (batch["object"], batch["status"]) == ("batch", "validating")
    return batch


def awaited(http: httpx.Client, batch_id: str, until: Callable[[dict[str, Any]], bool], limit_s: float = 600) -> Any:
    end = time.monotonic() + limit_s
    while not until(batch := http.get(f"/v1/batches/{batch_id}").json()):
        assert time.monotonic() < end, batch
        time.sleep(0.1)
    return batch


def ended(http: httpx.Client, batch_id: str) -> Any:
    return awaited(http, batch_id, lambda batch: batch["status"] in ENDED)


def rows_of(http: httpx.Client, file_id: str) -> list[dict[str, Any]]:
    content = http.get(f"/v1/files/{file_id}/content").text
    return [json.loads(line) for line in content.splitlines()]


def results(http: httpx.Client, batch: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows with a cache, and those that failed. Both files together must have all that there were."""
    done, errors = rows_of(http, batch["output_file_id"]), rows_of(http, batch["error_file_id"])
    counts = batch["request_counts"]
    failed = [row for row in errors if row["error"]["code"] != f"batch_{batch['status']}"]
    assert (len(done), len(failed)) == (counts["completed"], counts["failed"])
    assert len(done) + len(errors) == counts["total"]
    assert all("error" not in row for row in done)
    assert all("cache_id" not in row for row in failed)
    return done, failed


MIXED = lines(
    *({"custom_id": f"row-{n}", "document": text(n)} for n in range(6)),
    {"custom_id": "openai", "method": "POST", "url": "/v1/caches", "body": {"document": text(7), "policy": "lagkv"}},
    b"no JSON at all",
    {"custom_id": "row-0", "document": "said before"},
    {"custom_id": "colour", "document": "x", "colour": "red"},
    b"",
    {"custom_id": "long", "token_ids": [5] * 16_385},
    b'{"custom_id": "\xff"}',
    {"custom_id": "whole", "document": text(8), "policy": "full"},  # which takes no ratio; the batch's is not for it
)


@pytest.mark.timeout(900)
def test_a_batch_from_upload_to_results_by_openai_s_client(service_url: str, http: httpx.Client) -> None:
    with (
        openai.OpenAI(base_url=f"{service_url}/v1", api_key="anything", max_retries=0) as client,
        Client(service_url) as ours,
        ThreadPoolExecutor(1) as threads,
    ):
        file = client.files.create(file=("night.jsonl", MIXED), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/caches",  # type: ignore[arg-type]  # none of OpenAI's own
            completion_window="24h",
            metadata={"by": "night"},
            extra_body=OPTIONS,
        )
        assert (batch.status, batch.input_file_id, batch.metadata) == ("validating", file.id, {"by": "night"})
        watching = threads.submit(lambda: list(ours.batches.events(batch.id)))
        refused(http.delete(f"/v1/files/{file.id}"), 409, "state_conflict")
        assert ended(http, batch.id)["status"] == "completed"
        found = client.batches.retrieve(batch.id)
        assert batch.id in [each.id for each in client.batches.list(limit=100)]
        assert found.output_file_id
        assert found.error_file_id
        done = [json.loads(line) for line in client.files.content(found.output_file_id).text.splitlines()]
        errors = [json.loads(line) for line in client.files.content(found.error_file_id).text.splitlines()]
        snapshots = watching.result()

    assert found.request_counts is not None
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (14, 8, 6)
    assert found.created_at <= found.in_progress_at <= found.finalizing_at <= found.completed_at  # type: ignore[operator]
    assert found.expires_at == found.created_at + 86400
    assert {row["custom_id"] for row in done} == {*(f"row-{n}" for n in range(6)), "openai", "whole"}
    assert {row["line"]: row["error"]["code"] for row in errors} == {
        8: "invalid_request", 9: "invalid_request", 10: "invalid_request", 11: "invalid_request",
        12: "document_too_long", 13: "invalid_request",
    }  # fmt: skip
    assert next(row for row in errors if row["line"] == 10)["custom_id"] == "colour"

    for row in done:
        assert row.keys() >= {"cache_id", "document_id", "tokens", "bytes", "quality", "attempts", "seconds", "reused"}
        assert (row["attempts"], row["reused"]) == (1, False)
        cache = http.get(f"/v1/caches/{row['cache_id']}").json()
        assert (cache["labels"], cache["tokens"]["document"]) == ({"by": "night"}, row["tokens"]["document"])
    by_id = {row["custom_id"]: row for row in done}
    assert created(http, document=text(3), **OPTIONS)["id"] == by_id["row-3"]["cache_id"]
    assert http.get(f"/v1/caches/{by_id['openai']['cache_id']}").json()["policy"] == "lagkv"

    assert snapshots[-1].model_dump() == ours_of(http, batch.id)
    assert [each.status for each in snapshots if each.status in ENDED] == ["completed"]
    completed = [each.request_counts.completed for each in snapshots]
    assert completed == sorted(completed)
    assert snapshots[-1].progress.tokens == sum(row["tokens"]["document"] for row in done)
    assert sum(share.done for share in snapshots[-1].progress.workers.values()) == 8


def ours_of(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    from kvshelf.api.batches import BatchObject

    return BatchObject.model_validate(http.get(f"/v1/batches/{batch_id}").json()).model_dump()


@pytest.mark.timeout(900)
def test_what_is_on_the_shelf_is_reused_and_nothing_is_prefilled(http: httpx.Client) -> None:
    data = lines(*({"custom_id": f"row-{n}", "document": text(n)} for n in range(6)))
    first = ended(http, begun(http, data, **OPTIONS)["id"])
    with moving(http) as moved:
        again = ended(http, begun(http, data, **OPTIONS)["id"])
    assert (again["status"], again["request_counts"]["reused"]) == ("completed", 6)
    ids = [{row["custom_id"]: row["cache_id"] for row in results(http, batch)[0]} for batch in (first, again)]
    assert ids[0] == ids[1]
    assert all(row["reused"] for row in results(http, again)[0])
    assert moved("kvshelf_batch_rows_total", result="reused") == 6
    assert moved("kvshelf_batch_rows_total", result="new") == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_paused_resumed_cancelled_and_tried_again(http: httpx.Client) -> None:
    """Each time what is done stays done, and in the end every row was compressed once."""
    batch = begun(http, long_rows(MANY_ROWS, salt=1), policy="streaming_llm")
    url = f"/v1/batches/{batch['id']}"
    refused(http.post(f"{url}/retry"), 409, "state_conflict")
    awaited(http, batch["id"], lambda now: now["request_counts"]["completed"] >= 1)

    assert http.post(f"{url}/pause").json()["status"] == "paused"
    paused = awaited(http, batch["id"], lambda now: is_still(http, now))
    assert (paused["status"], paused["progress"]["reason"]) == ("paused", "it was paused")
    assert paused["request_counts"]["completed"] < MANY_ROWS
    assert http.post(f"{url}/pause").json()["paused_at"] == paused["paused_at"]

    assert http.post(f"{url}/resume").json()["status"] == "in_progress"
    more = paused["request_counts"]["completed"] + 1
    awaited(http, batch["id"], lambda now: now["request_counts"]["completed"] >= more)
    at_pause = http.post(f"{url}/pause").json()["request_counts"]["completed"]
    time.sleep(0.7)  # whoever works on it has begun to let it go
    assert http.post(f"{url}/resume").json()["status"] == "in_progress"
    awaited(http, batch["id"], lambda now: now["request_counts"]["completed"] > at_pause)
    asked = time.monotonic()
    assert http.post(f"{url}/cancel").json()["status"] == "cancelling"
    cancelled = ended(http, batch["id"])
    assert time.monotonic() - asked < 60
    assert cancelled["status"] == "cancelled"
    assert cancelled["cancelling_at"] <= cancelled["cancelled_at"]
    done, failed = results(http, cancelled)
    assert more <= len(done) < MANY_ROWS
    assert failed == []
    for refused_now in ("pause", "resume", "cancel"):
        response = http.post(f"{url}/{refused_now}")
        if refused_now == "cancel":
            assert response.json()["status"] == "cancelled"
        else:
            refused(response, 409, "state_conflict")

    assert http.post(f"{url}/retry").json()["status"] == "in_progress"
    completed = ended(http, batch["id"])
    counts = completed["request_counts"]
    assert (completed["status"], counts["total"], counts["completed"], counts["failed"]) == (
        "completed",
        MANY_ROWS,
        MANY_ROWS,
        0,
    )
    assert counts["reused"] <= 3, "at most what was made in the moments in which it was stopped, and not told any more"
    rows, _ = results(http, completed)
    assert {row["custom_id"] for row in rows} == {f"long-{n}" for n in range(MANY_ROWS)}
    assert [row for row in rows if row in done] == done, "what was done before is as it was"
    refused(http.get(f"/v1/files/{cancelled['output_file_id']}"), 404, "file_not_found")


def is_still(http: httpx.Client, batch: dict[str, Any]) -> bool:
    """Whether nothing is done any more: nobody works on it, so its numbers stay as they are."""
    time.sleep(3)
    return bool(http.get(f"/v1/batches/{batch['id']}").json()["request_counts"] == batch["request_counts"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_batch_at_work_leaves_its_place_to_one_of_higher_priority(http: httpx.Client) -> None:
    low = begun(http, long_rows(MANY_ROWS, salt=11), policy="streaming_llm")
    awaited(http, low["id"], lambda now: now["request_counts"]["completed"] >= 1)
    high = begun(http, long_rows(2, salt=211), policy="streaming_llm", priority=5)
    waits = awaited(http, low["id"], lambda now: now["status"] == "paused")
    assert (high["priority"], waits["priority"]) == (5, 0)
    assert waits["progress"]["reason"] == "a batch of higher priority goes first"
    assert ended(http, high["id"])["request_counts"]["completed"] == 2
    before = http.get(f"/v1/batches/{low['id']}").json()["request_counts"]
    assert before == waits["request_counts"], "no row of the lower one was done meanwhile"
    awaited(http, low["id"], lambda now: now["request_counts"]["completed"] > before["completed"])
    http.post(f"/v1/batches/{low['id']}/cancel")
    assert ended(http, low["id"])["request_counts"]["failed"] == 0


@pytest.mark.timeout(900)
def test_a_batch_without_a_success_has_failed_and_says_why(http: httpx.Client) -> None:
    batch = ended(http, begun(http, lines(b"nonsense", {"custom_id": "b", "token_ids": [5] * 16_385}))["id"])
    assert (batch["status"], batch["request_counts"]["failed"]) == ("failed", 2)
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == ("no_success", None)
    done, failed = results(http, batch)
    assert (done, {row["error"]["code"] for row in failed}) == ([], {"invalid_request", "document_too_long"})


@pytest.mark.parametrize(("data", "code"), [(b"", "empty_file"), (b"{}\n" * 201, "too_many_rows")])
def test_an_input_that_cannot_be_worked_on_ends_as_failed_before_any_work(
    http: httpx.Client, data: bytes, code: str
) -> None:
    batch = ended(http, begun(http, data)["id"])
    assert (batch["status"], batch["in_progress_at"]) == ("failed", None)
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["param"]) == (code, "input_file_id")
    assert results(http, batch) == ([], [])
    assert http.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200
    refused(http.post(f"/v1/batches/{batch['id']}/retry"), 404, "file_not_found")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"colour": "red"}, "colour"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "tomorrow"}, "completion_window"),
        ({"metadata": {"a": 3}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 9}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"seconds": 0}}, "output_expires_after.seconds"),
        ({"window": "22:00"}, "window"),
        ({"window": "24:00-06:00"}, "window"),
        ({"window": "06:00-06:00"}, "window"),
        ({"max_gpu_hours": 0}, "max_gpu_hours"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"priority": 11}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"document": "x"}, "document"),
        ({"policy": "magic"}, "policy"),
        ({"policy": "lagkv", "policy_params": {"lags": 3}}, "policy_params.lags"),
        ({"compression_ratio": 1}, "compression_ratio"),
        ({"compression_ratio": 0.5, "budget_tokens": 9}, "budget_tokens"),
        ({"compression_ratio": 0.5, "policy": "full"}, "compression_ratio"),
        ({"codec": "zip"}, "codec"),
        ({"model": "gpt-17"}, "model"),
        ({"ttl_s": -1}, "ttl_s"),
    ],
)
def test_a_malformed_request_is_refused_whole(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file_1", "endpoint": "/v1/caches"} | change
    response = http.post("/v1/batches", json={name: value for name, value in body.items() if value is not None})
    assert refused(response, 400, "invalid_request")["param"] == param


def test_what_is_not_there(http: httpx.Client) -> None:
    body = {"input_file_id": "file_" + "0" * 40, "endpoint": "/v1/caches"}
    refused(http.post("/v1/batches", json=body), 404, "file_not_found")
    for method, path in (("GET", ""), ("GET", "/events"), *(("POST", f"/{verb}") for verb in ("cancel", "retry"))):
        refused(http.request(method, f"/v1/batches/batch_x{path}"), 404, "batch_not_found")
    refused(http.get("/v1/batches", params={"after": "batch_x"}), 400, "invalid_request")


def closed_window() -> str:
    """A time of day that begins in two hours."""
    now = time.time()
    return "-".join(time.strftime("%H:%M", time.localtime(now + hours * 3600)) for hours in (2, 3))


def test_outside_its_window_a_batch_waits_and_says_so(http: httpx.Client) -> None:
    """It takes no place of others meanwhile."""
    window = closed_window()
    batch = begun(http, lines({"document": text(1)}), window=window)
    waiting = awaited(http, batch["id"], lambda now: now["status"] == "paused")
    assert (waiting["request_counts"]["total"], waiting["progress"]["reason"]) == (
        1,
        f"it is outside its window {window}",
    )
    assert http.post(f"/v1/batches/{batch['id']}/resume").json()["status"] == "paused"
    http.post(f"/v1/batches/{batch['id']}/cancel")
    assert ended(http, batch["id"])["status"] == "cancelled"


def test_who_comes_back_to_the_events_hears_only_what_is_new(http: httpx.Client) -> None:
    batch = begun(http, lines({"document": text(1)}), window=closed_window())
    url = f"/v1/batches/{batch['id']}"
    awaited(http, batch["id"], lambda now: now["status"] == "paused")
    (event_id, first), *_ = events(http, url, "", 1)
    assert first["status"] == "paused"
    with ThreadPoolExecutor(1) as threads:
        back = threads.submit(events, http, url, event_id, 9)
        time.sleep(2)
        http.post(f"{url}/cancel")
        heard = back.result()
    assert [event["status"] for _, event in heard][-1] == "cancelled"
    assert "paused" not in [event["status"] for _, event in heard]
    assert [event for _, event in events(http, url, heard[-1][0], 9)] == [heard[-1][1]], "the end is always told"


def events(http: httpx.Client, url: str, seen: str, limit: int) -> list[tuple[str, dict[str, Any]]]:
    """The first events of a batch, with their ids."""
    found: list[tuple[str, dict[str, Any]]] = []
    with http.stream("GET", f"{url}/events", headers={"last-event-id": seen} if seen else {}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("id:"):
                event_id = line.removeprefix("id:").strip()
            elif line.startswith("data: {"):
                found.append((event_id, json.loads(line.removeprefix("data:"))))
            if len(found) == limit:
                break
    return found


def test_pages_of_batches(http: httpx.Client) -> None:
    ids = [begun(http, b"")["id"] for _ in range(3)]
    page = http.get("/v1/batches", params={"limit": 2}).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    rest = http.get("/v1/batches", params={"limit": 1, "after": page["last_id"]}).json()
    assert [each["id"] for each in rest["data"]] == [ids[0]]
    for batch_id in ids:
        ended(http, batch_id)


@pytest.mark.timeout(900)
def test_the_command_line_has_a_service_compress_a_folder(service_url: str, http: httpx.Client, tmp_path: Path) -> None:
    """Rows that cannot be sent are in the output as well, and nothing stays behind on the service. What the command
    writes into the same folder is no input."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(text(number + 20))
    (folder / "junk.bin").write_bytes(b"\xff\xfe\x00junk")
    (folder / "rows.jsonl").write_bytes(lines({"custom_id": "row", "document": text(30), "policy": "lagkv"}, b"no row"))
    files = http.get("/v1/files").json()["data"]
    output, report = folder / "out.jsonl", folder / "report.html"
    report.write_text("of an earlier run")
    command = [sys.executable, "-m", "kvshelf", "batch", str(folder), "--output", str(output), "--url", service_url]
    command += ["--policy", "keydiff", "--compression-ratio", "0.5", "--label", "by=cli", "--report", str(report)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=800)
    assert done.returncode == 1, done.stderr  # some rows failed
    assert "4 documents" in done.stderr
    rows = {(row["file"], row.get("line", 1)): row for row in map(json.loads, output.read_text().splitlines())}
    assert sorted(rows) == [
        ("0.txt", 1),
        ("1.txt", 1),
        ("2.txt", 1),
        ("junk.bin", 1),
        ("rows.jsonl", 1),
        ("rows.jsonl", 2),
    ]
    for name in ("0.txt", "1.txt", "2.txt"):
        cache = http.get(f"/v1/caches/{rows[name, 1]['cache_id']}").json()
        assert (cache["labels"], cache["policy"], rows[name, 1]["custom_id"]) == ({"by": "cli"}, "keydiff", name)
    assert http.get(f"/v1/caches/{rows['rows.jsonl', 1]['cache_id']}").json()["policy"] == "lagkv"
    assert {rows[key]["error"]["code"] for key in (("junk.bin", 1), ("rows.jsonl", 2))} == {"invalid_request"}
    assert report.read_text()
    assert http.get("/v1/files").json()["data"] == files


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--policy", "nope"], "unknown policy 'nope'"),
        (["--policy", "knorm", "--param", "nothing=1"], "nothing"),
        (["--policy", "full", "--level", "0.5"], "takes no levels"),
        (["--model", "nope"], "'nope' is not served here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_the_service_refuses_end_the_command_as_bad_usage_before_any_work(
    service_url: str, http: httpx.Client, tmp_path: Path, options: list[str], wrong: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines({"document": text(1)}))
    before = [http.get(f"/v1/{kind}").json()["data"] for kind in ("files", "batches")]
    given = ["batch", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--url", service_url]
    done = CliRunner().invoke(app, [*given, *options], env={"COLUMNS": "400"})
    assert done.exit_code == 2, done.output
    assert wrong in done.output
    assert not (tmp_path / "out.jsonl").exists()
    assert [http.get(f"/v1/{kind}").json()["data"] for kind in ("files", "batches")] == before, "nothing stays there"
