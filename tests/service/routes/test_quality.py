"""Quality, levels, floors and the policy "auto", over HTTP, by both clients and on the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvshelf import AsyncClient, Client, errors
from kvshelf.cli import app
from kvshelf.methods.policies import POLICIES
from kvshelf.workers.replica.create.auto import candidates
from tests.service.conftest import created, refused
from tests.service.scrape import moving

QUALITY = {"agreement", "low", "high", "worst", "cues", "kl", "probe_s", "version", "asked", "reason", "full"}


@pytest.fixture(scope="module")
def service_url(bundled_service: str) -> str:
    """Of a model that learns something from a document: of the others none has a figure."""
    return bundled_service


@pytest.fixture(scope="module")
def http(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=120, limits=httpx.Limits()) as client:
        yield client


def document(name: str) -> str:
    """Long enough to be asked about, and another one for each test."""
    return " ".join(f"Berth {n} of {name} is let to the {n * 37 % 101}th pilot." for n in range(60))


def levels_of(http: httpx.Client, status: int, **body: Any) -> list[dict[str, Any]]:
    response = http.post("/v1/caches", json=body)
    assert response.status_code == status, response.text
    found = response.json()
    assert found.keys() == {"object", "data"}
    assert found["object"] == "list"
    data: list[dict[str, Any]] = found["data"]
    return data


def test_every_new_cache_says_what_it_costs(http: httpx.Client) -> None:
    body = {"document": document("cost"), "policy": "knorm", "compression_ratio": 0.75}
    with moving(http) as by:
        cache = created(http, **body)
        again = created(http, **body)
    assert cache["quality"].keys() == QUALITY
    assert 0 <= cache["quality"]["agreement"] <= 1
    assert cache["quality"]["low"] <= cache["quality"]["agreement"] <= cache["quality"]["high"]
    assert cache["quality"]["worst"].keys() == {"from", "to", "agreement"}
    assert cache["quality"]["kl"] >= 0
    assert cache["tried"] == []
    for found in (http.get(f"/v1/caches/{cache['id']}").json(), again):
        assert (found["id"], found["quality"]) == (cache["id"], cache["quality"])
    assert by("kvshelf_quality_agreement_count", model="kvshelf-tiny", policy="knorm") == 1
    full = created(http, document=document("cost"), policy="full")
    assert full["quality"]["agreement"] == 1.0


def test_levels_are_the_caches_of_single_creations(http: httpx.Client) -> None:
    body = {"document": document("levels"), "policy": "keydiff", "codec": "int8", "labels": {"of": "levels"}}
    made = levels_of(http, 201, **body, levels=[0.5, 0.75])
    assert [cache["compression_ratio"] for cache in made] == [0.5, 0.75]
    assert [cache["existing"] for cache in made] == [False, False]
    for cache, ratio in zip(made, (0.5, 0.75), strict=True):
        single = created(http, **body, compression_ratio=ratio)
        assert (single["id"], single["existing"], single["quality"]) == (cache["id"], True, cache["quality"])
    assert [cache["existing"] for cache in levels_of(http, 200, **body, levels=[0.75, 0.5])] == [True, True]
    more = levels_of(http, 201, **body, levels=[0.5, 0.9])
    assert [cache["existing"] for cache in more] == [True, False]
    listed = http.get("/v1/caches", params={"label.of": "levels"}).json()["data"]
    assert {cache["id"] for cache in listed} == {cache["id"] for cache in (*made, *more)}


def test_what_falls_short_of_the_floor_is_refused_and_not_stored(http: httpx.Client) -> None:
    body = {"document": document("floor"), "compression_ratio": 0.95, "labels": {"of": "floor"}}
    error = refused(http.post("/v1/caches", json={**body, "min_quality": 1.0}), 422, "quality_below_floor")
    assert error["param"] == "min_quality"
    (tried,) = error["details"]["tried"]
    assert (tried["policy"], tried["compression_ratio"], tried["codec"]) == ("keydiff", 0.95, "none")
    assert tried["quality"]["agreement"] < 1
    assert http.get("/v1/caches", params={"label.of": "floor"}).json()["data"] == []
    low, high = tried["quality"]["low"], tried["quality"]["high"]
    assert "show that the floor is out of reach" in tried["quality"]["reason"]
    kept = created(http, **body, min_quality=low)
    assert kept["quality"]["full"]
    assert low <= kept["quality"]["low"] <= high
    refused(http.post("/v1/caches", json={**body, "min_quality": 1.0}), 422, "quality_below_floor")  # and it stays


def test_a_floor_that_nothing_can_show_is_refused_by_name(http: httpx.Client) -> None:
    half = {"compression_ratio": 0.5, "min_quality": 0.5}
    impossible = {**half, "document": document("floor"), "min_quality": 0.99}
    error = refused(http.post("/v1/caches", json=impossible), 422, "quality_below_floor")
    assert "no cues of this document show more than 0.9" in error["message"]
    for text, why in (("Too short.", "too short"), ("word " * 1000, "the document decides none of the")):
        error = refused(http.post("/v1/caches", json={**half, "document": text}), 422, "policy_unsupported")
        assert why in error["message"]
    unmeasured = {**half, "document": document("floor"), "quality": False}
    assert refused(http.post("/v1/caches", json=unmeasured), 400, "invalid_request")["param"] == "quality"


def test_how_much_is_asked(http: httpx.Client) -> None:
    body = {"document": document("how"), "policy": "knorm"}
    made = {how: created(http, **body, compression_ratio=ratio, quality=how) for how, ratio in (
        ("fast", 0.5), ("full", 0.6), (False, 0.7),
    )}  # fmt: skip
    assert made["fast"]["quality"]["asked"] < 50 < made["full"]["quality"]["asked"]
    assert made[False]["quality"] is None
    floor = {"min_quality": 0.0}
    again = created(http, **body, compression_ratio=0.5, **floor)  # a few cues show no floor: it is measured once more
    assert (again["id"], again["existing"]) == (made["fast"]["id"], True)
    assert again["quality"]["full"] > made["fast"]["quality"]["full"]
    nothing = created(http, document="word " * 1000, policy="knorm", compression_ratio=0.5)["quality"]
    assert (nothing["agreement"], nothing["low"], nothing["cues"]) == (None, None, 0)
    assert "decides none" in nothing["reason"]
    assert "knorm removed 70% of the entries" in made[False]["warnings"][0]


def test_of_levels_with_a_floor_one_is_kept_and_found_again(http: httpx.Client) -> None:
    body = {"document": document("smallest"), "levels": [0.95, 0.0], "min_quality": 1.0, "labels": {"of": "smallest"}}
    cache = created(http, **body)
    assert (cache["object"], cache["compression_ratio"], cache["existing"]) == ("cache", 0.0, False)
    assert [one["compression_ratio"] for one in cache["tried"]] == [0.95, 0.0]
    assert cache["tried"][1]["cache_id"] == cache["id"]
    again = created(http, **body)
    assert (again["id"], again["existing"], again["tried"]) == (cache["id"], True, cache["tried"])
    listed = http.get("/v1/caches", params={"label.of": "smallest"}).json()["data"]
    assert [(found["id"], found["tried"]) for found in listed] == [(cache["id"], cache["tried"])]


def test_levels_have_codecs_of_their_own(http: httpx.Client) -> None:
    body = {"document": document("codecs"), "codec": "int8"}
    asked = [0.5, {"compression_ratio": 0.5, "codec": "klt"}, {"compression_ratio": 0.75}]
    made = levels_of(http, 201, **body, levels=asked)
    assert [(one["compression_ratio"], one["codec"]) for one in made] == [(0.5, "int8"), (0.5, "klt"), (0.75, "int8")]
    assert all(10 <= one["quality"]["asked"] < 20 for one in made)
    response = http.post("/v1/estimate", json={**body, "policy": "keydiff", "levels": asked})
    assert [row["bytes_stored"].keys() for row in response.json()["policies"]] == [{"int8", "klt"}, {"int8"}]
    for levels in ([0.5, 0.5], [{"codec": "int4"}], [{"compression_ratio": 0.5, "codec": "zip"}]):
        error = refused(http.post("/v1/caches", json={**body, "levels": levels}), 400, "invalid_request")
        assert error["param"].startswith("levels")


def test_of_what_fits_the_best_is_kept(http: httpx.Client) -> None:
    body = {"document": document("size"), "levels": [0.25, 0.5, 0.9]}
    made = levels_of(http, 201, **body)
    sizes = [cache["bytes"]["stored"] for cache in made]
    best = max(made[1:], key=lambda cache: (cache["quality"]["agreement"], -cache["quality"]["kl"]))
    tokens = made[0]["tokens"]["document"]
    for size in ({"max_bytes": sizes[1]}, {"bytes_per_token": (sizes[1] + 1) / tokens}):
        cache = created(http, **body, **size)
        assert (cache["id"], cache["existing"]) == (best["id"], True)
    error = refused(http.post("/v1/caches", json={**body, "max_bytes": sizes[2] - 1}), 422, "quality_below_floor")
    assert error["param"] == "max_bytes"
    assert [one["bytes"] for one in error["details"]["tried"]] == sizes
    both = {"max_bytes": 10, "bytes_per_token": 1}
    assert refused(http.post("/v1/caches", json={**body, **both}), 400, "invalid_request")["param"] == "bytes_per_token"


def test_auto_takes_a_size(http: httpx.Client) -> None:
    full = created(http, document=document("fits"), policy="full")
    cache = created(http, document=document("fits"), policy="auto", max_bytes=full["bytes"]["full_16bit"] // 8)
    assert cache["bytes"]["stored"] <= full["bytes"]["full_16bit"] // 8
    fitting = [one for one in cache["tried"] if one["quality"] is not None]
    assert cache["quality"]["agreement"] == max(one["quality"]["agreement"] for one in fitting)
    assert all("more bytes than asked" in one["reason"] for one in cache["tried"] if one["codec"] in ("none", "int8"))


@pytest.mark.slow
def test_auto_says_what_it_tried_and_makes_its_choice_once(http: httpx.Client) -> None:
    """Also where many ask at once: the others wait for the first, or find what it chose."""
    body = {"document": document("auto"), "policy": "auto", "min_quality": 0.9}
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: http.post("/v1/caches", json=body), range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    (cache,) = {answer.json()["id"]: answer.json() for answer in answers}.values()
    tried = [(one["policy"], one["compression_ratio"] or None, one["codec"]) for one in cache["tried"]]
    assert tried == list(candidates(True))
    assert all((one["quality"] is None) == (one["reason"] is not None) for one in cache["tried"])
    kept = next(one for one in cache["tried"] if one["cache_id"] == cache["id"])
    assert (kept["policy"], kept["codec"]) == (cache["policy"], cache["codec"])
    with moving(http) as by:
        assert created(http, **body)["existing"]
    assert by("kvshelf_creation_phase_seconds_count", model="kvshelf-tiny") == 0


def test_in_the_background(http: httpx.Client) -> None:
    def ended(**body: Any) -> dict[str, Any]:
        accepted = http.post("/v1/caches", json=body, headers={"prefer": "respond-async"})
        assert accepted.status_code == 202, accepted.text
        request: dict[str, Any] = accepted.json()
        while request["state"] not in ("done", "failed"):
            request = http.get(f"/v1/requests/{request['id']}", params={"wait_s": 60}).json()
        return request

    body = {"document": document("night"), "levels": [0.5, 0.75]}
    request = ended(**body)
    ids = [cache["id"] for cache in levels_of(http, 200, **body)]
    assert (request["cache_ids"], request["cache_id"]) == (ids, ids[0])
    assert ended(**body) == request  # the same work is the same request
    chosen = ended(**body, min_quality=0.0)
    assert (chosen["cache_ids"], chosen["cache_id"]) == ([ids[1]], ids[1])
    failed = ended(document=document("night"), compression_ratio=0.95, min_quality=1.0)
    assert (failed["state"], failed["attempts"], failed["cache_ids"]) == ("failed", 1, [])
    told = {"document": body["document"], "compression_ratio": 0.95, "min_quality": 1.0}
    assert failed["error"] == refused(http.post("/v1/caches", json=told), 422, "quality_below_floor")
    (tried,) = failed["error"]["details"]["tried"]
    assert 0 <= tried["quality"]["agreement"] < 1


def test_a_form_has_levels_as_json(http: httpx.Client) -> None:
    file = {"file": ("berths.txt", document("form").encode(), "text/plain")}
    response = http.post("/v1/caches", files=file, data={"levels": "[0.5, 0.75]", "codec": "int4"})
    assert response.status_code == 201, response.text
    assert [cache["codec"] for cache in response.json()["data"]] == ["int4", "int4"]


def test_an_estimate_tells_each_level_and_each_way_of_auto(http: httpx.Client) -> None:
    def rows(**body: Any) -> list[dict[str, Any]]:
        response = http.post("/v1/estimate", json={"document": document("estimate"), **body})
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()["policies"]
        return found

    assert [row["compression_ratio"] for row in rows(policy="keydiff", levels=[0.5, 0.75])] == [0.5, 0.75]
    ways = rows(policy="auto", min_quality=0.9)
    told = [(row["policy"], row["compression_ratio"] or None, codec) for row in ways for codec in row["bytes_stored"]]
    assert told == list(candidates(True))
    of_all = rows(levels=[0.5, 0.75])
    assert {row["compression_ratio"] for row in of_all if POLICIES[row["policy"]].takes_budget} == {0.5, 0.75}


def test_the_clients(service_url: str, tmp_path: Path) -> None:
    file = tmp_path / "berths.txt"
    file.write_text(document("clients"))
    with Client(service_url) as client:
        made = client.caches.create(file=file, levels=[0.5, 0.95])
        assert [cache.compression_ratio for cache in made] == [0.5, 0.95]
        assert made[0].quality is not None
        assert made[0].quality.kl < made[1].quality.kl  # type: ignore[union-attr]
        kept = client.caches.create(document=file.read_text(), levels=[0.5, 0.95], min_quality=0.0)
        assert (kept.id, kept.existing) == (made[1].id, True)
        with pytest.raises(errors.QualityBelowFloor) as caught:
            client.caches.create(file=file, compression_ratio=0.95, min_quality=1.0)
        assert caught.value.details["tried"][0]["compression_ratio"] == 0.95
        request = client.caches.create(file=file, levels=[0.5, 0.95], respond_async=True)
        request = client.requests.retrieve(request.id, wait_s=60)
        assert request.cache_ids == [cache.id for cache in made]
        assert len(client.estimate(file=file, policy="keydiff", levels=[0.5, 0.95]).policies) == 2

    async def awaited() -> None:
        async with AsyncClient(service_url) as client:
            assert [cache.existing for cache in await client.caches.create(file=file, levels=[0.95, 0.5])] == [True] * 2
            assert (await client.caches.create(file=file, policy="auto", min_quality=0.0)).tried

    asyncio.run(awaited())


@pytest.mark.slow
def test_the_command_line(service_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_URL", service_url)
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "berths.txt"
    file.write_text(document("command"))

    def run(*args: str, code: int = 0) -> Any:
        done = CliRunner().invoke(app, list(args))
        assert done.exit_code == code, done.output
        return done

    done = run("put", str(file), "--level", "0.5", "--level", "0.95", "--label", "of=command")
    ids = done.stdout.split()
    assert len(ids) == 2
    assert done.stderr.count("agreement") == 2
    (kept,) = run("put", str(file), "--level", "0.5", "--level", "0.95", "--min-quality", "0").stdout.split()
    assert kept == ids[1]
    refusal = run("put", str(file), "--compression-ratio", "0.95", "--min-quality", "1", code=2)
    assert "lower min_quality" in refusal.stderr
    shown = json.loads(run("show", ids[1], "--json").stdout)
    agreement = f"{shown['quality']['agreement']:.3f}"
    assert f"agreement {agreement}" in run("show", ids[1]).stdout
    listed = run("ls", "--label", "of=command").stdout
    assert "QUALITY" in listed
    assert agreement in next(line for line in listed.splitlines() if line.startswith(ids[1][:12]))
    pair = run("put", str(file), "--level", "0.5:int4", "--level", "0.5:klt", "--json").stdout.splitlines()
    assert [json.loads(line)["codec"] for line in pair] == ["int4", "klt"]
    small = json.loads(run("put", str(file), "--policy", "auto", "--bytes-per-token", "100", "--json").stdout)
    assert small["bytes"]["stored"] <= 100 * small["tokens"]["document"]
    assert "is no compression ratio" in run("put", str(file), "--level", "half", code=2).stderr
    chosen = json.loads(run("put", str(file), "--policy", "auto", "--min-quality", "0.9", "--json").stdout)
    assert f"chosen among {len(candidates(True))}" in run("show", chosen["id"]).stdout
    assert "kvzip" in run("estimate", str(file), "--policy", "auto").stdout
