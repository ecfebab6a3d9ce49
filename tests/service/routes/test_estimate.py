"""/v1/estimate: what it says is what a creation then does."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from typer.testing import CliRunner

from kvshelf import Client, CompressedCache, Engine
from kvshelf.api import Timings
from kvshelf.cli import app
from kvshelf.methods.catalog import compress_share
from kvshelf.methods.policies import POLICIES
from kvshelf.workers.replica.create import estimates
from kvshelf.workers.replica.create.estimates import CODECS, Rates
from kvshelf.workers.replica.create.sizes import Dimensions
from tests.amounts import in_turn
from tests.service.conftest import created, refused, stopped

if TYPE_CHECKING:
    from tests.conftest import LiveService

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs" / "use" / "secure.md").read_text()[:3000]


def estimate(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/estimate", json={"document": DOCUMENT} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@cache
def reduced(engine: Engine, text: str, removed: float) -> CompressedCache:
    """Once for all codecs: the prefill takes longer than they do."""
    return engine.compress(text, policy="keydiff", compression_ratio=removed)


FIXED = [codec for codec in CODECS if codec != "klt"]


@pytest.mark.parametrize("codec", [*FIXED, "int4:group=64,residual=0", "mixed:high=none,low=int4,share=0.25"])
@pytest.mark.parametrize("removed", [0.0, 0.5, 0.9, 0.97])
def test_sizes_are_those_of_real_blobs(tiny: Engine, codec: str, removed: float) -> None:
    cache = reduced(tiny, DOCUMENT, removed)
    said = Dimensions.of(tiny.model).stored_bytes(cache.num_tokens, cache.kept_tokens, codec)
    # What no codec rounds is as large as its numbers are alike, which no estimate knows.
    within = 0.1 if codec == "lossless" else 0.05
    assert said == pytest.approx(len(tiny.encoded(cache, codec).to_bytes()), rel=within)


@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
def test_sizes_have_the_index_of_a_policy(tiny: Engine, codec: str) -> None:
    params = {"block": 32, "representatives": 4}
    cache = tiny.compress(DOCUMENT, policy="infllm", **params)
    shape = Dimensions.of(tiny.model)
    said = shape.policy_bytes(cache.num_tokens, cache.num_tokens, codec, {"block": 32, "vectors": 4})
    assert said == pytest.approx(len(tiny.encoded(cache, codec).to_bytes()), rel=0.02)


@in_turn({"codec": [*FIXED, "int4:group=64,residual=0"], "removed": [0.0, 0.5, 0.9]})
def test_sizes_are_of_pruned_keys(tiny: Engine, codec: str, removed: float) -> None:
    """Around a base that keeps the last tokens."""
    params = {"channels": 0.5, "whole_keys": 20}
    cache = tiny.compress(DOCUMENT, policy="think", base="streaming_llm", compression_ratio=removed, **params)
    stored = {"pruned": 0.5, "whole": 20}
    said = Dimensions.of(tiny.model).policy_bytes(cache.num_tokens, cache.kept_tokens, codec, stored)
    assert said == pytest.approx(len(tiny.encoded(cache, codec).to_bytes()), rel=0.05)


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_sizes_have_the_columns_of_a_policy(tiny: Engine, codec: str) -> None:
    plain, cache = (
        tiny.compress(DOCUMENT, policy="h2o", compression_ratio=0.5, **more) for more in ({}, {"keep_scores": True})
    )
    said = Dimensions.of(tiny.model).policy_bytes(cache.num_tokens, cache.kept_tokens, codec, {"columns": 1})
    stored, without = (len(tiny.encoded(each, codec).to_bytes()) for each in (cache, plain))
    assert said == pytest.approx(stored, rel=0.05)
    columns = 4 * sum(record.entries for record in cache.layers)
    assert columns <= stored - without <= columns + 128 * len(cache.layers)
    assert cache.nbytes - plain.nbytes == columns


@pytest.mark.parametrize("codec", FIXED)
def test_sizes_are_of_residuals(tiny: Engine, codec: str) -> None:
    cache = tiny.compress(DOCUMENT, policy="kvdirect")
    said = Dimensions.of(tiny.model).policy_bytes(cache.num_tokens, cache.num_tokens, codec, {"residuals": True})
    assert said == pytest.approx(len(tiny.encoded(cache, codec).to_bytes()), rel=0.05)


def test_codecs_that_a_policy_cannot_take_are_left_out_unless_asked_for(http: httpx.Client) -> None:
    (row,) = estimate(http, policy="infllm")["policies"]
    assert list(row["bytes_stored"]) == [codec for codec in CODECS if codec != "mixed"]
    refused(
        http.post("/v1/estimate", json={"document": DOCUMENT, "policy": "infllm", "codec": "mixed"}),
        400,
        "invalid_request",
    )


STREAMS = ["klt:step=0.5", "klt", "klt:step=4", "klt:steps=kl", "klt:classes=1/3,shares=5/5"]


@in_turn({"codec": STREAMS, "removed": [0.0, 0.5, 0.9]})
def test_the_size_of_streams_is_told_within_a_fifth(tiny: Engine, codec: str, removed: float) -> None:
    """It depends on the text. Text that repeats itself takes a third of what is said."""
    cache = reduced(tiny, (ROOT / "docs" / "use" / "secure.md").read_text()[:9000], removed)
    said = Dimensions.of(tiny.model).stored_bytes(cache.num_tokens, cache.kept_tokens, codec)
    assert said == pytest.approx(len(tiny.encoded(cache, codec).to_bytes()), rel=0.2)


def test_what_is_said_is_what_a_creation_does(http: httpx.Client) -> None:
    def stored() -> list[dict[str, Any]]:
        found = http.get("/v1/caches", params={"limit": 1000}).json()["data"]
        return [cache for cache in found if not cache["ttl_renew"]]  # the uses before may still be renewing others

    before = stored()
    said = estimate(http, compression_ratio=0.75)
    assert stored() == before
    assert [row["policy"] for row in said["policies"]] == list(POLICIES)
    rows = {row["policy"]: row for row in said["policies"]}
    for policy, codec in (("keydiff", "none"), ("snapkv", "int4"), ("lagkv", "mixed")):
        cache = created(http, document=DOCUMENT, policy=policy, codec=codec, compression_ratio=0.75)
        assert (said["tokens"], said["bytes_full"]) == (cache["tokens"]["document"], cache["bytes"]["full"])
        assert said["bytes_full_16bit"] == cache["bytes"]["full_16bit"]
        assert rows[policy]["kept"] == cache["tokens"]["kept"]
        assert rows[policy]["bytes_stored"][codec] == pytest.approx(cache["bytes"]["stored"], rel=0.05)
    assert rows["full"]["kept"] == said["tokens"]


def test_seconds_are_measured_once_a_policy_has_worked(http: httpx.Client) -> None:
    created(http, document=DOCUMENT + "again", policy="tova", compression_ratio=0.5)
    (row,) = estimate(http, policy="tova", codec="int8")["policies"]
    assert (row["basis"], list(row["bytes_stored"])) == ("measured", ["int8"])
    assert 0 < row["seconds"] < 60
    (other,) = estimate(http, policy="cake")["policies"]
    assert other["basis"] == "other_policies"


def added(policy: str) -> float:
    share = compress_share(policy)
    assert share is not None
    return share


def test_rates_are_by_policy_then_of_all_then_assumed_with_what_each_policy_adds() -> None:
    shape = Dimensions(layers=2, kv_heads=2, head_dim=16, itemsize=4, device="cpu", flops=1e6)
    rates = Rates()
    for policy in ("keydiff", "kvzip"):
        assert rates.seconds(policy, 100, shape) == (pytest.approx(100 * 1e6 / 5e10 * (1 + added(policy))), "assumed")
    rates.add("keydiff", {}, 1000, Timings(queue_s=50, prefill_s=1.5, compress_s=0.5, store_s=50))
    rates.add("snapkv", {}, 1000, Timings(prefill_s=4.0))
    plain = (2.0 / (1 + added("keydiff")) + 4.0 / (1 + added("snapkv"))) / 2000
    assert rates.seconds("keydiff", 100, shape) == (pytest.approx(0.2), "measured")
    assert rates.seconds("tova", 100, shape) == (pytest.approx(100 * plain * (1 + added("tova"))), "other_policies")
    assert rates.seconds("kvzip", 100, shape) == (pytest.approx(100 * plain * 5.005, rel=1e-3), "other_policies")
    assert rates.measured_tokens == 2000


def test_a_policy_that_nobody_measured_is_unknown_until_it_has_run() -> None:
    shape = Dimensions(layers=2, kv_heads=2, head_dim=16, itemsize=4, device="cpu", flops=1e6)
    rates = Rates()
    assert rates.seconds("ada around kvzip", 100, shape) is None
    rates.add("ada", {"base": "kvzip", "floor": 0.2}, 1000, Timings(prefill_s=9.0))
    assert rates.seconds("ada around kvzip", 100, shape) == (pytest.approx(0.9), "measured")
    # It says nothing about others: what it adds to a prefill is still unknown.
    assert rates.seconds("ada", 100, shape) == (pytest.approx(100 * 1e6 / 5e10 * (1 + added("ada"))), "assumed")


def test_an_estimate_knows_what_each_policy_adds(http: httpx.Client) -> None:
    rows = {row["policy"]: row for row in estimate(http, compression_ratio=0.5)["policies"]}
    assert rows["kvzip"]["compress_share"] == pytest.approx(4.01, abs=0.01)  # docs/internals/policies.md: 401 %
    told = {name: row["compress_share"] for name, row in rows.items() if row["refused"] is None}
    assert len(told) > 20
    assert told == {name: added(name) for name in told}
    (around,) = estimate(http, policy="ada", policy_params={"base": "kvzip"})["policies"]
    assert (around["compress_share"], around["seconds"], around["basis"]) == (None, None, None)
    assert around["bytes_stored"]["none"] > 0


def test_bad_input(http: httpx.Client) -> None:
    for body, status, code in (
        ({"document": ""}, 422, "document_too_short"),
        ({"token_ids": [5] * 16385}, 413, "document_too_long"),
        ({"document": "a", "policy": "magic"}, 400, "invalid_request"),
        ({"document": "a", "policy": "full", "compression_ratio": 0.5}, 400, "invalid_request"),
        ({"document": "a", "codec": "zip"}, 400, "invalid_request"),
        ({"document": "a", "colour": "red"}, 400, "invalid_request"),
        ({"document": "a", "model": "gpt-17"}, 400, "invalid_request"),
    ):
        refused(http.post("/v1/estimate", json=body), status, code)


def test_a_policy_that_refuses_says_so_beside_the_others(http: httpx.Client) -> None:
    said = http.post("/v1/estimate", json={"token_ids": [5] * 20, "compression_ratio": 0.99}).json()["policies"]
    rows = {row["policy"]: row for row in said}
    assert rows["full"]["refused"] is None
    assert "leaves nothing" in rows["keydiff"]["refused"]
    assert rows["keydiff"]["seconds"] is None


def test_estimates_take_no_room_from_questions(http: httpx.Client, service: LiveService, cache: dict[str, Any]) -> None:
    """More than Ray takes and lets wait (16 and 24), while the worker does nothing. Two are sent to it, 24 wait."""
    (replica,) = service.replica_pids()
    body = {"document": "A short one.", "policy": "full"}
    with ThreadPoolExecutor(46) as threads:
        with stopped(replica):
            estimates = [threads.submit(http.post, "/v1/estimate", json=body) for _ in range(45)]
            while sum(each.done() for each in estimates) < 19:
                time.sleep(0.05)
            question = threads.submit(
                http.post, f"/v1/caches/{cache['id']}/query", json={"prompt": "?", "max_tokens": 1}
            )
            wait([question], timeout=1)
        answered = question.result()
        statuses = Counter(each.result().status_code for each in estimates)
    assert answered.status_code == 200, answered.text
    assert statuses == {200: 2 + 24, 429: 19}


def test_the_client_and_the_command(service_url: str, tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    file.write_text(DOCUMENT)
    with Client(service_url) as client:
        said = client.estimate(file=file, policy="keydiff", compression_ratio=0.5)
        assert said == client.estimate(document=DOCUMENT, policy="keydiff", compression_ratio=0.5)
    arguments = ["estimate", str(file), "--url", service_url, "--policy", "keydiff", "--compression-ratio", "0.5"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert f"{said.tokens} tokens" in done.stderr
    assert f" {said.policies[0].kept} " in done.stdout
    assert " 4% " in done.stdout  # keydiff's, of docs/internals/policies.md
    unknown = ["estimate", str(file), "--url", service_url, "--policy", "ada", "--param", "base=kvzip"]
    assert CliRunner().invoke(app, unknown).stdout.count(" unknown ") == 2
    (row,) = said.policies
    assert f"({row.bytes_stored['int4'] / said.bytes_full_16bit:.1%})" in done.stdout
    assert f"Shares are of {said.bytes_full_16bit / 1e6:.2f} MB" in done.stderr
    as_json = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert as_json["policies"][0]["kept"] == said.policies[0].kept
    assert CliRunner().invoke(app, ["estimate", str(tmp_path / "none.txt"), "--url", service_url]).exit_code == 2


def test_a_compression_may_end_while_an_estimate_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate runs on a thread of its own."""
    rates, spent = Rates(), Timings(prefill_s=1.0)
    shape = Dimensions(layers=2, kv_heads=2, head_dim=16, itemsize=4, device="cpu", flops=1e6)
    rates.add("keydiff", {}, 100, spent)

    def looked_up(cost: str) -> float | None:
        rates.add("tova" if cost == "keydiff" else "h2o", {}, 100, spent)
        return compress_share(cost)

    monkeypatch.setattr(estimates, "compress_share", looked_up)
    expected = (1 + added("snapkv")) / (1 + added("keydiff"))
    assert rates.seconds("snapkv", 100, shape) == (pytest.approx(expected), "other_policies")
