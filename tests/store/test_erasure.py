"""Erasures: everything of a subject goes, from every home and tier, and nothing of anybody else."""

from __future__ import annotations

import datetime
import json
import signal
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvshelf.api.caches import Erasure
from kvshelf.api.usage import MOST_PARTS, Metered, today
from kvshelf.corpus.row import Row
from kvshelf.corpus.run.stored import StoredJournal
from kvshelf.errors import FileNotFound, InvalidRequest, StateConflict
from kvshelf.store.disk import DiskStore
from kvshelf.store.erasure.eraser import RECORD_S, Subject
from kvshelf.store.erasure.signing import Signer, sealed, verify
from kvshelf.store.jobs.metering import Meter, ModelUsed
from kvshelf.store.shelf import Shelf
from kvshelf.store.tiers.disk import DiskTier
from kvshelf.store.tiers.tiered import TieredStore
from tests.store.caches import make_cache
from tests.store.places import Clock, DiskPlace, Place
from tests.store.test_ends import Things, die_after, fill, upload, word_of

ME = Subject(tenant="default", labels={"subject": "heliotrope-label-heliotrope"})


def fill_others(shelf: Shelf) -> dict[str, Any]:
    """What is not the subject's: of another subject, and of another tenant that uses the same label."""
    labels = {"subject": "another"}
    mine = shelf.put(make_cache(8), labels=labels, source="the iris").id
    yours = shelf.put(make_cache(9), labels=ME.labels, source="the lily", tenant="you").id
    file = upload(shelf, "the rose")
    return {"mine": mine, "yours": yours, "file": file}


def require_others(shelf: Shelf, others: dict[str, Any]) -> None:
    assert shelf.source(others["mine"]) == "the iris"
    assert shelf.source(others["yours"], tenant="you") == "the lily"
    with shelf.files.open(others["file"], tenant="default") as opened:
        assert b"the rose" in opened.file.read()


def test_everything_of_a_subject_goes(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        others = fill_others(shelf)
        things = fill(shelf)
        shown = shelf.erase(ME, dry_run=True)
        assert (shown.status, things.left(place)) == ("dry_run", set(things.words))
        receipt = shelf.erase(ME)
        assert things.left(place) == {"label"}, "that of the other tenant"
        assert [(thing.kind, thing.id, thing.digest) for thing in shown.erased] == [
            (thing.kind, thing.id, thing.digest) for thing in receipt.erased
        ]
        assert receipt.counts == {"cache": 2, "source": 2, "response": 1, "file": 2, "lines": 1}
        assert all(thing.erased_at == clock.time for thing in receipt.erased)
        assert {thing.id for thing in receipt.stays if thing.kind == "tombstone"} == {things.root, things.turn}
        require_others(shelf, others)
        assert shelf.erase(ME) == receipt, "it says the same again"
        clock.time += RECORD_S
        assert shelf.erase(ME).erased == []
        assert shelf.check() == []


def test_what_came_back_and_went_again_is_in_the_receipt_with_its_time(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        shelf.put(make_cache(5), labels=ME.labels)
        assert shelf.erase(ME).completed_at == clock.time
        clock.time += 60
        shelf.put(make_cache(5), labels=ME.labels)
        again = shelf.erase(ME)
        assert again.erased[0].erased_at == clock.time
        assert (again.completed_at, again.counts) == (clock.time, {"cache": 1})
        clock.time += 60
        assert shelf.erase(ME) == again


def test_everything_of_a_tenant_goes(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        yours = shelf.put(make_cache(9), source="the lily", tenant="you").id
        things = fill(shelf)
        shelf.requests.open("req_1", tenant="default", body=b"a document with a heliotrope-request-heliotrope")
        things.word("request")
        assert things.left(place) == set(things.words)
        receipt = shelf.erase(Subject(tenant="default"))
        assert things.left(place) == set()
        assert receipt.counts == {"cache": 2, "source": 2, "response": 1, "file": 3, "batch": 1, "request": 1}
        assert shelf.source(yours, tenant="you") == "the lily"


def test_what_a_day_tells_apart_by_the_subjects_label_goes(place: Place) -> None:
    """Its numbers stay, and what others are told apart by."""
    with place.open() as shelf:
        things = Things(words={"label": word_of("label")})
        meter = Meter(shelf.metering, "tiny")
        meter.add("you", guard_group="of another tenant", guarded=1)
        for group in (*ME.labels.values(), "law"):
            meter.add(ME.tenant, "chat", answers=1)
            meter.add(ME.tenant, guard_group=group, guarded=1)
        meter.flush()
        assert things.left(place) == {"label"}
        assert [thing.kind for thing in shelf.erase(ME, dry_run=True).erased] == ["lines"]
        receipt = shelf.erase(ME)
        assert things.left(place) == set()
        assert [(thing.kind, thing.lines) for thing in receipt.erased] == [("lines", 1)]
        (stay,) = receipt.stays
        assert "ids of conversations and values of the guard's label" in stay.why
        (day,) = shelf.metering.days(today(), today(), tenant=ME.tenant)
        law = {"law": Metered(guarded=1)}
        assert day.by_model == {"tiny": ModelUsed(answers=2, guarded=2, guard_groups=law)}
        (stay,) = shelf.erase(Subject(tenant=ME.tenant)).stays
        assert stay.why == "numbers of a day, without text"
        (day,) = shelf.metering.days(today(), today(), tenant=ME.tenant)
        assert (day.by_model["tiny"].guarded, day.names) == (2, set())
        (day,) = shelf.metering.days(today(), today(), tenant="you")
        assert day.names == {"of another tenant"}


@pytest.mark.parametrize("subject", [ME, Subject(tenant=ME.tenant)], ids=["labels", "tenant"])
def test_what_a_replica_had_counted_before_an_erasure_brings_no_name_back(place: Place, subject: Subject) -> None:
    """It sends what it has counted every two seconds, and later while the store does not work. The numbers count."""
    (name,) = ME.labels.values()
    days = [today() + datetime.timedelta(days=number) for number in (-3, -1, 0, 1)]  # a clock may be ahead
    with place.open() as shelf:
        things, clock = Things(words={"label": word_of("label")}), Clock()
        meter = Meter(shelf.metering, "tiny", now=clock)
        for day in (*days, today()):
            clock.time = datetime.datetime.combine(day, datetime.time(12), datetime.UTC).timestamp()
            meter.add(ME.tenant, guard_group=name, guarded=1)
            meter.add(ME.tenant, name, answers=1)
        meter.add("you", guard_group="of another tenant", guarded=1)
        receipt = shelf.erase(subject)
        assert (receipt.erased, receipt.stays) == ([], [])
        meter.flush()
        assert things.left(place) == set()
        used = shelf.metering.days(days[0], days[-1], tenant=ME.tenant)
        assert [(one.day, one.by_model["tiny"].answers, one.by_model["tiny"].guarded) for one in used] == [
            (day, count, count) for day, count in zip(days, (1, 1, 2, 1), strict=True)
        ]
        (yours,) = shelf.metering.days(today(), today(), tenant="you")
        assert yours.names == {"of another tenant"}
        assert shelf.check() == []


def test_an_erasure_bars_its_own_names_alone_and_few_of_a_day(place: Place) -> None:
    day = today()
    with place.open() as shelf:
        meter = Meter(shelf.metering, "tiny")
        shelf.metering.bar_names("me", [day], ["gone"])
        assert shelf.metering.days(day, day, tenant=None) == [], "no use, so no row"
        for name in ("gone", "stays"):
            meter.add("me", name, answers=1)
        meter.flush()
        assert [used.names for used in shelf.metering.days(day, day, tenant="me")] == [{"stays"}]
        shelf.metering.bar_names("me", [day], map(str, range(MOST_PARTS)))
        meter.add("me", "new", answers=1)
        meter.flush()
        (used,) = shelf.metering.days(day, day, tenant="me")
        assert (used.names, used.by_model["tiny"].answers, len(used.erased)) == ({"stays"}, 3, 1)


def test_a_source_whose_cache_is_gone_is_found(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        things = fill(shelf, ttl_s=100)
        clock.time += 101
        shelf.sweep()
        assert "source" in things.left(place)
        assert shelf.erase(ME).counts == {"source": 1, "file": 2, "lines": 1}
        assert things.left(place) == set()


def test_a_waiting_request_is_found_by_the_labels_that_it_asks_for(place: Place) -> None:
    with place.open() as shelf:
        for id, labels in (("req_1", ME.labels), ("req_2", {"subject": "another"})):
            body = msgpack.packb({"document": f"the orchid of {id}", "labels": labels})
            shelf.requests.open(id, tenant="default", body=body)
        receipt = shelf.erase(ME)
        assert [(thing.kind, thing.id) for thing in receipt.erased] == [("request", "req_1")]
        assert [thing.why for thing in receipt.stays] == ["it had not ended; erase again when it has"]
        contents = list(place.contents())
        assert not any(b"the orchid of req_1" in data for data in contents)
        assert any(b"the orchid of req_2" in data for data in contents)


def test_lines_go_and_the_others_keep_their_numbers(place: Place, clock: Clock) -> None:
    """A batch of three documents, of which the second has the label, and a fourth row names its cache."""
    with place.open(now=clock) as shelf:
        cache_id = shelf.put(make_cache(), labels=ME.labels).id
        rows = [{"document": "one"}, {"document": "two, the aster", "labels": ME.labels}, {"document": "three"}]
        with tempfile.TemporaryFile() as file:
            file.writelines(
                json.dumps({"custom_id": str(n), "body": row}).encode() + b"\n" for n, row in enumerate(rows)
            )
            file.flush()
            input_id = shelf.files.create(file, tenant="default", filename="in.jsonl", purpose="batch").id
        body = {"endpoint": "/v1/caches", "input_file_id": input_id, "options": {}}
        batch = shelf.batches.create("default", body, now=clock.time, expires_at=clock.time + 9)
        term = shelf.batches.table.take(batch.id, lease_s=1e6)
        assert term is not None
        journal = StoredJournal(shelf.batches, batch.id, term)
        journal.append([Row("in.jsonl", line, custom_id=text) for line, text in ((1, "one"), (3, "three"))])
        journal.append([Row("in.jsonl", 2, custom_id="the aster", cache_id=cache_id)])
        receipt = shelf.erase(ME)
        assert receipt.counts == {"cache": 1, "lines": 2}
        assert [thing.id for thing in receipt.stays if thing.kind == "batch"] == [batch.id]
        with shelf.files.open(input_id, tenant="default") as opened:
            lines = opened.file.read().split(b"\n")
        assert [bool(line) for line in lines] == [True, False, True, False]
        assert [json.loads(line)["line"] for line in shelf.batches.journal(batch.id)] == [1, 3]
        journal.append([Row("in.jsonl", 4)])
        assert not any(b"aster" in data for data in place.contents())
        assert shelf.check() == []


def test_a_batch_with_the_label_goes_whole(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        input_id = upload(shelf, "the aster")
        body = {"endpoint": "/v1/caches", "input_file_id": input_id, "options": {"labels": ME.labels}}
        batch = shelf.batches.create("default", body, now=clock.time, expires_at=clock.time + 9)
        assert shelf.erase(ME).counts == {"file": 1, "batch": 1}
        assert shelf.batches.list(tenant="default", limit=9) == ([], False)
        with pytest.raises(FileNotFound):
            shelf.files.get(input_id, tenant="default")
        assert batch.id


def test_tiers_on_this_machine_lose_their_copies(tmp_path: Path, clock: Clock) -> None:
    home, copies = DiskPlace(tmp_path / "home"), DiskPlace(tmp_path / "copies")
    shelf = home.open(now=clock)
    tier = DiskTier.open(copies.folder, 1 << 30, key=shelf.key, now=clock)
    with TieredStore(shelf, [tier]) as store:
        cache_id = store.put(make_cache(), labels=ME.labels, source="the aster", name="the iris").id
        assert any(b"the aster" in data for data in copies.contents())
        receipt = store.erase(ME)
        assert receipt.homes == ["disk", "disk"]
        assert [thing.id for thing in receipt.erased if thing.kind == "cache"] == [cache_id]
        for word in (b"the aster", b"the iris", b"heliotrope"):
            assert not any(word in data for place in (home, copies) for data in place.contents())


def test_the_time_may_be_over_before_the_end(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        things = fill(shelf)
        first = shelf.erase(ME, limit_s=0.0)
        assert (first.status, things.left(place)) == ("in_progress", set(things.words))
        last = shelf.erase(ME)
        assert (last.status, last.id, last.created_at) == ("completed", first.id, first.created_at)
        assert [thing.id for thing in last.erased] == [thing.id for thing in first.erased]


def test_two_at_once_do_not_meet(place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.open(now=clock) as shelf, place.open(now=clock) as other:
        shelf.put(make_cache(), labels=ME.labels)
        delete: Callable[..., Any] = shelf.delete

        def slowly(*args: Any, **options: Any) -> Any:
            with pytest.raises(StateConflict, match="under way"):
                other.erase(ME)
            return delete(*args, **options)

        monkeypatch.setattr(shelf, "delete", slowly)
        assert shelf.erase(ME).counts == {"cache": 1}


def erased(place: Place, clock: Clock, count: int) -> None:
    with place.open(now=clock) as shelf:
        die_after(count, shelf)
        shelf.erase(ME)


def killed_and_resumed(place: Place, clock: Clock, count: int) -> bool:
    clock.time += RECORD_S + 1  # an erasure of before is forgotten
    with place.open(now=clock) as shelf:
        things = fill(shelf)
        wanted = shelf.erase(ME, dry_run=True)
    killed = place.start(partial(erased, place, clock, count)).wait() == -signal.SIGKILL
    place.let_leases_run_out(clock)
    if place.kind == "redis":
        release(place)
    with place.open(now=clock) as shelf:
        receipt = shelf.erase(ME)
        assert things.left(place) == set()
        assert {(thing.kind, thing.id) for thing in receipt.erased} == {
            (thing.kind, thing.id) for thing in wanted.erased
        }
        assert all(thing.erased_at for thing in receipt.erased)
        assert shelf.check() == []
    return killed


def release(place: Any) -> None:
    """End the lease of a killed eraser: the server's clock is real."""
    client = place.server.client()
    for key in client.keys(f"{{{place.prefix}}}:j:ers_*"):
        client.hset(key, "lease_until", "0")


@pytest.mark.parametrize("count", [2, 8, 14, 22])
def test_an_erasure_goes_on_after_a_kill(place: Place, clock: Clock, count: int) -> None:
    if place.kind == "objects":
        pytest.skip("in a folder the same steps are taken")
    assert killed_and_resumed(place, clock, count)


@pytest.mark.faults
def test_an_erasure_goes_on_after_a_kill_at_any_step(place: Place, clock: Clock, soak: bool) -> None:
    count = 1
    while killed_and_resumed(place, clock, count):
        count += 1 if soak or place.kind == "disk" else 5
    assert count > 20


def test_a_receipt_is_signed(tmp_path: Path, store: DiskStore) -> None:
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    for command in (["genpkey", "-algorithm", "ed25519", "-out", key], ["pkey", "-in", key, "-pubout", "-out", public]):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    key.chmod(0o600)
    store.put(make_cache(), labels=ME.labels)
    receipt = Erasure.model_validate_json(sealed(store.erase(ME), Signer.read(key)).model_dump_json())
    assert verify(receipt, public) == "the digest is right, and signed with this key"
    assert "which only the receipt names" in verify(receipt, None)
    with pytest.raises(InvalidRequest, match="was changed"):
        verify(receipt.model_copy(update={"erased": []}), public)
    forged = sealed(receipt.model_copy(update={"erased": [], "signature": None, "public_key": None}), None)
    assert verify(forged, None) == "the digest is right; the receipt is not signed"
    with pytest.raises(InvalidRequest, match="not signed"):
        verify(forged, public)
    with pytest.raises(InvalidRequest, match="not of this key"):
        verify(forged.model_copy(update={"signature": receipt.signature, "public_key": receipt.public_key}), public)
    key.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        Signer.read(key)
