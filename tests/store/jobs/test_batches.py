"""What every home promises of files and batches."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from kvshelf.errors import BatchNotFound, FileNotFound, InvalidRequest, QuotaExceeded, StateConflict
from kvshelf.store.base import Store
from kvshelf.store.index import KEEP_ENDED_S, Quota
from kvshelf.store.jobs.batches import BatchRecord
from kvshelf.store.jobs.bodies import digest_of
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from tests.store.places import Clock, Place


@pytest.fixture
def store(place: Place, clock: Clock) -> Iterator[Store]:
    with place.open(now=clock) as store:
        yield store
        assert store.check() == []


def batch(store: Store, tenant: str = "me", now: float = 1000.0) -> BatchRecord:
    return store.batches.create(tenant, {"input_file_id": "file_1"}, now=now, expires_at=now + 60)


def test_a_batch_from_its_beginning_to_its_end(store: Store, clock: Clock) -> None:
    record = batch(store)
    assert (record.state, record.version, record.times) == ("validating", 0, {"validating": 1000.0})
    assert store.batches.get(record.id, tenant="me") == record
    assert store.batches.unfinished() == [record]
    assert [store.batches.count_unfinished(tenant=tenant) for tenant in (record.tenant, "another")] == [1, 0]
    term = store.batches.table.take(record.id, lease_s=60)
    assert term is not None
    store.batches.table.append(record.id, term, [b"a", b"b"])
    assert list(store.batches.journal(record.id)) == [b"a", b"b"]
    assert store.batches.update(record.id, lambda record: record, tenant="me") == record, "nothing was to change"
    begun = store.batches.update(
        record.id, lambda record: record.entered("in_progress", 1001.0), tenant="me", term=term
    )
    assert (begun.state, begun.version) == ("in_progress", 1)
    with pytest.raises(StateConflict, match="is over"):
        store.batches.update(record.id, lambda record: record.entered("failed", 1.0), tenant="me", term=term + 1)

    def end(record_now: BatchRecord) -> BatchRecord:
        return record_now.entered("completed", clock(), output_file_id="file_2")

    ended = store.batches.update(record.id, end, tenant="me")
    assert store.batches.get(record.id, tenant="me") == ended
    assert ended.times == {"validating": 1000.0, "in_progress": 1001.0, "completed": clock()}
    assert store.batches.unfinished() == []
    assert store.batches.count_unfinished(tenant=record.tenant) == 0
    assert store.sweep().batches == 0
    assert store.sweep(clock() + KEEP_ENDED_S + 1).batches == 1
    with pytest.raises(BatchNotFound):
        store.batches.get(record.id, tenant="me")
    assert list(store.batches.journal(record.id)) == []


def test_a_change_is_made_again_where_another_one_was_faster(store: Store) -> None:
    record = batch(store)
    seen: list[int] = []

    def change(record_now: BatchRecord) -> BatchRecord:
        seen.append(record_now.version)
        if len(seen) == 1:
            store.batches.update(record.id, lambda record: record.entered("in_progress", 5.0), tenant="me")
        return record_now.model_copy(update={"attempts": 7})

    changed = store.batches.update(record.id, change, tenant="me")
    assert seen == [0, 1]
    assert (changed.state, changed.attempts, changed.version) == ("in_progress", 7, 2)
    assert store.batches.get(record.id, tenant="me") == changed


def test_tenants_see_nothing_of_each_other(store: Store, tmp_path: Path) -> None:
    theirs = batch(store, "other")
    file = store.files.create(file_with(tmp_path, b"secret"), tenant="other", filename="x", purpose="batch")
    for call, known, error in (
        (store.batches.get, theirs.id, BatchNotFound),
        (store.files.get, file.id, FileNotFound),
        (store.files.delete, file.id, FileNotFound),
        (store.files.get, theirs.id, FileNotFound),
        (store.batches.get, file.id, BatchNotFound),
    ):
        messages = []
        for id in (known, known[:-4] + "0000"):
            with pytest.raises(error) as caught:
                call(id, tenant="me")
            messages.append(caught.value.message.replace(id, "ID"))
        assert messages[0] == messages[1]
    assert store.batches.list(tenant="me", limit=5) == ([], False)
    assert store.files.list(tenant="me", limit=5) == ([], False)
    for listing, after in ((store.files.list, file.id), (store.batches.list, theirs.id)):
        with pytest.raises(InvalidRequest, match="continue from"):
            listing(tenant="me", limit=5, after=after)


def file_with(folder: Path, data: bytes) -> BinaryIO:
    path = folder / secrets.token_hex(4)
    path.write_bytes(data)
    return path.open("rb")


@pytest.mark.parametrize("nbytes", [0, 1, 5_000_000])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_comes_back_as_it_went_in(place: Place, tmp_path: Path, nbytes: int, *, sealed: bool) -> None:
    data = secrets.token_bytes(nbytes)
    rules = Rules(keyring=Keyring([secrets.token_bytes(32)]) if sealed else None)
    with place.open(rules=rules) as store:
        record = store.files.create(file_with(tmp_path, data), tenant="me", filename="rows.jsonl", purpose="batch")
        assert store.files.get(record.id, tenant="me") == record
        assert (record.nbytes, record.filename, len(place.names())) == (nbytes, "rows.jsonl", min(nbytes, 1))
        with store.files.open(record.id, tenant="me") as opened:
            assert (opened.nbytes, opened.digest) == (nbytes, record.digest)
            assert opened.file.read() == data
            opened.file.seek(nbytes // 2)
            assert opened.file.read(100) == data[nbytes // 2 :][:100]
            opened.file.seek(0)
            assert digest_of(opened.file) == record.digest
        assert store.check() == []
        assert store.files.delete(record.id, tenant="me") == record
        assert place.names() == set()
        with pytest.raises(FileNotFound):
            store.files.delete(record.id, tenant="me")
        assert store.check() == []


def test_a_file_counts_for_the_quota_until_it_is_deleted(place: Place, tmp_path: Path) -> None:
    with place.open(rules=Rules(quota=Quota(max_bytes=1000))) as store:
        first = store.files.create(file_with(tmp_path, b"x" * 600), tenant="me", filename="", purpose="batch")
        with pytest.raises(QuotaExceeded):
            store.files.create(file_with(tmp_path, b"y" * 600), tenant="me", filename="", purpose="batch")
        store.files.create(file_with(tmp_path, b"z" * 600), tenant="other", filename="", purpose="batch")
        store.files.delete(first.id, tenant="me")
        store.files.create(file_with(tmp_path, b"y" * 600), tenant="me", filename="", purpose="batch")
        assert len(place.names()) == 2
        over = {"tenant": "me", "filename": "", "purpose": "batch_output", "beyond_quota": True}
        for _ in range(2):
            store.files.create(file_with(tmp_path, b"o" * 600), **over)
        store.files.delete(store.files.list(tenant="me", limit=3)[0][-1].id, tenant="me")
        with pytest.raises(QuotaExceeded, match="1200 of 1000"):
            store.files.create(file_with(tmp_path, b"x"), tenant="me", filename="", purpose="batch")


def test_expired_files_are_gone_at_once_and_their_bytes_with_the_next_sweep(
    store: Store, place: Place, clock: Clock, tmp_path: Path
) -> None:
    kept = store.files.create(file_with(tmp_path, b"kept"), tenant="me", filename="", purpose="batch")
    file = store.files.create(file_with(tmp_path, b"brief"), tenant="me", filename="", purpose="batch", ttl_s=60)
    assert file.expires_at == clock() + 60
    assert store.files.list(tenant="me", limit=1) == ([file], True)
    clock.time += 61
    assert store.files.list(tenant="me", limit=1) == ([kept], False)
    with pytest.raises(FileNotFound):
        store.files.get(file.id, tenant="me")
    assert len(place.names()) == 2
    assert store.sweep().files == 1
    assert len(place.names()) == 1


def test_listing_files_by_purpose(store: Store, tmp_path: Path) -> None:
    for number in range(5):
        purpose = "batch" if number % 2 else "batch_output"
        store.files.create(file_with(tmp_path, b"x"), tenant="me", filename=str(number), purpose=purpose)
    listed, more = store.files.list(tenant="me", limit=2, purpose="batch_output")
    assert ([file.filename for file in listed], more) == (["4", "2"], True)
    rest, more = store.files.list(tenant="me", limit=2, purpose="batch_output", after=listed[-1].id)
    assert ([file.filename for file in rest], more) == (["0"], False)


def test_a_reader_finishes_a_file_that_is_deleted_meanwhile(store: Store, tmp_path: Path) -> None:
    data = secrets.token_bytes(3_000_000)
    record = store.files.create(file_with(tmp_path, data), tenant="me", filename="", purpose="batch")
    with store.files.open(record.id, tenant="me") as opened:
        begun = opened.file.read(10)
        store.files.delete(record.id, tenant="me")
        assert begun + opened.file.read() == data


def test_what_is_written_and_not_kept_is_swept(place: Place, clock: Clock, tmp_path: Path) -> None:
    """The process dies between the bytes and the record."""

    class Died(BaseException):
        pass

    def die(step: str) -> None:
        if step == "verified":
            raise Died

    writer = place.open(now=clock, on_step=die)
    writer.files.bodies.writer.discard = lambda _: None  # type: ignore[method-assign]  # dead processes undo nothing
    with pytest.raises(Died):
        writer.files.create(file_with(tmp_path, b"lost"), tenant="me", filename="", purpose="batch")
    place.let_leases_run_out(clock)
    with place.open(now=clock) as store:
        store.sweep()
        assert place.names() == set()
        assert store.files.list(tenant="me", limit=5) == ([], False)
        assert store.check() == []
    writer.close()


def test_a_file_whose_bytes_are_gone_says_so(store: Store, place: Place, tmp_path: Path) -> None:
    record = store.files.create(file_with(tmp_path, b"rows"), tenant="me", filename="", purpose="batch")
    assert record.body is not None
    store.blobs.remove(record.body.name, record.body.stored_bytes)
    with pytest.raises(FileNotFound, match="upload it again"):
        store.files.open(record.id, tenant="me")
    assert place.names() == set()
