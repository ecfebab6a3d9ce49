"""A service with rules: times, lengths and quotas are kept, quality is measured only where it is asked for, caches are
sealed, keys are rotated, and no secret is shown."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kvshelf.cli import app
from tests.conftest import save_random_model
from tests.service.conftest import await_log, created, refused
from tests.service.scrape import moving

if TYPE_CHECKING:
    from tests.conftest import LiveService

Start = Callable[..., AbstractContextManager["LiveService"]]

LONGEST = 16_000
RULES = {"default_ttl_s": 1000, "max_ttl_s": 5000, "tenant_max_caches": 3}
RULES |= {"max_document_tokens": LONGEST, "quality_probe": False}
SEALED = b"KVSEALED"

POISON = 3408
"""The last token of the vocabulary, a name. The model of this service gives no numbers for a document that has it."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ruled")


def write_keys(home: Path, keys: list[str]) -> Path:
    path = home / "keys"
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    """A random model, one of whose weights is NaN: one number in the embedding of `POISON`."""
    folder = save_random_model(home / "random-poisoned")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def ruled(start_service: Start, home: Path, model: Path) -> Iterator[LiveService]:
    keys = write_keys(home, [secrets.token_hex(32)])
    store = f"disk://{home}/shelf?max=4MB"
    settings = RULES | {"store": store, "encryption_key_file": keys, "sweep_interval_s": 1}
    settings |= {"tenant_promised_bytes": 3_800_000}
    settings |= {"warm": "heat=hot", "warm_interval_s": 0.5}
    with start_service(home, model, **settings) as running:
        yield running


@pytest.fixture
def rules(ruled: LiveService) -> Iterator[httpx.Client]:
    """A client of that service, whose shelf is empty before and after."""
    with httpx.Client(base_url=ruled.url, timeout=120) as client:
        empty(client)
        yield client
        empty(client)


def empty(client: httpx.Client) -> None:
    """Delete all caches, those too that work under way puts meanwhile, and wait for a sweep of those that have expired,
    which no list shows: one that is left fills the quota of the next test."""
    ends_at = time.monotonic() + 60
    while client.get("/v1/usage").raise_for_status().json()["stored"][0]["caches"]:
        left = client.get("/v1/caches").raise_for_status().json()["data"]
        assert time.monotonic() < ends_at, left
        for cache in left:
            client.delete(f"/v1/caches/{cache['id']}")
        if not left:
            time.sleep(0.1)


def document(number: int) -> dict[str, Any]:
    return {"document": f"Rule number {number} of the house is not to be spoken of. " * 9}


def long_document(number: int) -> dict[str, Any]:
    """One with enough cues for a bound."""
    return {"document": " ".join(f"Rule {number} of house {at} is not to be spoken of." for at in range(70))}


def test_caches_without_an_expiry_get_the_default_and_none_is_kept_for_longer(rules: httpx.Client) -> None:
    cache = created(rules, **document(1))
    assert cache["expires_at"] == pytest.approx(cache["created_at"] + 1000, abs=30)
    for body in ({"ttl_s": 6000}, {"expires_at": time.time() + 6000}):
        (param,) = body
        assert refused(rules.post("/v1/caches", json=document(2) | body), 400, "invalid_request")["param"] == param
        asked = rules.post("/v1/caches", json=document(2) | body, headers={"prefer": "respond-async"})
        assert refused(asked, 400, "invalid_request")["param"] == param
        change = rules.patch(f"/v1/caches/{cache['id']}", json=body)
        assert refused(change, 400, "invalid_request")["param"] == param
    refused(rules.patch(f"/v1/caches/{cache['id']}", json={"ttl_s": None}), 400, "invalid_request")
    longer = rules.patch(f"/v1/caches/{cache['id']}", json={"ttl_s": 4000}).json()
    assert created(rules, **document(1))["expires_at"] == longer["expires_at"]  # never shortened by the default


def test_a_used_up_quota_is_said_before_any_work(rules: httpx.Client) -> None:
    later = {"prefer": "respond-async"}
    accepted = rules.post("/v1/caches", json=document(0), headers=later).json()
    caches = [created(rules, **document(n)) for n in range(3)]
    assert rules.get(f"/v1/requests/{accepted['id']}", params={"wait_s": 60}).json()["state"] == "done"
    blob = rules.get(f"/v1/caches/{caches[0]['id']}/blob").content
    long = {"token_ids": [5 + n % 500 for n in range(16_000)], "policy": "streaming_llm"}
    started = time.monotonic()
    for headers in ({}, later):
        error = refused(rules.post("/v1/caches", json=long, headers=headers), 429, "quota_exceeded")
        assert "3" in error["message"]
    assert time.monotonic() - started < 1  # its prefill takes several
    assert created(rules, **document(1))["existing"]  # what is there costs nothing
    again = rules.post("/v1/caches", json=document(0), headers=later)
    assert (again.status_code, again.json()["id"]) == (202, accepted["id"])

    rules.delete(f"/v1/caches/{caches[0]['id']}")
    created(rules, **document(3))
    headers = {"content-type": "application/octet-stream"}
    refused(rules.post("/v1/caches/import", content=blob, headers=headers), 429, "quota_exceeded")
    rules.delete(f"/v1/caches/{caches[1]['id']}")
    assert rules.post("/v1/caches/import", content=blob, headers=headers).status_code == 201


def test_a_document_that_is_too_long_is_refused_before_any_work(rules: httpx.Client) -> None:
    assert rules.get("/v1/limits").json()["max_document_tokens"] == LONGEST
    long = {"token_ids": [5] * (LONGEST + 1), "policy": "streaming_llm"}
    started = time.monotonic()
    errors = [refused(rules.post(path, json=long), 413, "document_too_long") for path in ("/v1/caches", "/v1/estimate")]
    assert time.monotonic() - started < 2
    accepted = rules.post("/v1/caches", json=long, headers={"prefer": "respond-async"}).json()
    ended = rules.get(f"/v1/requests/{accepted['id']}", params={"wait_s": 60}).json()
    assert (ended["state"], ended["attempts"]) == ("failed", 1)
    for error in (*errors, ended["error"]):
        assert "16001 tokens" in error["message"]
        assert "16000 (max_document_tokens)" in error["message"]


def test_without_the_probe_quality_is_measured_only_where_it_is_asked_for(
    rules: httpx.Client, ruled: LiveService
) -> None:
    body = long_document(7)
    cache = created(rules, **body, compression_ratio=0.75)
    levels = rules.post("/v1/caches", json={**body, "levels": [0.5, 0.75]}).json()["data"]
    listed = rules.get("/v1/caches").json()["data"]
    shown = rules.get(f"/v1/caches/{cache['id']}").json()
    assert [one["quality"] for one in (cache, shown, *levels, *listed)] == [None] * 6
    table = CliRunner().invoke(app, ["ls", "--url", ruled.url], env={"COLUMNS": "200"}).stdout
    row = next(line for line in table.splitlines() if line.startswith(cache["id"][:12]))
    assert " - " in row
    measured = created(rules, **long_document(8), compression_ratio=0.75, quality="full")
    assert (measured["quality"]["cues"], measured["quality"]["agreement"]) == (0, None)
    rules.delete(f"/v1/caches/{measured['id']}")  # of the quota's three
    fallen = rules.post("/v1/caches", json={**body, "compression_ratio": 0.95, "min_quality": 0.5})
    assert "decides none" in refused(fallen, 422, "policy_unsupported")["message"]  # the model is random


@pytest.mark.parametrize(("policy", "param"), [("keydiff", "policy"), ("streaming_llm", "model")])
def test_a_document_for_which_the_model_gives_no_numbers_is_refused_by_name(
    rules: httpx.Client, policy: str, param: str
) -> None:
    """By the scores where there are any, otherwise when its quality is measured."""
    body = {"token_ids": [*range(5, 205), POISON, *range(205, 300)], "policy": policy, "min_quality": 0.0}
    error = refused(rules.post("/v1/caches", json=body), 422, "policy_unsupported")
    assert error["param"] == param
    assert "bfloat16" in error["message"]
    assert rules.get("/v1/caches").json()["data"] == []


def test_an_expired_cache_no_longer_counts(rules: httpx.Client) -> None:
    for n in range(3):
        created(rules, **document(n), ttl_s=0.5)
    time.sleep(0.6)
    assert not created(rules, **document(9))["existing"]


def test_room_is_made_by_evicting_what_is_not_pinned(rules: httpx.Client) -> None:
    """512 bytes for each token in a budget of 4 MB."""
    pinned, other = (created(rules, token_ids=[n] * 1000, policy="full")["id"] for n in (5, 6))
    rules.patch(f"/v1/caches/{pinned}", json={"pinned": True})
    large = created(rules, token_ids=[7] * 6200, policy="full")["id"]
    assert rules.get(f"/v1/caches/{pinned}").json()["pinned"]
    gone = (rules.get(f"/v1/caches/{other}"), rules.post(f"/v1/caches/{other}/query", json={"prompt": "?"}))
    for response in gone:
        error = refused(response, 410, "cache_expired")
        assert (error["miss_reason"], error["details"]["reason"]) == ("evicted", "evicted")
    rules.patch(f"/v1/caches/{large}", json={"pinned": True})
    refused(rules.post("/v1/caches", json={"token_ids": [6] * 1000, "policy": "full"}), 507, "storage_full")
    rules.delete(f"/v1/caches/{large}")
    assert created(rules, token_ids=[6] * 1000, policy="full")["id"] == other


def test_a_promise_beyond_the_budget_is_refused_and_tells_what_is_free(rules: httpx.Client) -> None:
    soon = time.time() + 900
    large = created(rules, token_ids=[7] * 6200, policy="full", guaranteed_until=soon)
    body = {"token_ids": [6] * 1400, "policy": "full", "guaranteed_until": soon}
    error = refused(rules.post("/v1/caches", json=body), 429, "quota_exceeded")
    assert error["param"] == "guaranteed_until"
    stored = large["bytes"]["stored"]
    assert " of 3800000 bytes are promised to stay by this tenant (tenant_promised_bytes), " in error["message"]
    free = int(error["message"].split("(tenant_promised_bytes), ")[1].split(" ")[0])
    assert 0 <= 3_800_000 - stored - free < 5000, "sealed it takes a little more"
    plain = created(rules, **body | {"guaranteed_until": None})
    for change in ({"pinned": True}, {"guaranteed_until": soon}):
        refused(rules.patch(f"/v1/caches/{plain['id']}", json=change), 429, "quota_exceeded")
    later = {"guaranteed_until": time.time() + 2000}
    error = refused(rules.post("/v1/caches", json=document(1) | later), 400, "invalid_request")
    assert error["param"] == "guaranteed_until", "caches live for 1000 s here, if nothing else is said"
    assert rules.patch(f"/v1/caches/{plain['id']}", json={"guaranteed_until": None}).status_code == 200
    rules.delete(f"/v1/caches/{large['id']}")
    assert rules.patch(f"/v1/caches/{plain['id']}", json={"pinned": True}).status_code == 200


def test_caches_with_the_labels_of_the_setting_are_warm_before_their_questions(
    rules: httpx.Client, ruled: LiveService
) -> None:
    cold, hot = (created(rules, **document(n), labels={"heat": heat}) for n, heat in ((1, "none"), (2, "hot")))
    await_log(ruled, "caches are warm")
    with moving(rules) as moved:
        for cache in (hot, cold):
            assert rules.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "?"}).status_code == 200
    hits = {place: moved("kvshelf_cache_hits_total", read_from=place) for place in ("memory", "home")}
    assert hits == {"memory": 1, "home": 1}


def test_blobs_and_sources_are_sealed_where_they_lie(rules: httpx.Client, ruled: LiveService) -> None:
    cache = created(rules, **document(1), keep_source=True)
    files = list((ruled.home / "shelf" / "blobs").iterdir())
    of_cache = [file for file in files if file.name.startswith(cache["id"].removeprefix("kvs_"))]
    assert len(files) > len(of_cache) == 1, "the source lies apart from its cache"
    assert {file.read_bytes()[:8] for file in files} == {SEALED}
    assert b"Rule number" not in b"".join(file.read_bytes() for file in files)
    blob = rules.get(f"/v1/caches/{cache['id']}/blob").content
    assert len(blob) == cache["bytes"]["stored"]
    assert blob[:8] != SEALED
    answer = rules.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "Which rule?", "max_tokens": 2})
    assert answer.json()["usage"]["cache_read_tokens"] == cache["tokens"]["document"]
    assert rules.post(f"/v1/caches/{cache['id']}/verify").json()["ok"]


def doctor(home: Path, *options: str) -> str:
    arguments = ["doctor", "--store", f"disk://{home}/shelf", "--encryption-key-file", str(home / "keys"), *options]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_restart_finds_everything_and_keys_are_rotated(rules: httpx.Client, ruled: LiveService) -> None:
    """The last test of this file. Two lives of the service, with the old key and with the new one before it; then the
    new one is enough."""
    cache = created(rules, **document(1), keep_source=True)
    (old,), new = (ruled.home / "keys").read_text().split(), secrets.token_hex(32)
    write_keys(ruled.home, [new, old])
    ruled.process.send_signal(signal.SIGHUP)
    await_log(ruled, '"event": "restarted"')
    assert rules.post(f"/v1/caches/{cache['id']}/verify").json()["ok"]
    await_log(ruled, '"store opened"', 2)
    *_, stock = (line for line in ruled.log.read_text().splitlines() if "store opened" in line)
    assert '"caches": 1' in stock
    assert f'"bytes": {cache["bytes"]["stored"]}' not in stock  # what it takes there: the seal and the source too
    assert '"requests_unfinished": 0, "problems": []' in stock
    assert "1 caches" in doctor(ruled.home, "--reseal")
    write_keys(ruled.home, [new])
    assert "1 caches" in doctor(ruled.home, "--scrub")  # its source is read, too: the old key is not needed any more
    assert not [key for key in (old, new) if key in ruled.log.read_text()]
