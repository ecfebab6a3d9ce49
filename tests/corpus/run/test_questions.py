"""Questions of a batch on their way to an answer: attempts, errors that end them, and what an earlier run answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.api.strict import parse_request
from kvshelf.corpus.row import Row, RowError
from kvshelf.corpus.run.caller import RowAnswer, RowCaller, Shares
from kvshelf.corpus.run.progress import RunOptions
from kvshelf.corpus.run.runner import Runner
from kvshelf.corpus.run.stored import QuestionShard, StoredJournal
from kvshelf.errors import (
    CacheNotFound,
    KvshelfError,
    NoWorker,
    QueueFull,
    QuotaExceeded,
    StoreError,
    WorkerCrashed,
)
from kvshelf.store.disk import DiskStore
from kvshelf.store.url import StoreConfig

MESSAGES = [{"role": "user", "content": "Why?"}]


def ends(*outcomes: KvshelfError | str) -> Callable[[], Awaitable[str]]:
    """A call that ends so, one time after the other."""
    left = list(outcomes)

    async def call() -> str:
        end = left.pop(0)
        if isinstance(end, KvshelfError):
            raise end
        return end

    return call


@pytest.mark.parametrize(
    ("outcomes", "end", "attempts"),
    [
        (["yes"], "yes", 1),
        ([WorkerCrashed("died"), "yes"], "yes", 2),
        ([NoWorker("none", retry_after_s=0.0), QueueFull("full", retry_after_s=0.0), "yes"], "yes", 1),
        ([WorkerCrashed("died", retry_after_s=0.0)] * 3, "worker_crashed", 3),
        ([CacheNotFound("gone"), "never"], CacheNotFound.code, 1),
    ],
)
def test_attempts_that_count_and_those_that_do_not(outcomes: list[KvshelfError | str], end: str, attempts: int) -> None:
    runner = Runner(StoreError, QuotaExceeded)
    runner.going.set()
    outcome, counted = asyncio.run(runner.tried(ends(*outcomes), 3))
    assert (outcome.code if isinstance(outcome, KvshelfError) else outcome, counted) == (end, attempts)


def test_the_time_of_failed_attempts_counts(tmp_path: Path) -> None:
    """So that a batch of questions that all kill their worker uses up its GPU hours, too."""

    async def asks(*_: Any, **__: Any) -> RowAnswer:
        await asyncio.sleep(0.02)
        raise WorkerCrashed("died", retry_after_s=0.0)

    async def settled() -> Row:
        with DiskStore.open(tmp_path / "home") as store:
            caller = RowCaller({"m": None}, store, RunOptions("me", "b"), 0.0, 1, asks)  # type: ignore[dict-item]
            caller.going.set()
            question = parse_request(ChatCompletionRequest, {"cache_id": "kvs_1", "messages": MESSAGES})
            return await caller.settle(Row("q.jsonl", 1, "q-1", question=question))

    row = asyncio.run(settled())
    assert (row.error and row.error.code, row.attempts) == ("worker_crashed", 3)
    assert row.seconds >= 3 * 0.02


@pytest.mark.parametrize("again", [False, True])
def test_what_an_earlier_run_ended_comes_as_it_ended(tmp_path: Path, *, again: bool) -> None:
    """The shard gives the same rows whatever is recorded after it was made."""
    config = StoreConfig(f"disk://{tmp_path}/shelf")
    with config.open() as store:
        body = {"cache_id": "kvs_1", "messages": MESSAGES}
        request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        data = "\n".join(json.dumps({"custom_id": f"q-{n}", **request}) for n in range(1, 5)).encode()
        path = tmp_path / "q.jsonl"
        path.write_bytes(data)
        with path.open("rb") as content:
            file = store.files.create(content, tenant="me", filename="q.jsonl", purpose="batch")
        batch_id = store.batches.create("me", {}, now=1.0, expires_at=2.0).id
        term = store.batches.table.take(batch_id, lease_s=0.0)
        assert term is not None
        journal = StoredJournal(store.batches, batch_id, term)
        done = Row("q.jsonl", 1, "q-1", answer={"id": "chatcmpl-1"}, tokens=7, attempts=1, seconds=1.0)
        lost = Row("q.jsonl", 2, "q-2", error=RowError("worker_crashed", "why"), attempts=3)
        journal.append([done, lost])
        of_file = (config, "me", file.id, "q.jsonl", {}, len(data), 4)
        shard = QuestionShard(*of_file, batch_id=batch_id, recorded=2, retry_failed=again)
        first = list(shard.read())
        journal.append([replace(done, line=3, custom_id="q-3")])
        assert list(shard.read()) == first

        open_ = [row.line for row in first if row.question is not None]
        assert open_ == ([2, 3, 4] if again else [3, 4])
        assert (first[0].reused, first[0].tokens, first[0].seconds, first[0].answer) == (True, 7, 0.0, None)
        journal.append([row for row in first if row.question is None])
        assert [row.answer for row in journal.finished() if row.line == 1] == [{"id": "chatcmpl-1"}]
        assert len(list(store.batches.journal(batch_id))) == 3, "the journal does not grow by what it has"


def test_calls_at_work_together_share_the_time() -> None:
    shares = Shares(replicas=1)
    began = time.monotonic()
    with shares.part() as first:
        time.sleep(0.02)
        with shares.part() as second:
            time.sleep(0.02)
            later = second()
        time.sleep(0.02)
        whole = first() + later
    passed = time.monotonic() - began
    assert whole == pytest.approx(passed, rel=0.02)
    assert 0.01 <= later <= passed / 2 - 0.01


@pytest.mark.parametrize(("replicas", "busy"), [(0.5, 0.5), (2, 2), (3, 3), (9, 4)])
def test_the_time_of_each_busy_replica_counts(replicas: float, busy: float) -> None:
    """Half a replica is one that two callers share."""
    shares = Shares(replicas)
    with ExitStack() as stack:
        began = time.monotonic()
        calls = [stack.enter_context(shares.part()) for _ in range(4)]
        time.sleep(0.05)
        passed = time.monotonic() - began
        assert sum(seconds() for seconds in calls) == pytest.approx(busy * passed, rel=0.05)
