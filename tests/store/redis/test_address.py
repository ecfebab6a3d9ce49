from __future__ import annotations

from pathlib import Path

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.store.redis.address import RedisAddress, parse

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", RedisAddress("single", (("localhost", 6379),))),
        ("redis://localhost:7000/3", RedisAddress("single", (("localhost", 7000),), db=3)),
        ("redis://[::1]:7000/", RedisAddress("single", (("::1", 7000),))),
        ("redis://:p%40ss@h", RedisAddress("single", (("h", 6379),), password="p@ss")),
        ("redis://me:p@ss@h", RedisAddress("single", (("h", 6379),), user="me", password="p@ss")),
        ("rediss://h?ca=/etc/ca.pem", RedisAddress("single", (("h", 6379),), tls=True, ca="/etc/ca.pem")),
        ("redis://h?prefix=a_-9&timeout_s=2.5", RedisAddress("single", (("h", 6379),), prefix="a_-9", timeout_s=2.5)),
        (
            "redis-sentinel://u:p@a,b:5/my.master/2",
            RedisAddress("sentinel", (("a", 26379), ("b", 5)), "my.master", 2, "u", "p"),
        ),
        ("rediss-sentinel://a/m", RedisAddress("sentinel", (("a", 26379),), "m", tls=True)),
        ("redis-cluster://a:1,[::2]:2", RedisAddress("cluster", (("a", 1), ("::2", 2)))),
        ("rediss-cluster://a", RedisAddress("cluster", (("a", 6379),), tls=True)),
    ],
)
def test_url_is_understood(url: str, expected: RedisAddress) -> None:
    assert parse(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis:",
        "redis://",
        "http://localhost",
        "redis-other://localhost",
        "unix:///run/redis.sock",
        "redis://u@localhost",
        "redis://a,b",
        "redis://a:0",
        "redis://a:65536",
        "redis://a:x",
        "redis://a b",
        "redis://a/x",
        "redis://a/1/2",
        "redis://a/-1",
        "redis://a#x",
        "redis-sentinel://a",
        "redis-sentinel://a/",
        "redis-sentinel://a/m/x",
        "redis-sentinel://a/m m",
        "redis-cluster://a/1",
        "redis-cluster://a,",
        "redis://a?prefix=",
        "redis://a?prefix=a:b",
        "redis://a?prefix=a&prefix=b",
        "redis://a?timeout_s=0",
        "redis://a?timeout_s=0.04",
        "redis://a?timeout_s=61",
        "redis://a?timeout_s=nan",
        "redis://a?timeout_s=1e1",
        "redis://a?db=1",
        "redis://a?ca=/ca.pem",
        "rediss://a?ca=ca.pem",
        "redis://a?prefix",
    ],
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="redis-sentinel://") as caught:
        parse(url)
    assert caught.value.param == "store"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:{SECRET}@a:x",
        f"redis://u:?{SECRET}=1@a",
        f"redis://u:/{SECRET}@a",
        f"redis://u:#{SECRET}@a",
        f"redis://u:{SECRET}@a?nope=1",
        f"redis-cluster://u:{SECRET}@a/1",
        f"redis://u:[{SECRET}@a",
    ],
)
def test_password_is_in_no_refusal(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(url)
    assert SECRET not in str(caught.value)


def test_the_password_may_be_in_a_file_of_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("50% @/#s3cret\n")
    file.chmod(0o600)
    address = parse(f"redis://me@a?password_file={file}")
    assert (address.user, address.password) == ("me", "50% @/#s3cret")
    assert parse(f"redis://a?password_file={file}").password == "50% @/#s3cret"
    assert SECRET not in str(address) + repr(address)
    with pytest.raises(InvalidRequest, match="a password and a password_file"):
        parse(f"redis://me:other@a?password_file={file}")
    file.chmod(0o644)
    with pytest.raises(InvalidRequest, match=str(file)):
        parse(f"redis://me@a?password_file={file}")
    with pytest.raises(InvalidRequest, match="absent"):
        parse(f"redis://me@a?password_file={tmp_path}/absent")


@pytest.mark.parametrize("url", ["rediss://me:s3cret@[::1]:7000/3", "redis-sentinel://:s3cret@a,b:5/m/2"])
def test_shown_without_user_and_password(url: str) -> None:
    address = parse(url)
    assert SECRET not in str(address) + repr(address)
    shown = parse(str(address))
    assert (shown.kind, shown.hosts, shown.service, shown.db, shown.tls) == (
        address.kind,
        address.hosts,
        address.service,
        address.db,
        address.tls,
    )
