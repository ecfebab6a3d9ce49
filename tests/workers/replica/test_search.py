"""Searching in a replica: what is compared, what is left out, and what is read once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvshelf.api import CreateCache, SearchCaches
from kvshelf.errors import InvalidRequest
from kvshelf.store.disk import DiskStore
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.replica import search as module
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.search import HeldSummaries

pytestmark = pytest.mark.anyio

TEXTS = ["The lamp burns whale oil. " * 20, "A ferry crosses the sound. " * 20, "The fog horn sounds at noon. " * 20]


class Counting(DiskStore):
    """A store that counts the caches it opens."""

    opened = 0

    def open_cache(self, cache_id, *, tenant="default"):
        self.opened += 1
        return super().open_cache(cache_id, tenant=tenant)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Engine:
    return Engine.load(str(tiny_folder), device="cpu")


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    store = Counting.open(tmp_path / "home")
    assert isinstance(store, Counting)
    return store


@pytest.fixture
async def replica(engine: Engine, store: Counting) -> AsyncIterator[Replica]:
    replica = Replica(engine, store, Scheduler(engine))
    replica.start()
    yield replica
    replica.stop()


async def put(replica: Replica, text: str, tenant: str = "t", **spec: object) -> str:
    made = await replica.create(CreateCache.model_validate({"document": text, "policy": "full"} | spec), tenant=tenant)
    return made.manifest.id


async def test_summaries_are_read_once(replica: Replica, store: Counting) -> None:
    ids = [await put(replica, text) for text in TEXTS]
    store.opened = 0
    first = await replica.search(SearchCaches(query="ferry crosses"), tenant="t")
    assert (first.data[0].cache_id, first.searched, store.opened) == (ids[1], 3, 3)
    again = await replica.search(SearchCaches(query="ferry crosses"), tenant="t")
    assert (again.data, store.opened) == (first.data, 3)
    assert [phase.name for phase in again.phases] == ["list", "read", "code", "rank"]


async def test_a_tenant_searches_its_own(replica: Replica) -> None:
    theirs = await put(replica, TEXTS[0], tenant="other")
    mine = await put(replica, TEXTS[1], tenant="t")
    found = await replica.search(SearchCaches(query="lamp"), tenant="t")
    assert [hit.cache_id for hit in found.data] == [mine]
    assert theirs != mine


async def test_what_is_left_out_is_counted(replica: Replica, store: Counting, engine: Engine, tmp_path: Path) -> None:
    good = await put(replica, TEXTS[0])
    of_others = replace(engine.identity, weights="0" * 40)
    cache = engine.compress(TEXTS[1], policy="full")
    store.put(replace(cache, identity=replace(cache.identity, model=of_others)), tenant="t")
    store.put(replace(engine.compress(TEXTS[2], policy="full"), summary=()), tenant="t")
    longer = engine.compress(TEXTS[2] * 2, policy="full")
    store.put(replace(longer, summary=longer.summary[:1]), tenant="t")
    await put(replica, TEXTS[0], policy="knorm", compression_ratio=0.5)
    broken = await put(replica, TEXTS[1], policy="knorm")
    entry = store._index.find(broken, "t")
    assert entry is not None
    (path,) = (path for path in (tmp_path / "home").rglob("*.kvb") if entry.name in str(path))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = await replica.search(SearchCaches(query="lamp"), tenant="t")
    assert found.skipped.model_dump() == {
        "same_document": 1, "other_model": 1, "without_summary": 2, "unreadable": 1
    }  # fmt: skip
    assert found.searched == 1
    assert [hit.cache_id for hit in found.data] != [good], "the newest stands for its document"


async def test_nothing_to_compare_runs_no_model(
    replica: Replica, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(replica, TEXTS[0])
    runs: list[object] = []
    search_codes = engine.search_codes
    monkeypatch.setattr(engine, "search_codes", lambda ids: runs.append(ids) or search_codes(ids))
    empty = await replica.search(SearchCaches(query="lamp", labels={"no": "such"}), tenant="t")
    assert (empty.data, empty.searched, empty.prefill_tokens, runs) == ([], 0, 0, [])
    with pytest.raises(InvalidRequest, match="empty"):
        await replica.search(SearchCaches(query=" "), tenant="t")
    with pytest.raises(InvalidRequest, match="tokens"):
        await replica.search(SearchCaches(query="tide " * 20_000), tenant="t")
    assert runs == []


async def test_too_many_caches_are_refused(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in TEXTS:
        await put(replica, text)
    monkeypatch.setattr(module, "_PAGE", 1)
    monkeypatch.setattr(module, "MOST_CACHES", 3)
    assert (await replica.search(SearchCaches(query="lamp"), tenant="t")).searched == 3, "page by page"
    monkeypatch.setattr(module, "MOST_CACHES", 2)
    with pytest.raises(InvalidRequest, match="over 2 caches") as refusal:
        await replica.search(SearchCaches(query="lamp"), tenant="t")
    assert refusal.value.param == "labels"


def test_held_summaries_give_way_to_newer_ones() -> None:
    held = HeldSummaries(max_bytes=20_000)
    for number in range(3):
        held.keep(str(number), [np.zeros(1000, np.uint64)])
        held.find("0")
    assert [held.find(str(number)) is None for number in range(3)] == [False, True, False]
