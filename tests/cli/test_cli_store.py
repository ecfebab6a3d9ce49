"""The command line on a store itself, without a service: export, import, doctor."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from typer.testing import CliRunner, Result

from kvshelf import CompressedCache, Engine, open_store
from kvshelf.artifact.exported import split
from kvshelf.cli import app
from kvshelf.errors import CacheCorrupt
from kvshelf.store.manifest import Judgement
from tests.qualities import quality_of
from tests.store.redis.servers import ValkeyServer

MISSING = "kvs_" + "0" * 40


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSHELF_")]:
        monkeypatch.delenv(name)


def run(*args: str | Path, code: int = 0) -> Result:
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def cache(tiny: Engine) -> CompressedCache:
    return tiny.compress("A crate for each of the captain's parrots. " * 9, policy="knorm", compression_ratio=0.5)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path, secrets.token_hex(32))


def write_keys(folder: Path, *keys: str) -> Path:
    path = folder / "keys"
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return path


def checks(*options: str | Path, code: int = 0) -> dict[str, str]:
    """What doctor found, by the name of the check."""
    done = run("doctor", *options, "--json", code=code)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(check["ok"] for check in found) == (code == 0)
    return {check["check"]: check["finding"] for check in found}


def test_a_cache_goes_from_store_to_store_as_one_file(cache: CompressedCache, tmp_path: Path, keys: Path) -> None:
    one, two, file = f"disk://{tmp_path}/one", f"disk://{tmp_path}/two", tmp_path / "parrots.kvshelf"
    with open_store(one) as store:
        labels, quality = {"a": "z", "kind": "crate"}, quality_of(0.9)
        judged = Judgement(quality=quality)
        id = store.put(cache, codec="int8", name="parrots", labels=labels, judged=judged, source="Not read.").id
        plain = tmp_path / "plain.kvshelf"
        with store.open_blob(id) as stored:
            plain.write_bytes(stored.file.read())
    assert run("export", id[:12], "--store", one, "--output", file).stdout == f"{file}\n"
    assert CompressedCache.from_bytes(file.read_bytes()).codec == "int8"

    sealed = ("--store", two, "--encryption-key-file", keys)
    done = run("import", file, *sealed, "--ttl", "2h", "--label", "a=b", "--json")
    imported = json.loads(done.stdout)
    assert (imported["name"], imported["labels"]) == ("parrots", {"a": "b", "kind": "crate"})
    assert (imported["codec"], imported["quality"]) == ("int8", quality_of(0.9).model_dump())
    assert (imported["has_source"], "source_not_kept" in done.stderr) == (False, True)
    assert imported["expires_at"] == pytest.approx(imported["created_at"] + 7200, abs=60)
    assert run("import", file, *sealed).stdout == imported["id"] + "\n"
    again = tmp_path / "again.kvshelf"
    shown = json.loads(run("export", imported["id"], *sealed, "--output", again, "--json").stdout)
    assert shown == {"id": imported["id"], "file": str(again), "bytes": again.stat().st_size}
    assert split(again.read_bytes()).blob == split(file.read_bytes()).blob == plain.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["one", "two", "keys", "plain.kvshelf", "parrots.kvshelf", "again.kvshelf"]
    )
    third = json.loads(run("import", plain, "--store", f"disk://{tmp_path}/three", "--json").stdout)
    assert (third["name"], third["labels"], third["quality"]) == ("plain.kvshelf", {}, None)


def test_what_cannot_be_exported_or_imported(cache: CompressedCache, tmp_path: Path, keys: Path) -> None:
    url, out = f"disk://{tmp_path}/home", tmp_path / "out"
    sealed = ("--store", url, "--encryption-key-file", keys)
    run("export", MISSING, *sealed, "--output", out, code=3)
    assert not out.exists()
    bad = tmp_path / "bad"
    bad.write_bytes(cache.to_bytes()[:-1])
    said = run("import", bad, *sealed, code=2).stderr
    assert f"{bad} is no sound cache: " in said
    assert "cut off" in said
    bad.write_bytes(cache.to_bytes())
    id = run("import", bad, *sealed).stdout.strip()
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "out", tmp_path / "none" / "out"):
        assert "cannot write" in run("export", id, *sealed, "--output", place, code=2).stderr
    out.write_text("as it was")
    assert "sealed" in run("export", id, "--store", url, "--output", out, code=1).stderr
    assert out.read_text() == "as it was"
    keys.chmod(0o644)
    assert "chmod 600" in run("export", id, *sealed, "--output", out, code=2).stderr
    assert stat.S_IMODE(keys.stat().st_mode) == 0o644


@pytest.mark.slow
def test_doctor_scrubs_a_store(cache: CompressedCache, tmp_path: Path) -> None:
    url = f"disk://{tmp_path}/home"
    with open_store(url) as store:
        kept = store.put(cache)
        rotten = store.put(cache, codec="int8", source="squawk")
    assert checks("--store", url, "--scrub")["scrub"].startswith("2 caches")
    for path in (tmp_path / "home" / "blobs").iterdir():
        if path.stat().st_size == rotten.bytes_stored:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    assert "nothing amiss" in checks("--store", url)["store"]  # blobs are not read without --scrub
    found = checks("--store", url, "--scrub", code=1)
    assert found["scrub"].startswith(f"1 of 2 caches: {rotten.id}: ")
    assert kept.id not in found["scrub"]
    assert "quarantine" in checks("--store", url, code=1)["store"]
    with open_store(url) as store:
        assert store.usage().caches == 1


@pytest.mark.slow
def test_doctor_rotates_keys(cache: CompressedCache, tmp_path: Path) -> None:
    url, old, new = f"disk://{tmp_path}/home", secrets.token_hex(32), secrets.token_hex(32)
    with open_store(url) as store:
        id = store.put(cache).id
    for keys, resealed in (((old,), 1), ((new, old), 1), ((new,), 0)):
        options = ("--store", url, "--encryption-key-file", write_keys(tmp_path, *keys), "--reseal", "--scrub")
        found = checks(*options)
        assert found["reseal"].startswith(f"{resealed} caches")
        assert found["scrub"].startswith("1 caches")
    wrong = checks("--store", url, "--encryption-key-file", write_keys(tmp_path, old), "--scrub", code=1)
    assert id in wrong["scrub"]
    with open_store(url) as store:
        assert store.usage().caches == 1  # a missing key says nothing about the cache


@pytest.mark.slow
def test_doctor_advises_on_redis_and_shows_no_password(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, requirepass="hunter2", maxmemory="32mb") as server:
        found = checks("--store", server.url)["store"]
        assert "redis://***@127.0.0.1" in found
        assert "Set appendonly yes" in found
        server.client().config_set("maxmemory-policy", "allkeys-lru")
        refused = checks("--store", server.url, code=1)["store"]
        assert refused.count("allkeys-lru") == 1
    unreachable = run("doctor", "--store", server.url, code=1).output
    assert "hunter2" not in found + refused + unreachable


def test_an_outage_is_told_without_the_password(tmp_path: Path) -> None:
    done = run("export", MISSING, "--store", "redis://:hunter2@127.0.0.1:9", "--output", tmp_path / "x", code=1)
    assert "the shelf at redis://127.0.0.1:9 cannot be reached" in done.stderr
    assert "Start its Redis server, or correct the URL of the store" in done.stderr
    assert "the password in --store shows in the process list" in done.stderr
    assert "hunter2" not in done.output


def test_everything_of_a_subject_is_erased_in_a_store(cache: CompressedCache, tmp_path: Path) -> None:
    url, out = f"disk://{tmp_path}/home", tmp_path / "receipt.json"
    with open_store(url) as store:
        mine = store.put(cache, labels={"subject": "X"}, source="the aster").id
        yours = store.put(cache, labels={"subject": "X"}, tenant="acme", source="the iris").id
    assert "say what is to be erased" in run("erase", "--store", url, code=2).stderr
    subject = ("--label", "subject=X", "--store", url)
    shown = run("erase", *subject, "--dry-run")
    assert [each["id"] for each in json.loads(shown.stdout)["erased"]][-1] == mine
    assert shown.stderr.startswith("would go: 1 of cache, 1 of source")
    for unwritable in (tmp_path, tmp_path / "nowhere" / "receipt.json"):
        assert "cannot write" in run("erase", *subject, "--output", unwritable, code=2).stderr
    with open_store(url) as store:
        assert store.stat(mine).id == mine
    run("erase", *subject, "--output", out)
    receipt = json.loads(out.read_text())
    assert (receipt["status"], receipt["counts"]) == ("completed", {"source": 1, "cache": 1})
    assert run("verify-receipt", out).stdout == "the digest is right; the receipt is not signed\n"
    out.write_text(out.read_text().replace('"counts":{', '"counts":{"file":1,'))
    assert "the receipt was changed" in run("verify-receipt", out, code=2).stderr
    (tmp_path / "text").write_text("no receipt")
    refused = run("verify-receipt", tmp_path / "text", code=2).stderr
    assert refused == f"kvshelf: {tmp_path}/text is no receipt of an erasure\n"
    assert not any(b"the aster" in path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file())
    with open_store(url) as store:
        assert store.source(yours, tenant="acme") == "the iris"
    assert json.loads(run("erase", "--tenant", "acme", "--store", url).stdout)["counts"] == {"source": 1, "cache": 1}


def test_a_bundle_goes_from_one_store_to_another(cache: CompressedCache, tmp_path: Path) -> None:
    here, there, place, trust = (str(tmp_path / name) for name in ("here", "there", "place", "trust.json"))
    private, public = tmp_path / "bundles.pem", tmp_path / "public.pem"
    key = Ed25519PrivateKey.generate()
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with open_store(f"disk://{here}") as store:
        put = store.put(cache, name="parrots", labels={"team": "ship"}, judged=Judgement(quality=quality_of(0.9)))
        other = store.put(cache.encoded("lossless"), labels={"team": "ship"})
    pushed = run("push", place, "parrots", "--label", "team=ship", "--name", "ship", "--key", private,
                 "--producer", "the captain", "--store", f"disk://{here}")  # fmt: skip
    assert pushed.stdout.startswith("sha256:")
    pull = ("pull", place, "--trust", trust, "--store", f"disk://{there}")
    assert "No such file" in run(*pull, code=2).stderr
    run("trust", "captain", public, "--trust", trust)
    with open(trust, "rb") as keys:  # by a path that nobody can write, not even root
        fixed = ("pull", place, "--trust", f"/proc/{os.getpid()}/fd/{keys.fileno()}", "--store", f"disk://{there}")
        assert "make its folder writable" in run(*fixed, code=2).stderr
    assert not Path(there).exists(), "it is refused before any work"
    pulled = run(*pull)
    assert "ship number " in pulled.stderr
    assert ", signed by captain" in pulled.stderr
    with open_store(f"disk://{there}") as store:
        assert {manifest.blob_digest for manifest in store.list().data} == {put.blob_digest, other.blob_digest}
        first = store.stat(pulled.stdout.split()[0])
        assert (first.name, first.labels, first.quality) == ("parrots", {"team": "ship"}, quality_of(0.9))
    assert run(*pull).stdout == pulled.stdout, "again is no fault"
    assert "a bundle is signed" in run("push", place, "parrots", "--store", f"disk://{here}", code=2).stderr
    assert "no cache was named" in run("push", place, "--key", private, "--store", f"disk://{here}", code=2).stderr
    signed = tmp_path / "signed"
    run("push", signed, "parrots", "--key", private, "--signature-only", "--store", f"disk://{here}")
    with open_store(f"disk://{tmp_path}/mine?under=disk://{here}&signed={signed}&trust={trust}") as store:
        assert store.stat(put.id).name == "parrots"
        with pytest.raises(CacheCorrupt, match="that a trusted key has signed"):
            store.stat(other.id)
    assert "is missing" in run("pull", signed, "--trust", trust, "--store", f"disk://{there}", code=2).stderr
    blob = max((tmp_path / "place/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    fresh = f"disk://{tmp_path / 'fresh'}"
    assert "its digest differs" in run("pull", place, "--trust", trust, "--store", fresh, code=2).stderr
    with open_store(fresh) as store:
        assert not store.list().data, "nothing of a bundle is stored unless all of it is sound"
