"""/v1/certificates: kept, listed, used by creations, by rows of a batch, and refused for what they do not speak of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvshelf import Client, errors
from kvshelf.api import Certificate, GroupBound
from kvshelf.artifact.identity import digest
from kvshelf.cli import app
from kvshelf.engine.certify.certificate import CertificateTerms, certify
from kvshelf.engine.certify.grading import GradedDocument, GradedLevel, default_ways
from kvshelf.engine.engine import Engine
from tests.service.conftest import created, refused


@pytest.fixture(scope="module")
def service_url(bundled_service: str) -> str:
    return bundled_service


@pytest.fixture(scope="module")
def http(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=120, limits=httpx.Limits()) as client:
        yield client


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture(scope="module")
def certificate(tiny: Engine, client: Client) -> Certificate:
    """Of this model, with a limit of our own."""
    ways = default_ways(True)
    levels = [GradedLevel(whole=True, nbytes=10, loss=0.0, quality=None) for _ in ways]
    fields = {"group": "", "questions": 1, "full_bytes": 100, "full_loss": 0.0, "levels": levels}
    documents = [GradedDocument(tokens=tokens, **fields) for tokens in (20, 4000, 300, 900)]  # type: ignore[arg-type]
    made, _ = certify(tiny, CertificateTerms("own", 0.3, "full", "0" * 64), documents, ways)
    group: GroupBound = made.groups[""].model_copy(update={"limit": 6.0})
    found = made.model_copy(update={"groups": {"": group}}).signed()
    assert client.certificates.keep(found) == found
    return found


def document(name: str) -> str:
    return " ".join(f"Berth {n} of {name} is let to the {n * 37 % 101}th pilot." for n in range(60))


def test_it_is_kept_listed_replaced_and_deleted(certificate: Certificate, client: Client, http: httpx.Client) -> None:
    other = certificate.model_copy(update={"name": "second", "alpha": 0.4}).signed()
    body = other.model_dump(mode="json")
    assert [http.post("/v1/certificates", json=body).status_code for _ in range(2)] == [201, 200]
    assert {one.name for one in client.certificates.list()} == {"own", "second"}
    assert client.certificates.retrieve("second") == other
    assert client.certificates.delete("second").deleted
    with pytest.raises(errors.CertificateNotFound, match="no certificate 'second'"):
        client.certificates.retrieve("second")
    with pytest.raises(errors.InvalidRequest, match="changed since"):
        client.certificates.keep(other.model_copy(update={"alpha": 0.01}))
    foreign = other.model_copy(update={"fingerprint": "f" * 40}).signed()
    with pytest.raises(errors.ModelMismatch, match="this service has 'kvshelf-tiny'"):
        client.certificates.keep(foreign)


def test_a_creation_keeps_the_smallest_level_that_it_allows(
    certificate: Certificate, client: Client, http: httpx.Client
) -> None:
    cache = created(http, document=document("certified"), certificate="own")
    told = {"name": "own", "alpha": 0.3, "digest": certificate.digest}
    assert cache["certificate"] == told
    measured = [one for one in cache["tried"] if one["policy"] != "full" and one["quality"] is not None]
    assert cache["bytes"]["stored"] == min(one["bytes"] for one in measured if one["quality"]["kl"] < 6)
    again = http.post("/v1/caches", json={"document": document("certified"), "certificate": "own"})
    assert (again.status_code, again.json()["id"]) == (200, cache["id"])
    assert client.caches.create(document=document("certified"), policy="auto", certificate="own").id == cache["id"]
    plain = created(http, document=document("certified"), policy="knorm", compression_ratio=0.5)
    assert plain["certificate"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("certificate")
def test_a_cache_that_was_there_is_certified_too(http: httpx.Client) -> None:
    cache = created(http, document=document("earlier"), certificate="own")
    way = {"policy": cache["policy"], "codec": cache["codec"]}
    if cache["policy"] != "full":
        way["compression_ratio"] = cache["compression_ratio"]
    http.delete(f"/v1/caches/{cache['id']}")
    earlier = created(http, document=document("earlier"), quality="full", **way)
    assert (earlier["id"], earlier["certificate"]) == (cache["id"], None)
    assert http.post("/v1/caches", json={"document": document("earlier"), "certificate": "own"}).status_code == 200
    assert http.get(f"/v1/caches/{cache['id']}").json()["certificate"]["name"] == "own"


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"certificate": "nobodys"}, "certificate", "no certificate 'nobodys'"),
        ({"certificate": "own", "policy": "knorm"}, "policy", "leave policy or certificate out"),
        ({"certificate": "own", "min_quality": 0.9}, "min_quality", "leave min_quality or certificate out"),
        ({"certificate": "own", "compression_ratio": 0.5}, "compression_ratio", "leave compression_ratio out"),
        ({"certificate": "own", "document": "short"}, "certificate", "made from documents of 20 to 4000"),
    ],
)
def test_what_does_not_fit_is_refused(
    certificate: Certificate, http: httpx.Client, fields: dict[str, Any], param: str, told: str
) -> None:
    known = fields["certificate"] == certificate.name
    expected = (400, "invalid_request") if known else (404, "certificate_not_found")
    error = refused(http.post("/v1/caches", json={"document": document("refused"), **fields}), *expected)
    assert error["param"] == param
    assert told in error["message"]


@pytest.mark.slow
def test_questions_on_caches_are_graded_on_their_kept_texts(
    http: httpx.Client, client: Client, service_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the caches' labels; a cache without its text is refused by name, before a model is loaded."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    plain = {"policy": "full", "quality": False}
    asked = [
        created(http, document=document(f"asked {n}"), keep_source=True, labels={"kind": "port"}, **plain)["id"]
        for n in range(3)
    ]
    grown = created(http, document=document("asked"), keep_source=True, layout="plain", **plain)["id"]
    turn = {"prompt": "Which berth?", "max_tokens": 4, "store": True}
    others = {
        "was not kept": created(http, document=document("lost"), **plain)["id"],
        "of messages": created(
            http, messages=[{"role": "user", "content": document("said")}], keep_source=True, **plain
        )["id"],
        "appended to another": http.post(f"/v1/caches/{grown}/query", json=turn).json()["stored_cache_id"],
    }
    file, target = tmp_path / "asked.jsonl", tmp_path / "made.json"
    options = ["--model", "kvshelf-tiny", "--name", "ports", "--alpha", "0.3", "--url", service_url]
    options += ["--max-new-tokens", "4", "--output", str(target)]
    for told, cache_id in others.items():
        file.write_text("".join(map(row_of, [*asked, cache_id])))
        result = CliRunner().invoke(app, ["certify", str(file), *options])
        assert result.exit_code != 0
        assert told in result.output
        assert cache_id in result.output
    file.write_text("".join(map(row_of, asked)))
    with monkeypatch.context() as patch:
        patch.setattr(type(client.caches), "download", lambda *_, **__: pytest.fail("before what is free to know"))
        for wrong, told in (("--by", "team"), "no label 'team'"), (("--alpha", "0.01"), "99 documents"):
            result = CliRunner().invoke(app, ["certify", str(file), *options, *wrong])
            assert told in result.output
    result = CliRunner().invoke(app, ["certify", str(file), *options, "--by", "kind"])
    assert result.exit_code == 0, result.output
    made = Certificate.model_validate_json(target.read_bytes())
    assert {group: bound.documents for group, bound in made.groups.items()} == {"port": 3}
    assert made.data != digest("kvshelf.questions", file.read_bytes()), "of texts and labels, too"


def row_of(cache_id: str) -> str:
    return json.dumps({"cache_id": cache_id, "question": "Which berth is let to the 37th pilot?"}) + "\n"


def test_the_command_line_shows_both(certificate: Certificate, service_url: str, http: httpx.Client) -> None:
    cache = created(http, document=document("shown"), certificate="own")
    runner = CliRunner()
    for command, told in (
        (["show", cache["id"]], "own (at most 0.3 of the answers lost"),
        (["certificates"], certificate.digest[:16]),
        (["certificates", "own"], "20-4000"),
    ):
        result = runner.invoke(app, [*command, "--url", service_url])
        assert told in result.output, result.output
