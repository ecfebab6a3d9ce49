"""What every home promises of its job table."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshelf.errors import QuotaExceeded, StateConflict, StoreUnavailable
from kvshelf.store.blobs import new_name
from kvshelf.store.index import Index, Quota, Writing
from kvshelf.store.table import Item, JobTable
from tests.store.indexes import Home, disk_home, empty_redis_home
from tests.store.test_index import race


@pytest.fixture(params=["disk", "redis"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "disk":
        return disk_home(tmp_path / "home")
    return empty_redis_home(request.getfixturevalue("shared_valkey"))


@pytest.fixture
def index(home: Home) -> Iterator[Index]:
    index = home.open()
    yield index
    index.close()


@pytest.fixture
def table(index: Index) -> JobTable:
    return index.jobs


def item(number: int = 1, **fields: Any) -> Item:
    values: dict[str, Any] = {"kind": "batch", "id": f"batch_{number}", "tenant": "me", "text": "{}", "open": True}
    return Item(**values | fields)


def test_an_item_is_changed_only_as_it_was_seen(table: JobTable, home: Home) -> None:
    new = item(text='{"ü": 1}', due=5.5)
    added = table.add(new)
    assert added is not None
    assert added == replace(new, created_at=added.created_at, updated_at=added.created_at)
    assert table.find("batch_1", "me") == table.find("batch_1", None) == added
    assert table.add(item(text="another")) is None
    home.wait(1)
    changed = table.change(item(text='{"a": 2}', open=False))
    assert changed is not None
    assert changed.updated_at > changed.created_at == added.created_at
    assert changed == replace(added, text='{"a": 2}', version=1, open=False, due=None, updated_at=changed.updated_at)
    assert table.find("batch_1", "me") == changed
    assert table.change(item(text="stale")) is None
    assert table.find("batch_1", "me") == changed
    assert table.change(item(9)) is None


def test_of_two_processes_that_saw_the_same_one_succeeds(table: JobTable, home: Home) -> None:
    for number in range(20):
        table.add(item(number))
    assert race(home, 20, lambda index, number: index.jobs.change(item(number, text="mine")) is not None) == [1] * 20


def test_of_two_processes_one_gets_the_lease(table: JobTable, home: Home) -> None:
    for number in range(20):
        table.add(item(number))
    taken = race(home, 20, lambda index, number: index.jobs.take(f"batch_{number}", lease_s=600) is not None)
    assert taken == [1] * 20


def test_listings_go_from_the_newest_to_the_oldest_of_one_tenant(table: JobTable) -> None:
    for number in range(5):
        table.add(item(number))
    table.add(item(7, tenant="other"))
    table.add(item(8, kind="file"))
    assert [item.id for item in table.listing("batch", "me", None, 3)] == ["batch_4", "batch_3", "batch_2"]
    assert [item.id for item in table.listing("batch", "me", "batch_2", 3)] == ["batch_1", "batch_0"]
    for after in ("batch_7", "batch_8", "nothing"):
        assert table.listing("batch", "me", after, 3) == []
    assert table.find("batch_7", "me") is None


def test_open_items_and_those_that_are_due(table: JobTable) -> None:
    for number in range(3):
        table.add(item(number, open=True, due=10.0 + number))
    assert [item.id for item in table.open_items("batch")] == ["batch_0", "batch_1", "batch_2"]
    assert table.change(item(1, open=False, due=None)) is not None
    assert [item.id for item in table.open_items("batch")] == ["batch_0", "batch_2"]
    assert table.open_items("file") == []
    assert table.forget("batch", 9.0) == table.forget("file", 99.0) == 0
    assert table.forget("batch", 11.0) == 1
    assert table.find("batch_0", "me") is None
    assert table.find("batch_1", "me") is not None, "it is due no more"
    assert [item.id for item in table.open_items("batch")] == ["batch_2"]
    assert table.remove("batch_2")
    assert not table.remove("batch_2")
    assert table.open_items("batch") == []
    assert table.listing("batch", "me", None, 9) == [table.find("batch_1", "me")]


def test_many_items_are_forgotten_at_once(table: JobTable) -> None:
    """As many as Redis forgets in one step, and it looks for more."""
    for number in range(503):
        table.add(item(number, due=1.0 + number))
    assert table.forget("batch", 500.5) == 500
    assert [item.id for item in table.open_items("batch")] == ["batch_500", "batch_501", "batch_502"]


def test_the_term_is_the_fence(table: JobTable, home: Home) -> None:
    table.add(item())
    brief, lease_s = 3 * home.tick_s, 1000 * home.tick_s
    assert table.take("batch_1", lease_s=lease_s) == 1
    assert table.take("batch_1", lease_s=lease_s) is None
    table.append("batch_1", 1, [b"one"])
    assert table.change(item(text="first"), term=1) is not None
    table.renew("batch_1", 1, lease_s=brief)
    home.wait(2)
    table.renew("batch_1", 1, lease_s=lease_s)
    home.wait(2)
    assert table.take("batch_1", lease_s=lease_s) is None, "it was renewed"
    table.renew("batch_1", 1, lease_s=brief)
    home.wait(4)
    assert table.take("batch_1", lease_s=lease_s) == 2
    for late in (
        lambda: table.renew("batch_1", 1, lease_s=lease_s),
        lambda: table.append("batch_1", 1, [b"late"]),
    ):
        with pytest.raises(StateConflict, match="term 1 of 'batch_1' is over"):
            late()
    assert table.change(item(text="late", version=1), term=1) is None
    table.release("batch_1", 1)
    assert table.take("batch_1", lease_s=lease_s) is None, "the first holder released nothing"
    table.release("batch_1", 2)
    assert table.take("batch_1", lease_s=lease_s) == 3
    with pytest.raises(StateConflict):
        table.renew("batch_1", 2, lease_s=lease_s)
    assert table.change(item(version=1), term=3, release=True) is not None
    with pytest.raises(StateConflict):
        table.renew("batch_1", 3, lease_s=lease_s)  # it was released
    assert table.take("batch_1", lease_s=lease_s, holder="me") == 4
    stored = table.find("batch_1", "me")
    assert stored is not None
    assert (stored.holder, stored.term, stored.version) == ("me", 4, 2)
    assert stored.lease_until == pytest.approx(stored.updated_at + lease_s, abs=1e-6)
    assert table.take("nothing", lease_s=lease_s) is None
    assert table.change(item(version=2, open=False), release=True) is not None
    assert table.take("batch_1", lease_s=lease_s) is None, "nothing is to be done"


def test_a_journal_is_read_from_any_line(table: JobTable) -> None:
    table.add(item())
    assert table.take("batch_1", lease_s=60) == 1
    lines = [b"%d \0\xff" % number + b"x" * 100 for number in range(1203)]
    table.append("batch_1", 1, lines[:3])
    table.append("batch_1", 1, [])
    table.append("batch_1", 1, lines[3:])
    assert table.lines("batch_1", 0, 2000) == lines
    assert table.lines("batch_1", 1000, 5) == lines[1000:1005]
    assert table.lines("batch_1", 1203, 5) == []
    table.remove("batch_1")
    assert table.lines("batch_1", 0, 5) == []


def test_bytes_that_an_item_holds_stay_and_count(index: Index, home: Home) -> None:
    key = secrets.token_hex(20)
    name = new_name(f"kvs_{key}")
    writing = Writing(name, f"kvs_{key}", "me", 600, of_cache=False)
    briefly = home.open(10)
    briefly.begin(writing, Quota(max_bytes=1000))
    index.jobs.add(item(kind="file", held=name))
    home.wait(11)
    assert index.abandoned() == []
    assert index.knows(name)
    with pytest.raises(QuotaExceeded):
        index.begin(Writing(new_name("kvs_" + "1" * 40), "kvs_" + "1" * 40, "me", 500), Quota(max_bytes=1000))
    assert index.problems() == []
    assert index.jobs.remove("batch_1")
    assert [writing.name for writing in index.abandoned()] == [name]
    index.begin(Writing(new_name("kvs_" + "1" * 40), "kvs_" + "1" * 40, "me", 500), Quota(max_bytes=1000))
    index.abandon(name)
    assert not index.knows(name)
    assert index.problems() == []
    briefly.close()


@pytest.mark.parametrize("how", ["change", "forget"])
def test_bytes_that_an_item_lets_go_are_abandoned(index: Index, how: str) -> None:
    old, new = begun(index), begun(index)
    assert index.jobs.add(item(held=old, due=1.0)) is not None
    if how == "change":
        assert index.jobs.change(item(held=new)) is not None
        assert [writing.name for writing in index.abandoned()] == [old]
        assert index.jobs.change(item(held=new, version=1)) is not None
        assert [writing.name for writing in index.abandoned()] == [old], "it still holds the other one"
        assert index.jobs.change(item(version=2)) is not None
        assert {writing.name for writing in index.abandoned()} == {old, new}
    else:
        assert index.jobs.forget("batch", 2.0) == 1
        assert [writing.name for writing in index.abandoned()] == [old]


def begun(index: Index) -> str:
    """The name of a write in progress."""
    key = secrets.token_hex(20)
    name = new_name(f"kvs_{key}")
    index.begin(Writing(name, f"kvs_{key}", "me", 600, of_cache=False), Quota())
    return name


def test_an_item_cannot_hold_what_a_silent_writer_wrote(index: Index, home: Home) -> None:
    key = secrets.token_hex(20)
    name = new_name(f"kvs_{key}")
    briefly = home.open(2)
    briefly.begin(Writing(name, f"kvs_{key}", "me", 600, of_cache=False), Quota())
    home.wait(4)
    with pytest.raises(StoreUnavailable, match="silent"):
        index.jobs.add(item(kind="file", held=name))
    assert index.jobs.find("batch_1", "me") is None
    briefly.close()
