"""URLs of object storage: what is taken, and that no message shows a credential."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.store.objects import address
from kvshelf.store.objects.address import ObjectPlace
from kvshelf.store.url import open_store

SECRET = "AKIAKEY:pa55word"


def test_a_url_with_everything() -> None:
    url = "s3://my-bucket/team/kv?endpoint=https://minio.internal:9000&region=eu-central-1&timeout_s=2.5"
    expected = ObjectPlace("s3", "my-bucket", "team/kv", "https://minio.internal:9000", "eu-central-1", 2.5)
    assert address.parse(url) == expected
    assert str(expected) == "s3://my-bucket/team/kv"


@pytest.mark.parametrize(
    "url", ["s3://my-bucket", "s3://my-bucket/", "s3://my-bucket/a/b_c.d/", "gs://b1x", "az://box"]
)
def test_urls_that_are_taken(url: str) -> None:
    assert str(address.parse(url)) == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://host/bucket", "unknown scheme 'http'"),
        ("s3:///prefix", "'' is not the name of a bucket"),
        ("s3://a", "'a' is not the name of a bucket"),
        ("s3://bucket:9000/prefix", "is not the name of a bucket"),
        ("s3://bucket/a//b", "single slashes"),
        ("s3://bucket/../other", "single slashes"),
        ("s3://bucket/a b", "single slashes"),
        ("s3://bucket/a?endpoint=minio:9000", "such as https://minio.internal:9000"),
        ("s3://bucket/a?endpoint=https://host/path", "such as https://minio.internal:9000"),
        ("s3://bucket/a?region=Frankfurt am Main", "such as eu-central-1"),
        ("s3://bucket/a?timeout_s=0", "seconds above 0"),
        ("s3://bucket/a?timeout_s=nan", "seconds above 0"),
        ("s3://bucket/a?timeout_s=soon", "not 'soon'"),
        ("s3://bucket/a?regions=x", "no parameter 'regions' (did you mean 'region'?)"),
        ("s3://bucket/a?aws_secret_access_key=x", "no parameter 'aws_secret_access_key'"),
        ("s3://bucket/a?region=x&region=y", "once"),
        ("s3://bucket/a#b", "nothing follows"),
        ("s3://bucket/a?region", "no URL"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        address.parse(url)
    assert said in caught.value.message
    assert caught.value.param == "store"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{SECRET}@bucket/prefix",
        f"redis://host?blobs={quote(f's3://{SECRET}@bucket/prefix', safe='')}",
        f"redis://host?blobs=s3://{SECRET}@bucket/prefix",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_store(url)
    assert "pa55word" not in caught.value.message
    assert "AKIAKEY" not in caught.value.message
    if url.startswith("redis"):
        assert "they come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)" in caught.value.message


def test_a_bare_bucket_as_a_home_is_refused_with_the_two_forms_that_work() -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_store("s3://bucket/prefix")
    assert "redis://host:6379/0?blobs=s3://bucket/prefix or disk:///absolute/path?blobs=s3://bucket/prefix" in (
        caught.value.message
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("disk:///tmp/a?blobs=s3://one1&blobs=s3://two2", "blobs is given twice"),
        ("disk:///tmp/a?blobs=disk:///tmp/b", "unknown scheme 'disk'"),
        ("ram:1GiB+disk:///tmp/t?max=1GiB&blobs=s3://one1+redis://host", "blobs= belongs to the home"),
        ("disk:///tmp/a?blob=s3://one1", "it has no parameter 'blob'"),
    ],
)
def test_blobs_in_the_wrong_place_are_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said.replace("?", r"\?")):
        open_store(url)


def test_a_home_is_made_only_once_its_url_is_sound(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        open_store(f"disk://{tmp_path}/home?blobs=s3://a")
    assert not (tmp_path / "home").exists()
