"""A batch of a service: its input comes from the store, and its journal there keeps each row's end."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.corpus.row import Row, RowError
from kvshelf.corpus.run.stored import StoredJournal, StoredShard, last_results
from kvshelf.errors import FileNotFound, StateConflict
from kvshelf.store.base import Store
from kvshelf.store.url import StoreConfig


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(f"disk://{tmp_path}/shelf")


@pytest.fixture
def store(config: StoreConfig) -> Iterator[Store]:
    with config.open() as store:
        yield store


@pytest.fixture
def batch_id(store: Store) -> str:
    return store.batches.create("me", {}, now=1.0, expires_at=2.0).id


def taken(store: Store, batch_id: str) -> StoredJournal:
    """The journal of a process that takes over the batch."""
    term = store.batches.table.take(batch_id, lease_s=0.0)
    assert term is not None
    return StoredJournal(store.batches, batch_id, term)


def made(line: int, cache_id: str = "kvs_1", **fields: object) -> Row:
    return Row("rows.jsonl", line, f"row-{line}", cache_id=cache_id, attempts=1, **fields)  # type: ignore[arg-type]


def lost(line: int, code: str, attempts: int = 3) -> Row:
    return Row("rows.jsonl", line, f"row-{line}", error=RowError(code, "why"), attempts=attempts)


def test_the_last_end_of_a_row_counts(store: Store, batch_id: str) -> None:
    journal = taken(store, batch_id)
    journal.append([made(1, seconds=2.5, quality={"agreement": 0.5}), lost(2, "worker_crashed"), made(3)])
    journal.append([made(2, "kvs_2"), lost(4, "internal")])
    ends = [made(1, seconds=2.5, quality={"agreement": 0.5}), made(3), made(2, "kvs_2"), lost(4, "internal")]
    assert list(journal.finished()) == ends
    assert list(last_results(store.batches, batch_id)) == ends


def test_a_run_that_goes_on_changes_nothing_of_what_was_done(store: Store, batch_id: str) -> None:
    """A resumed run meets every row again as reused; the journal keeps the first end with its cost."""
    taken(store, batch_id).append([made(1, seconds=2.5), lost(2, "worker_crashed"), made(3, "kvs_3")])
    again = taken(store, batch_id)
    again.append([made(1, reused=True), lost(2, "worker_crashed"), made(3, "kvs_other", reused=True), made(4)])
    again.append([made(4, reused=True)])
    ends = {result.line: result for result in last_results(store.batches, batch_id)}
    assert ends == {
        1: made(1, seconds=2.5), 2: lost(2, "worker_crashed"), 3: made(3, "kvs_other", reused=True), 4: made(4)
    }  # fmt: skip
    assert len(list(store.batches.journal(batch_id))) == 5, "the journal does not grow by what it has"


def test_who_was_overtaken_adds_nothing(store: Store, batch_id: str) -> None:
    first = taken(store, batch_id)
    first.append([made(1)])
    second = taken(store, batch_id)
    with pytest.raises(StateConflict, match="is over"):
        first.append([made(2)])
    second.append([made(3)])
    assert [result.line for result in second.finished()] == [1, 3]


def test_a_file_of_the_home_is_a_source(store: Store, config: StoreConfig, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"custom_id": "a", "document": "one"}\nno row\n{"document": "two", "policy": "full"}')
    with path.open("rb") as content:
        file = store.files.create(content, tenant="me", filename="rows.jsonl", purpose="batch")
    shard = StoredShard(config, "me", file.id, file.filename, {"policy": "lagkv"}, file.nbytes, 3)
    rows = list(pickle.loads(pickle.dumps(shard)).read())
    assert [(row.source, row.line, row.custom_id, row.error is None) for row in rows] == [
        ("rows.jsonl", 1, "a", True), ("rows.jsonl", 2, None, False), ("rows.jsonl", 3, None, True)
    ]  # fmt: skip
    assert [row.spec.policy for row in rows if row.spec is not None] == ["lagkv", "full"]
    store.files.delete(file.id, tenant="me")
    with pytest.raises(FileNotFound):
        list(shard.read())
