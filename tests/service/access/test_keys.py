"""API keys: the file that holds their digests, who is let in by them, and the commands that make and revoke them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from typer.testing import CliRunner

from kvshelf.cli import app
from kvshelf.errors import InvalidRequest, Unauthorized
from kvshelf.service.access import keyfile
from kvshelf.service.access.keyfile import KeyFile, Keys
from kvshelf.service.access.keys import LiveKeys

KEY = re.compile(r"kvsk_[0-9a-f]{16}_[0-9a-f]{64}")


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "api-keys.json")


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def test_a_key_is_known_by_its_digest_alone(file: KeyFile) -> None:
    record, key = file.create("acme", ["read", "write", "read"], name="ci", ttl_s=60)
    assert KEY.fullmatch(key)
    assert key.split("_")[1] == record.id
    assert key.split("_")[2] not in file.path.read_text()
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.read() == (record,)
    assert (record.tenant, record.scopes, record.name) == ("acme", ("read", "write"), "ci")
    assert record.expires_at == pytest.approx(record.created_at + 60)
    assert Keys(file.read()).identify(key) == record
    assert [path.name for path in file.path.parent.iterdir()] == ["api-keys.json"]


def test_keys_differ_and_only_the_right_secret_is_right(file: KeyFile) -> None:
    (one, first), (two, second) = (file.create("acme", ["read"]) for _ in range(2))
    assert one.id != two.id
    keys = Keys(file.read())
    assert keys.identify(second) == two
    last = "0" if first[-1] != "0" else "1"
    wrong = [
        first[:-1] + last,
        first.replace(one.id, two.id),
        first.replace(one.id, "0" * 16),
        first + "0",
        first[:-1],
        first.upper(),
        f" {first}",
        f"{first}\n",
        "",
        "kvsk_",
        "kvsk_" + "0" * 16 + "_" + "0" * 64,
        "\u0660" * 86,
    ]
    for key in wrong:
        with pytest.raises(Unauthorized) as refused:
            keys.identify(key)
        assert first[22:40] not in refused.value.message
    said = {refusal(keys, first[:-1] + last), refusal(keys, first.replace(one.id, "0" * 16))}
    assert len(said) == 1, "an unknown id and a wrong secret are told apart"


def refusal(keys: Keys, key: str) -> str:
    with pytest.raises(Unauthorized) as refused:
        keys.identify(key)
    return refused.value.message


def test_a_key_of_an_unknown_id_is_compared_too(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = file.create("acme", ["read"])
    compared: list[tuple[str, str]] = []
    compare = keyfile.hmac.compare_digest

    def watched(one: str, other: str) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(keyfile.hmac, "compare_digest", watched)
    refusal(Keys(file.read()), key.replace(key[5:21], "0" * 16))
    refusal(Keys(file.read()), key[:-4] + "0000")
    assert len(compared) == 2
    assert len(compared[0][1]) == len(compared[1][1])


def test_an_expired_key_is_said_to_be_so_to_its_holder_only(file: KeyFile) -> None:
    record, key = file.create("acme", ["read"], ttl_s=60)
    assert record.expires_at is not None
    late = record.expires_at
    assert Keys(file.read(), clock=lambda: late - 0.001).identify(key) == record
    expired = Keys(file.read(), clock=lambda: late)
    assert "expired" in refusal(expired, key)
    assert "expired" not in refusal(expired, key[:-4] + ("0000" if not key.endswith("0000") else "1111"))


def test_a_revoked_key_is_gone(file: KeyFile) -> None:
    (one, first), (two, second) = (file.create("acme", ["read"]) for _ in range(2))
    assert file.revoke(one.id) == one
    assert file.read() == (two,)
    refusal(Keys(file.read()), first)
    assert Keys(file.read()).identify(second) == two
    with pytest.raises(InvalidRequest, match=one.id):
        file.revoke(one.id)


@pytest.mark.parametrize(
    ("tenant", "scopes"),
    [
        ("", ["read"]),
        ("a/b", ["read"]),
        ("-a", ["read"]),
        ("a" * 65, ["read"]),
        ("a\n", ["read"]),
        ("a", []),
        ("a", ["root"]),
    ],
)
def test_what_no_key_can_be_for_is_refused(file: KeyFile, tenant: str, scopes: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        file.create(tenant, scopes)
    assert refused.value.param in ("tenant", "scopes")
    assert refused.value.message.startswith(f"{refused.value.param}: ")
    assert ("found 'root'" in refused.value.message) == (scopes == ["root"])
    assert not file.path.exists()


BROKEN = {
    "no JSON": "{",
    "a list": "[]",
    "another version": '{"version": 2, "keys": []}',
    "an unknown field": '{"version": 1, "keys": [], "extra": 1}',
    "half a record": '{"version": 1, "keys": [{"id": "0123456789abcdef"}]}',
    "nothing": "",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused_by_name(file: KeyFile, content: str) -> None:
    file.path.touch(0o600)
    file.path.write_text(content)
    with pytest.raises(InvalidRequest, match=str(file.path)) as refused:
        file.read()
    assert refused.value.param == "api_key_file"


def test_an_id_twice_is_refused(file: KeyFile) -> None:
    file.create("acme", ["read"])
    content = json.loads(file.path.read_text())
    file.path.write_text(json.dumps(content | {"keys": content["keys"] * 2}))
    with pytest.raises(InvalidRequest, match="twice"):
        file.read()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_can_reach_is_refused(file: KeyFile, mode: int) -> None:
    file.create("acme", ["read"])
    file.path.chmod(mode)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        file.read()


def _create(path: str) -> None:
    for _ in range(5):
        KeyFile(path).create("acme", ["read"])


def test_keys_that_are_made_at_once_are_all_there(file: KeyFile) -> None:
    file.create("acme", ["read"])
    processes = [multiprocessing.get_context("fork").Process(target=_create, args=(str(file.path),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(file.read()) == 21


def test_a_change_that_fails_leaves_the_file_as_it_was(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.create("acme", ["read"])
    before = file.path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidRequest, match="No space left"):
        file.create("other", ["read"])
    assert file.path.read_bytes() == before
    assert [path.name for path in file.path.parent.iterdir()] == ["api-keys.json"]


def test_who_calls_is_said_by_one_bearer_key(file: KeyFile) -> None:
    record, key = file.create("acme", ["read"])
    live = LiveKeys(file)
    caller = live.caller(bearer(key))
    assert (caller.tenant, caller.scopes, caller.key_id) == ("acme", {"read"}, record.id)
    assert live.caller(Headers({"authorization": f"bEARER  {key} "})) == caller
    assert live.caller(Headers({"x-api-key": key})) == caller
    refused = [
        Headers({}),
        Headers({"authorization": key}),
        Headers({"authorization": f"Basic {key}"}),
        Headers({"authorization": "Bearer"}),
        Headers({"x-api-key": key, "authorization": f"Bearer {key}"}),
        Headers({"x-api-key": f"Bearer {key}"}),
        Headers(raw=[(b"authorization", f"Bearer {key}".encode())] * 2),
        Headers(raw=[(b"authorization", b"Bearer \xff\xfe")]),
    ]
    for headers in refused:
        with pytest.raises(Unauthorized):
            live.caller(headers)


def test_the_file_is_followed_and_a_broken_one_changes_nothing(file: KeyFile) -> None:
    record, key = file.create("acme", ["read"])
    live = LiveKeys(file)
    _, later = file.create("other", ["write"])
    live.reread()
    assert live.caller(bearer(later)).tenant == "other"
    good = file.path.read_bytes()
    for breakage in (lambda: file.path.write_text("{"), lambda: file.path.chmod(0o644), file.path.unlink):
        breakage()
        live.reread()
        assert live.caller(bearer(key)).key_id == record.id
    file.path.touch(0o600)
    file.path.write_bytes(good)
    file.revoke(record.id)
    live.reread()
    with pytest.raises(Unauthorized):
        live.caller(bearer(key))
    assert live.caller(bearer(later)).tenant == "other"


def test_a_service_does_not_begin_with_a_broken_file(file: KeyFile) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        LiveKeys(file)


def command(*arguments: str, code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["keys", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def test_the_commands(file: KeyFile) -> None:
    path = f"--file={file.path}"
    printed, said = command(
        "create", path, "--tenant", "acme", "--scope", "read, admin", "--ttl", "90d", "--name", "ci"
    )
    key = printed.strip()
    assert KEY.fullmatch(key)
    assert key[22:] not in said
    record = Keys(file.read()).identify(key)
    assert (record.tenant, record.scopes, record.name) == ("acme", ("read", "admin"), "ci")
    assert record.expires_at == pytest.approx(record.created_at + 90 * 86400)
    shown, _ = command("list", path)
    assert record.id in shown
    assert "read,admin" in shown
    (listed,) = (json.loads(line) for line in command("list", path, "--json")[0].splitlines())
    assert (listed["id"], listed["tenant"]) == (record.id, "acme")
    assert record.sha256 not in shown + json.dumps(listed)
    assert record.id in command("revoke", path, record.id)[1]
    assert file.read() == ()
    for wrong in (
        ["revoke", path, record.id],
        ["create", path, "--tenant", "a", "--scope", "root"],
        ["list", "--file=/no"],
    ):
        assert "kvshelf:" in command(*wrong, code=2)[1]
