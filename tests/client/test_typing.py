"""What a type checker sees: every call has its own result type, although both clients share how a call is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
from collections.abc import AsyncIterator, Iterator
from typing import assert_type

from kvshelf import AsyncClient, Client, CompressedCache, Engine, open_store
from kvshelf.client import AnswerStream, AsyncAnswerStream
from kvshelf.api import (
    AnswerObject, CacheObject, Deleted, EstimateObject, JointAnswer, ModelObject, PolicyObject, RequestObject,
    SearchList, SelectorObject, Verification
)
"""

RIGHT = """
def use(client: Client) -> None:
    assert_type(client.caches.create(document="a", policy="full", ttl_s=60), CacheObject)
    assert_type(client.caches.create(file="a.txt", respond_async=True), RequestObject)
    assert_type(client.caches.create(document="a", levels=[0.5]), list[CacheObject])
    assert_type(client.caches.create(document="a", levels=[0.5], min_quality=0.9), CacheObject)
    assert_type(client.caches.create(document="a", split=True), list[CacheObject])
    assert_type(client.caches.create(document="a", split={"overlap_tokens": 9}, min_quality=0.9), list[CacheObject])
    assert_type(client.caches.create(messages=[], episodes={"count": 4}), list[CacheObject])
    assert_type(client.caches.query(["kvs_1", "kvs_2"], "a", route="nearest"), JointAnswer)
    assert_type(client.caches.retrieve("kvs_1"), CacheObject)
    assert_type(client.caches.list(limit=5), Iterator[CacheObject])
    assert_type(client.caches.search("a", labels={"a": "b"}, limit=3), SearchList)
    assert_type(client.caches.query("kvs_1", "a"), AnswerObject)
    assert_type(client.caches.query("kvs_1", ["a", "b"]), list[AnswerObject])
    assert_type(client.caches.query("kvs_1", messages=[{"role": "user", "content": "a"}]), AnswerObject)
    assert_type(client.caches.query(["kvs_1", "kvs_2"], "a"), JointAnswer)
    assert_type(client.caches.query(["kvs_1"], ["a", "b"], on_miss="recompute"), list[JointAnswer])
    assert_type(client.caches.query(["kvs_1"], messages=[{"role": "user", "content": "a"}]), JointAnswer)
    assert_type(client.caches.stream("kvs_1", prompt="a"), AnswerStream[AnswerObject])
    assert_type(client.caches.stream(["kvs_1"], "a"), AnswerStream[JointAnswer])
    assert_type(client.caches.stream(["kvs_1"], "a").answer, JointAnswer)
    assert_type(client.caches.download("kvs_1"), bytes)
    assert_type(client.caches.update("kvs_1", ttl_s=None, pinned=True), CacheObject)
    assert_type(client.caches.import_blob(b"", labels={"a": "b"}), CacheObject)
    assert_type(client.caches.verify("kvs_1"), Verification)
    assert_type(client.caches.delete("kvs_1"), Deleted)
    assert_type(client.requests.retrieve("req_1", wait_s=5), RequestObject)
    assert_type(client.estimate(file="a.txt", policy="full"), EstimateObject)
    assert_type(client.models.list(), list[ModelObject])
    assert_type(client.policies.list(), list[PolicyObject])
    assert_type(client.selectors.list(), list[SelectorObject])

async def ause(client: AsyncClient) -> None:
    assert_type(await client.caches.create(document="a"), CacheObject)
    assert_type(await client.caches.create(document="a", respond_async=True), RequestObject)
    assert_type(await client.caches.create(document="a", split=True), list[CacheObject])
    assert_type(await client.caches.retrieve("kvs_1"), CacheObject)
    assert_type(client.caches.list(), AsyncIterator[CacheObject])
    assert_type(await client.caches.search("a"), SearchList)
    assert_type(await client.caches.query("kvs_1", ["a", "b"]), list[AnswerObject])
    assert_type(await client.caches.query(["kvs_1"], "a"), JointAnswer)
    assert_type(await client.caches.stream("kvs_1", "a"), AsyncAnswerStream[AnswerObject])
    assert_type(await (await client.caches.stream(["kvs_1"], "a")).final(), JointAnswer)
    assert_type(await client.caches.download("kvs_1"), bytes)
    assert_type(await client.caches.update("kvs_1", name="a"), CacheObject)
    assert_type(await client.caches.verify("kvs_1"), Verification)
    assert_type(await client.estimate(document="a"), EstimateObject)

assert_type(Engine.load("kvshelf-tiny"), Engine)
assert_type(CompressedCache.from_bytes(b""), CompressedCache)
assert_type(open_store("disk:///x").get("kvs_1"), CompressedCache)
"""


WRONG = (
    'Client().caches.create(documents="a")',
    'Client().caches.create(document="a", compression_ratio="much")',
    "Client().caches.retrieve(5)",
    'Client().caches.update("kvs_1", ttl="long")',
    'Client().requests.retrieve("req_1", wait="long")',
    'Client().caches.query("kvs_1", 5)',
    'Client().caches.query(["kvs_1"], "a", compare=True)',
    'Client().caches.stream(["kvs_1", 5], "a")',
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of all sources in one run, for most of its time goes into what they import."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "right.py").write_text(HEAD + RIGHT)
    for number, wrong in enumerate(WRONG):
        (folder / f"wrong{number}.py").write_text(HEAD + wrong + "\n")
    root = Path(__file__).resolve().parent.parent.parent
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), *map(str, folder.iterdir())]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250).stdout
    assert "Found " in said, said  # it came to its end
    return said


def test_every_call_has_its_type(told: str) -> None:
    # Errors inside kvshelf itself are `make check`'s business.
    assert "right.py" not in told


@pytest.mark.parametrize("number", range(len(WRONG)), ids=WRONG)
def test_a_wrong_call_is_seen(told: str, number: int) -> None:
    assert f"wrong{number}.py" in told
