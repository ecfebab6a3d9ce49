"""Searching in a replica: what is compared, what is left out, and what is read once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvshelf.api import CreateCache, SearchCaches
from kvshelf.engine.engine import Engine
from kvshelf.engine.summary import score, scores
from kvshelf.errors import InvalidRequest
from kvshelf.store.disk import DiskStore
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.replica import Replica
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.search import searches as module
from kvshelf.workers.replica.search import summaries

pytestmark = pytest.mark.anyio

TEXTS = ["The lamp burns whale oil. " * 20, "A ferry crosses the sound. " * 20, "The fog horn sounds at noon. " * 20]


class Counting(DiskStore):
    """A store that counts the caches it opens, and the pages of its listings."""

    opened = listed = 0

    def list(self, **query):
        self.listed += 1
        return super().list(**query)

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
    made = await replica.create(
        CreateCache.model_validate({"document": text, "policy": "full"} | spec), caller=Caller(tenant)
    )
    return made.manifest.id


async def test_summaries_are_read_once(replica: Replica, store: Counting) -> None:
    ids = [await put(replica, text) for text in TEXTS]
    store.opened = 0
    first = await replica.search(SearchCaches(query="ferry crosses"), caller=Caller("t"))
    assert (first.data[0].cache_id, first.searched, store.opened) == (ids[1], 3, 3)
    again = await replica.search(SearchCaches(query="ferry crosses"), caller=Caller("t"))
    assert (again.data, store.opened) == (first.data, 3)
    assert [phase.name for phase in again.phases] == ["list", "read", "code", "rank"]


async def test_a_tenant_searches_its_own(replica: Replica) -> None:
    theirs = await put(replica, TEXTS[0], tenant="other")
    mine = await put(replica, TEXTS[1], tenant="t")
    found = await replica.search(SearchCaches(query="lamp"), caller=Caller("t"))
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
    entry = store.index.find(broken, "t")
    assert entry is not None
    (path,) = (path for path in (tmp_path / "home").rglob("*.kvb") if entry.name in str(path))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = await replica.search(SearchCaches(query="lamp"), caller=Caller("t"))
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
    search_codes = engine.searcher.codes
    monkeypatch.setattr(engine.searcher, "codes", lambda ids: runs.append(ids) or search_codes(ids))
    empty = await replica.search(SearchCaches(query="lamp", labels={"no": "such"}), caller=Caller("t"))
    assert (empty.data, empty.searched, empty.prefill_tokens, runs) == ([], 0, 0, [])
    with pytest.raises(InvalidRequest, match="empty"):
        await replica.search(SearchCaches(query=" "), caller=Caller("t"))
    with pytest.raises(InvalidRequest, match="tokens"):
        await replica.search(SearchCaches(query="tide " * 20_000), caller=Caller("t"))
    assert runs == []


async def test_too_many_caches_are_refused(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in TEXTS:
        await put(replica, text)
    monkeypatch.setattr(module, "_PAGE", 1)
    monkeypatch.setattr(module, "MOST_CACHES", 3)
    assert (await replica.search(SearchCaches(query="lamp"), caller=Caller("t"))).searched == 3, "page by page"
    monkeypatch.setattr(module, "MOST_CACHES", 2)
    with pytest.raises(InvalidRequest, match="over 2 caches") as refusal:
        await replica.search(SearchCaches(query="lamp"), caller=Caller("t"))
    assert refusal.value.param == "labels"


async def test_a_search_reads_no_manifest_twice(replica: Replica, store: Counting) -> None:
    """What is new or has changed is read, and nothing else."""
    ids = [await put(replica, text, labels={"n": str(n)}) for n, text in enumerate(TEXTS[:2])]
    assert await ranked(replica, "ferry crosses") == [ids[1], ids[0]]
    store.listed = store.opened = 0
    assert await ranked(replica, "ferry crosses") == [ids[1], ids[0]]
    assert (store.listed, store.opened) == (0, 0)
    ids.append(await put(replica, TEXTS[2]))
    assert (await ranked(replica, "fog horn"))[0] == ids[2]
    store.update(ids[0], tenant="t", labels={"n": "1"})
    assert set(await ranked(replica, "ferry crosses", labels={"n": "1"})) == {ids[0], ids[1]}
    assert await ranked(replica, "ferry crosses", labels={"n": "0"}) == []
    assert (store.listed, store.opened) == (0, 1), "the one that is new"


async def test_what_ended_is_not_found(replica: Replica, store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, expiring, stays = [await put(replica, text) for text in TEXTS]
    assert len(await ranked(replica, "lamp")) == 3
    store.delete(gone, tenant="t")
    assert set(await ranked(replica, "lamp")) == {expiring, stays}
    now = time.time()
    store.update(expiring, tenant="t", expires_at=now + 60)
    assert set(await ranked(replica, "lamp")) == {expiring, stays}
    monkeypatch.setattr(store, "clock", lambda: now + 61)
    monkeypatch.setattr(store.reader, "clock", lambda: now + 61)
    assert await ranked(replica, "lamp") == [stays], "no sweep has ended it yet"
    again = await put(replica, TEXTS[0])
    assert (again, set(await ranked(replica, "lamp"))) == (gone, {gone, stays})


async def test_what_ends_while_it_is_compared_is_not_found(
    replica: Replica, store: Counting, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [await put(replica, text, labels={"a": "b"}) for text in TEXTS]
    search_codes = engine.searcher.codes

    def meanwhile(token_ids: list[int]) -> object:
        store.delete(ids[1], tenant="t")
        store.update(ids[0], tenant="t", labels={})
        return search_codes(token_ids)

    monkeypatch.setattr(engine.searcher, "codes", meanwhile)
    assert await ranked(replica, "ferry crosses", labels={"a": "b"}) == [ids[2]]


async def test_summaries_without_room_are_read_by_each_search(
    replica: Replica, store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    ids = [await put(replica, text) for text in TEXTS]
    found = await ranked(replica, "ferry crosses")
    assert found[0] == ids[1]
    searches = replica.searches
    searches.shelved.clear()
    searches.held_bytes = 2500  # of three records, and the first page of summaries
    assert await ranked(replica, "ferry crosses") == found
    store.opened = 0
    assert await ranked(replica, "ferry crosses") == found
    assert store.opened == 1


async def test_tenants_that_searched_longest_ago_are_forgotten(replica: Replica) -> None:
    for tenant in ("one", "two", "three"):
        await put(replica, TEXTS[0], tenant=tenant)
    searches = replica.searches
    for tenant in ("one", "two", "one", "three"):
        await replica.search(SearchCaches(query="lamp"), caller=Caller(tenant))
        searches.held_bytes = 2 * searches.shelved["one"].nbytes + 10
    assert list(searches.shelved) == ["one", "three"]


async def test_a_question_longer_than_any_is_refused(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TOKENS", 8)
    await put(replica, TEXTS[0])
    assert len(await ranked(replica, "lamp")) == 1
    with pytest.raises(InvalidRequest, match="a search takes 8") as refusal:
        await ranked(replica, "lamp " * 9)
    assert refusal.value.param == "query"


async def ranked(replica: Replica, query: str, **filters: object) -> list[str]:
    spec = SearchCaches.model_validate({"query": query} | filters)
    return [hit.cache_id for hit in (await replica.search(spec, caller=Caller("t"))).data]


def test_summaries_keep_their_places_as_blocks_fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "BLOCK_CODES", 20)
    draw = np.random.default_rng(1)
    made = [[draw.integers(0, 2**63, int(n), dtype=np.uint64) for n in draw.integers(1, 9, 2)] for _ in range(60)]
    held = summaries.Summaries()
    for start, end in pairwise([0, 1, 5, 6, 30, 60]):
        assert held.add(made[start:end]) == start
    assert len(held) == 60
    assert len(held.blocks) > 5
    assert held.nbytes == sum(block.nbytes for block in held.blocks)
    for place, summary in enumerate(made):
        assert all(map(np.array_equal, held.at(place), summary))
    chosen = draw.permutation(60)[:7]
    blocks, places = held.of(chosen)
    question = [codes[:3] for codes in made[4]]
    alone = score(question, [made[place] for place in chosen])
    assert scores(question, blocks, places).tolist() == pytest.approx(alone, abs=1e-6)
