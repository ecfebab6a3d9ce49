"""Errors on their way from a replica: ours arrive as themselves, Ray's are translated."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions as ray_errors
from ray.serve import exceptions as serve_errors

import kvshelf
from kvshelf.api import CreateCache, Query
from kvshelf.api.creation import SplitOptions
from kvshelf.api.inspect import KeptOf
from kvshelf.api.queries import Select
from kvshelf.errors import DocumentTooLong, InvalidRequest, KvshelfError, by_code
from kvshelf.workers.cluster.remote import MOST_BESIDE, RemoteEngine
from kvshelf.workers.replica.api import ReplicaApi
from kvshelf.workers.replica.calls import Caller

SELECT = Select(method="quest", params={"page": "x" * MOST_BESIDE})


@pytest.fixture
def remote() -> RemoteEngine:
    return RemoteEngine("m", "app", handle=None, target_replicas=1)  # type: ignore[arg-type]  # translating needs no handle


@pytest.mark.parametrize("code", sorted(by_code()))
def test_every_error_of_ours_crosses_processes_as_itself(remote: RemoteEngine, code: str) -> None:
    cls = by_code()[code]
    original = cls("words", param="field", retry_after_s=1.5)
    crossed = pickle.loads(pickle.dumps(original))
    wrapped = ray_errors.RayTaskError("f", "traceback", crossed).as_instanceof_cause()
    found = remote._translate(wrapped)
    assert type(found) is cls
    assert (found.message, found.param, found.details) == (original.message, original.param, original.details)


@pytest.mark.parametrize(
    ("foreign", "code"),
    [
        (serve_errors.BackPressureError(5, 5), "queue_full"),
        (ray_errors.ActorDiedError(), "worker_crashed"),
        (ray_errors.WorkerCrashedError(), "worker_crashed"),
        (ray_errors.ActorUnavailableError("gone", None), "no_worker"),
        (serve_errors.ReplicaUnavailableError("r"), "no_worker"),
        (ray_errors.TaskCancelledError(), "cancelled"),
        (serve_errors.RequestCancelledError(), "cancelled"),
        (TimeoutError(), "deadline_exceeded"),
        (ray_errors.RaySystemError("?"), "internal"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_ray_s_errors_become_ours(remote: RemoteEngine, foreign: Exception, code: str) -> None:
    found = remote._translate(foreign)
    assert found.code == code
    if code in ("queue_full", "worker_crashed", "no_worker"):
        assert found.details["retry_after_s"] > 0


def test_an_engine_goes_to_another_process_while_it_asks_ray(remote: RemoteEngine) -> None:
    remote._counting = Future()
    assert pickle.loads(pickle.dumps(remote)).model == "m"


def anything(_: ReplicaApi, *args: object, **about: object) -> Any:
    """A method of a replica."""


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        (CreateCache(document="x" * 101), DocumentTooLong),
        (KeptOf(document="x" * 101), DocumentTooLong),
        (Query(prompt="x" * 101), InvalidRequest),
        ("x" * 101, DocumentTooLong),
        (CreateCache(document="x" * 1_000_001, split=True), InvalidRequest),
        (CreateCache(document="x" * 640_001, split=SplitOptions(max_tokens=64)), InvalidRequest),
        (CreateCache(token_ids=[1] * 101), DocumentTooLong),
        (CreateCache(document="x", policy="snapkv", policy_params={"window": "x" * MOST_BESIDE}), InvalidRequest),
        (Query(prompt="x", select=SELECT), InvalidRequest),
        ([*["x" * 64] * (MOST_BESIDE >> 6), "x"], InvalidRequest),
    ],
    ids=["creation", "kept", "question", "source", "parts", "small parts", "ids", "parameters", "selector", "caches"],
)
def test_what_cannot_fit_goes_to_no_replica(remote: RemoteEngine, argument: object, error: type[KvshelfError]) -> None:
    """Documents to be split did, however long they were, and what is beside the texts of any request."""
    remote.most_tokens, remote.token_characters = 100, 1
    for engine in (remote, pickle.loads(pickle.dumps(remote))):
        with pytest.raises(error, match=r"more than|together|takes 100 tokens|at most"):
            asyncio.run(engine.call_within(1.0, anything, argument, caller=Caller()))
        with pytest.raises(error):
            asyncio.run(engine.broadcast(1.0, anything, argument, caller=Caller()))
        with pytest.raises(error):
            asyncio.run(anext(engine.stream(anything, argument, caller=Caller("t", 1.0))))


def test_what_may_fit_is_for_the_replica_to_count(remote: RemoteEngine) -> None:
    remote.most_tokens, remote.token_characters = 100, 1
    remote.require_bounded(None, CreateCache(document="x" * 100))
    remote.require_bounded(CreateCache(document="x" * 1_000_000, split=True), {"x": [1, 2.0, None, True]})
    remote.require_bounded(CreateCache(token_ids=[1] * 100))


def test_replicas_are_called_in_one_place() -> None:
    """Where what travels is bounded."""
    package = Path(kvshelf.__file__).parent
    callers = {path.name for path in package.rglob("*.py") if "DeploymentHandle" in path.read_text()}
    assert callers == {"remote.py"}
