"""Bundles: what is pushed is pulled, and whatever was changed, is signed by others, is older or newer is refused."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvshelf.api import ModelObject, Quality
from kvshelf.artifact.blob import inspect
from kvshelf.artifact.exported import about_part, split
from kvshelf.errors import InvalidRequest
from kvshelf.store.about import About
from kvshelf.store.bundles import layout
from kvshelf.store.bundles.bundle import Bundle, opened, push
from kvshelf.store.bundles.places import BundleFolder, place_at
from kvshelf.store.bundles.trust import Trust
from kvshelf.store.erasure.signing import Signer
from tests.store.caches import make_cache
from tests.store.objects.servers import S3Server

QUALITY = Quality(agreement=0.9, low=0.8, high=0.95, worst=None, cues=40, kl=0.1, probe_s=1.5, version=1)
SIGNER, OTHER = (Signer(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2))
KEY, OTHER_KEY = (signer.signature("")["public_key"] for signer in (SIGNER, OTHER))


def export(seed: int, codec: str = "none", name: str = "", **about: Any) -> bytes:
    blob = make_cache(seed).to_bytes(codec)
    said = About(name=name, **about).model_dump_json().encode()
    return blob + about_part(inspect(blob).root, said, b"")


EXPORTS = [export(1, name="a", labels={"team": "law"}, quality=QUALITY), export(2, "int8"), export(3, "lossless")]


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    made = Trust(tmp_path / "trust.json")
    made.add("acme", KEY)
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    push(BundleFolder(tmp_path / "place"), "handbooks", EXPORTS, SIGNER, "Acme's librarians")
    return tmp_path / "place"


def pulled(place: Path, trust: Trust, name: str | None = None) -> list[bytes]:
    return list(opened(place_at(str(place)), trust, name).exports())


def require_refused(place: Path, trust: Trust, reason: str, match: str | None = None) -> None:
    with pytest.raises(InvalidRequest, match=match) as refused:
        pulled(place, trust)
    assert refused.value.details.get("reason") == reason, refused.value.message


def test_what_is_pushed_is_pulled_with_what_is_said_of_it(place: Path, trust: Trust) -> None:
    bundle = opened(place_at(str(place)), trust)
    assert list(bundle.exports()) == EXPORTS
    assert (bundle.producer, bundle.about.producer) == ("acme", "Acme's librarians")
    first, second, third = bundle.about.caches
    assert (first.name, first.labels, first.quality) == ("a", {"team": "law"}, QUALITY)
    assert (second.codec, second.quality, third.codec) == ("int8", None, "lossless")
    assert [said.root for said in bundle.about.caches] == [inspect(split(export).blob).root.hex() for export in EXPORTS]
    assert len(bundle.about.models) == 1
    model = inspect(split(EXPORTS[0]).blob).header.to_identity().model
    bundle.require_models([model.fingerprint()])
    linked = ModelObject(id="quantized", created=0, fingerprint="ab" * 20, linked={model.fingerprint(): 0.99})
    bundle.require_models(linked.read_fingerprints)  # it answers from their caches, as an import there knows
    with pytest.raises(InvalidRequest, match="which is not served here") as refused:
        bundle.require_models(["ab" * 20])
    assert refused.value.details["reason"] == "other_model"


def test_the_files_are_those_of_an_oci_image(place: Path) -> None:
    assert json.loads((place / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((place / "index.json").read_text())
    (entry,) = index["manifests"]
    manifest = json.loads((place / "blobs/sha256" / entry["digest"].removeprefix("sha256:")).read_text())
    assert index["schemaVersion"] == manifest["schemaVersion"] == 2
    for descriptor in (manifest["config"], *manifest["layers"]):
        data = (place / "blobs/sha256" / descriptor["digest"].removeprefix("sha256:")).read_bytes()
        assert (layout.digest_of(data), len(data)) == (descriptor["digest"], descriptor["size"])


def test_bundles_of_several_names_lie_side_by_side(place: Path, trust: Trust) -> None:
    push(BundleFolder(place), "letters", EXPORTS[:1], SIGNER)
    assert pulled(place, trust, "letters") == EXPORTS[:1]
    assert pulled(place, trust, "handbooks") == EXPORTS
    for name in (None, "minutes"):
        with pytest.raises(InvalidRequest, match="has the bundles handbooks, letters"):
            pulled(place, trust, name)


def test_keys_that_are_not_trusted_are_refused(place: Path, tmp_path: Path) -> None:
    stranger = Trust(tmp_path / "other.json")
    stranger.add("other", OTHER_KEY)
    require_refused(place, stranger, "untrusted_key", f"the key {KEY}")
    with pytest.raises(InvalidRequest, match="has another key of 'other' already"):
        stranger.add("other", KEY)
    for mode in (0o620, 0o602, 0o666):
        (tmp_path / "other.json").chmod(mode)
        with pytest.raises(InvalidRequest, match=f"can change it .mode {mode:o}.; run: chmod go-w"):
            pulled(place, stranger)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o444, 0o644])
def test_others_may_read_the_file_of_keys(place: Path, trust: Trust, tmp_path: Path, mode: int) -> None:
    (tmp_path / "trust.json").chmod(mode)
    assert len(pulled(place, trust)) == len(EXPORTS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_keys_that_another_user_can_change_is_refused(place: Path, trust: Trust, tmp_path: Path) -> None:
    (tmp_path / "trust.json").chmod(0o644)
    os.chown(tmp_path / "trust.json", 10_001, -1)
    with pytest.raises(InvalidRequest, match="it is of user 10001"):
        pulled(place, trust)


@pytest.fixture
def read_only(trust: Trust, tmp_path: Path) -> Iterator[Path]:  # noqa: ARG001 - it has made the file
    """The file of trusted keys, in a folder where nobody can make a file, not even root."""
    with (tmp_path / "trust.json").open("rb") as file:
        yield Path(f"/proc/self/fd/{file.fileno()}")


def test_a_file_of_keys_that_can_only_be_read_is_enough_until_something_is_to_be_noted(
    place: Path, read_only: Path
) -> None:
    bundle = opened(place_at(str(place)), Trust(read_only))
    with pytest.raises(
        InvalidRequest, match=r"cannot be written .*make its folder writable, or give a copy"
    ) as refused:
        bundle.require_takeable()
    assert refused.value.param == "--trust"


def test_what_a_file_that_can_only_be_read_has_as_taken_is_taken_again(
    place: Path, trust: Trust, tmp_path: Path
) -> None:
    taken(place, trust)
    with (tmp_path / "trust.json").open("rb") as file:
        bundle = opened(place_at(str(place)), Trust(Path(f"/proc/self/fd/{file.fileno()}")))
        bundle.require_takeable()
        bundle.taken()


def test_older_bundles_are_refused_even_where_the_newest_cannot_be_noted(
    place: Path, tmp_path: Path, read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixed, old = Trust(read_only), shutil.copytree(place, tmp_path / "old")
    push(BundleFolder(place), "handbooks", EXPORTS[:2], SIGNER)
    newest = taken(place, fixed)
    taken(place, fixed)
    (warning,) = caplog.messages
    said = f"until this process ends, bundles older than handbooks {newest.about.sequence} are refused"
    assert warning.endswith(said), "and it is said once"
    require_refused(old, fixed, "rollback", "this is an older one")


def rewritten(place: Path, change: Callable[[dict[str, Any]], None], signer: Signer | None = None) -> None:
    """Change the one entry of the index, and sign its digest anew."""
    index = json.loads((place / "index.json").read_text())
    (entry,) = index["manifests"]
    change(entry)
    if signer is not None:
        made = signer.signature(layout.signed_text(entry["digest"]))
        entry["annotations"] |= {"org.kvshelf.signature": made["signature"]}
    (place / "index.json").write_text(layout.canonical_json(index))


def test_a_signature_by_another_key_is_refused(place: Path, trust: Trust) -> None:
    rewritten(place, lambda _: None, OTHER)
    require_refused(place, trust, "bad_signature", "is not that of acme")


def test_another_name_over_a_signed_bundle_is_refused(place: Path, trust: Trust) -> None:
    rewritten(place, lambda entry: entry["annotations"].update({"org.opencontainers.image.ref.name": "letters"}))
    require_refused(place, trust, "malformed", "signed as 'handbooks'")


def said_anew(place: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change manifest and about, as a faulty or a later producer with the key would."""

    def sign(entry: dict[str, Any]) -> None:
        manifest = json.loads((place / layout.blob_name(entry["digest"])).read_text())
        about = json.loads((place / layout.blob_name(manifest["config"]["digest"])).read_text())
        change(manifest, about)
        manifest["config"] |= stored(place, about)
        entry |= stored(place, manifest)

    rewritten(place, sign, SIGNER)


def stored(place: Path, values: dict[str, Any]) -> dict[str, Any]:
    data = layout.canonical_json(values).encode()
    digest = layout.digest_of(data)
    (place / layout.blob_name(digest)).write_bytes(data)
    return {"digest": digest, "size": len(data)}


def test_a_bundle_of_a_newer_format_is_refused_as_that(place: Path, trust: Trust) -> None:
    said_anew(place, lambda _, about: about.update(format=2, colours=["red"]))
    require_refused(place, trust, "newer_format", "has format 2; this version of kvshelf reads 1. Upgrade")
    newer = "application/vnd.kvshelf.bundle.v3+json"
    said_anew(place, lambda manifest, about: (about.update(format=1), manifest.update(artifactType=newer)))
    require_refused(place, trust, "newer_format", "has format 3")
    rewritten(place, lambda entry: entry.update(artifactType=newer))
    require_refused(place, trust, "newer_format", "index.json has format 3")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _, about: about["models"][0].update(weights="other"), "other_model"),
        (lambda _, about: about["caches"][0].update(model=1), "other_model"),
        (lambda _, about: about["caches"][1].update(quality=QUALITY.model_dump(mode="json")), "malformed"),
        (lambda _, about: about["caches"][0].update(codec="int8"), "malformed"),
        (lambda _, about: about["caches"].pop(), "malformed"),
        (lambda manifest, _: manifest["layers"].reverse(), "malformed"),
        (lambda manifest, _: manifest["layers"][0].update(digest="sha256:" + "0" * 64), "malformed"),
        (lambda manifest, _: manifest["layers"][0].update(digest="sha256:../../../etc/passwd"), "malformed"),
        (lambda manifest, _: manifest["layers"][0].update(size=7), "malformed"),
        (lambda _, about: about.update(colour="red"), "malformed"),
    ],
)
def test_what_is_said_must_be_what_is_there(place: Path, trust: Trust, change: Any, reason: str) -> None:
    """Also of a producer who is trusted."""
    said_anew(place, change)
    require_refused(place, trust, reason)


def test_an_older_bundle_is_refused_once_a_newer_one_was_taken(place: Path, trust: Trust, tmp_path: Path) -> None:
    old = shutil.copytree(place, tmp_path / "old")
    before = taken(place, trust)
    assert taken(place, trust).entry == before.entry, "the same again is no rollback"
    push(BundleFolder(place), "handbooks", EXPORTS[:2], SIGNER)
    after = taken(place, trust)
    assert after.about.sequence > before.about.sequence
    require_refused(old, trust, "rollback", "this is an older one")
    said_anew(place, lambda _, about: about.update(producer="someone"))
    require_refused(place, trust, "rollback", "another one with the same number")
    push(BundleFolder(place), "letters", EXPORTS[:2], SIGNER)
    assert len(pulled(place, trust, "letters")) == 2, "another name has numbers of its own"


def taken(place: Path, trust: Trust) -> Bundle:
    bundle = opened(place_at(str(place)), trust)
    bundle.verify()
    bundle.taken()
    return bundle


def test_a_bundle_appears_whole_or_not_at_all(place: Path, trust: Trust) -> None:
    """Killed at any write, the one before it is there, and a second push completes the new one."""
    for number in range(4):
        folder = BundleFolder(place)
        with pytest.raises(KeyboardInterrupt):
            push(Dying(folder, number), "handbooks", [export(9), export(10)], SIGNER)
        assert pulled(place, trust) == EXPORTS
    push(BundleFolder(place), "handbooks", [export(9), export(10)], SIGNER)
    assert pulled(place, trust) == [export(9), export(10)]


class Dying:
    def __init__(self, folder: BundleFolder, writes: int) -> None:
        self._folder, self._left = folder, writes

    def read(self, name: str, most: int) -> bytes | None:
        return self._folder.read(name, most)

    def write(self, name: str, data: bytes) -> None:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        self._folder.write(name, data)


def test_any_flipped_bit_is_refused(place: Path, trust: Trust, soak: bool) -> None:
    """A bit anywhere in the files that the bundle has; 10,000 tries in a soak."""
    draw = random.Random(0 if not soak else None)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    sound = {path: path.read_bytes() for path in files}
    reasons: dict[str, int] = {}
    for number in range(10_000 if soak else 300):
        path = files[number % len(files)]
        data = bytearray(sound[path])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(InvalidRequest) as refused:
            pulled(place, trust)
        reason = refused.value.details.get("reason", "no such bundle")
        reasons[reason] = reasons.get(reason, 0) + 1
        path.write_bytes(sound[path])
    assert reasons["digest_mismatch"] > 100
    assert {"malformed", "bad_signature"} <= set(reasons)
    assert pulled(place, trust) == EXPORTS


def test_in_object_storage_it_is_as_in_a_folder(shared_s3: S3Server, trust: Trust) -> None:
    url = shared_s3.url(f"bundles-{secrets.token_hex(4)}")
    push(place_at(url), "handbooks", EXPORTS, SIGNER, "Acme's librarians")
    assert list(opened(place_at(url), trust).exports()) == EXPORTS
    manifest = opened(place_at(url), trust).entry
    place_at(url).write(layout.blob_name(manifest.digest), b"x" * 10_000)
    with pytest.raises(InvalidRequest, match="has more than"):
        opened(place_at(url), trust)
    push(place_at(url), "letters", EXPORTS, SIGNER)
    assert list(opened(place_at(url), trust, "letters").exports()) == EXPORTS


def test_no_bundle_and_no_place(trust: Trust, tmp_path: Path) -> None:
    require_refused(tmp_path, trust, "malformed", "the place has no oci-layout")
    with pytest.raises(InvalidRequest, match="not at https://"):
        place_at("https://example.org/bundle")
    with pytest.raises(InvalidRequest, match="a bundle has one at least"):
        push(BundleFolder(tmp_path), "handbooks", [], SIGNER)
    for name in ("", "Handbooks", "../x", "a/b"):
        with pytest.raises(InvalidRequest, match="a bundle is called by"):
            push(BundleFolder(tmp_path), name, EXPORTS[:1], SIGNER)
