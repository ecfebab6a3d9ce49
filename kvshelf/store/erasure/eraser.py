"""Erases everything of a subject: what has its labels or name, what is derived from that, and lines that name it.

What is to go is recorded, by ids and digests alone, before anything goes. So a process that is killed loses nothing:
the same erasure goes on, and its receipt is whole. The order is that of what leads to what: lines before the caches
whose ids they name, and of these the last ones of a conversation first.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final, Literal

import msgpack
from blake3 import blake3

from kvshelf.api.caches import ErasedThing, Erasure, StayingThing
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.errors import BlobError, CacheNotFound, FileNotFound, StateConflict
from kvshelf.store.index import Entry, Index
from kvshelf.store.jobs.batches import BatchRecord, BatchTable
from kvshelf.store.jobs.bodies import Bodies, body_of
from kvshelf.store.jobs.files import FileRecord, FileTable
from kvshelf.store.jobs.metering import NAMED_DAYS, DayUsed, Metering
from kvshelf.store.jobs.named import KeptWorkflow
from kvshelf.store.jobs.requests import REQUEST_PREFIX
from kvshelf.store.manifest import SourceRecord, StoredRecord
from kvshelf.store.table import Item, Kind, read

RECORD_S: Final = 86_400.0
"""How long a finished erasure is recorded, for a caller that has lost the receipt and asks again."""

_OPEN_S: Final = 30 * 86_400.0
_LEASE_S: Final = 30.0
_BATCH: Final = 100
_ROUNDS: Final = 3
"""How often the home is looked through: the second look finds what was being written during the first."""

_IDS: Final = re.compile(rb"(?:kvs|resp)_[0-9a-f]{32,40}")
_UNDER_WAY: Final = "it had not ended; erase again when it has"


class Subject(StoredRecord):
    """Owner of the things to erase: those of a tenant that have all labels, and the name; all of them without both."""

    tenant: str
    labels: dict[str, str] = {}
    name: str | None = None

    @property
    def all(self) -> bool:
        return not self.labels and self.name is None

    def has(self, labels: Any, name: Any) -> bool:
        """Whether a thing with these labels and this name is the subject's."""
        labels = labels if isinstance(labels, dict) else {}
        return self.labels.items() <= labels.items() and self.name in (None, name)

    def named(self, used: DayUsed) -> set[str]:
        """The names of a day's parts that are values of these labels; for a whole tenant all of them."""
        return used.names if self.all else used.names & set(self.labels.values())


class _Recorded(StoredRecord):
    created_at: float
    completed_at: float | None = None
    stays: list[StayingThing] = []

    def with_stays(self, stays: list[StayingThing]) -> _Recorded:
        merged = list(self.stays)
        for stay in stays:
            if stay not in merged:
                merged.append(stay)
        return self.model_copy(update={"stays": merged})


@dataclass(eq=False)
class Eraser:
    """Erases in one home. delete, sweep: of a store, with tiers if it has some."""

    index: Index
    bodies: Bodies
    files: FileTable
    batches: BatchTable
    metering: Metering
    home: str
    now: Callable[[], float]
    delete: Callable[..., Any]
    sweep: Callable[[], Any]

    def erase(self, subject: Subject, *, dry_run: bool, limit_s: float | None) -> Erasure:
        """limit_s: seconds after which the rest is left for the next call. Raises `StateConflict` while another process
        erases the same, `StoreError`."""
        if dry_run:
            look = _Look(self, subject, frozenset())
            things = list(look.things())
            return self._receipt(subject, _Recorded(created_at=self.now()).with_stays(look.stays), things, "dry_run")
        self.sweep()
        item, term, record = self._begin(subject)
        try:
            # Before anything goes, so that what a replica has counted and not sent yet brings no name of it back. With
            # tomorrow: a clock may be ahead.
            today = datetime.datetime.fromtimestamp(self.now(), datetime.UTC).date()
            days = [today + datetime.timedelta(days=number) for number in range(-NAMED_DAYS, 2)]
            self.metering.bar_names(subject.tenant, days, None if subject.all else subject.labels.values())
            stays, ended = self._work(subject, item.id, term, limit_s)
            record = record.with_stays(stays)
            things = list(self._recorded(item.id).values())
            # Later than that of an earlier call, where something had come back since.
            last = max((thing.erased_at or 0.0 for thing in things), default=0.0)
            if ended and (record.completed_at is None or record.completed_at < last):
                record = record.model_copy(update={"completed_at": self.now()})
            due = self.now() + (RECORD_S if ended else _OPEN_S)
            changed = replace(item, text=record.model_dump_json(), open=not ended, due=due)
            self.index.jobs.change(changed, term=term, release=True)
            return self._receipt(subject, record, things, "completed" if ended else "in_progress")
        finally:
            self.index.jobs.release(item.id, term)

    def _begin(self, subject: Subject) -> tuple[Item, int, _Recorded]:
        """The item of the erasure, its lease and its record: new ones, or those of an earlier call."""
        jobs, id = self.index.jobs, self._id(subject)
        while True:
            item = jobs.find(id, subject.tenant)
            record = _Recorded(created_at=self.now()) if item is None else read(item, _Recorded)
            due = self.now() + _OPEN_S
            if item is not None and item.due is not None and item.due <= self.now():
                jobs.remove(id)
                continue
            if item is None:
                item = jobs.add(Item("erasure", id, subject.tenant, record.model_dump_json(), open=True, due=due))
            elif not item.open:
                item = jobs.change(replace(item, open=True))
            if item is None:
                continue  # another process was faster
            term = jobs.take(id, lease_s=_LEASE_S)
            if term is None:
                raise StateConflict(
                    f"erasure {id} is under way in another process; ask again in {_LEASE_S:.0f} seconds"
                )
            return item, term, record

    def _work(self, subject: Subject, id: str, term: int, limit_s: float | None) -> tuple[list[StayingThing], bool]:
        """Erase what a look finds. Returns the things that may stay, and whether everything else is gone: False if the
        time was over before."""
        end = None if limit_s is None else time.monotonic() + limit_s
        stays: list[StayingThing] = []
        for _ in range(_ROUNDS):
            known = self._recorded(id)
            look = _Look(self, subject, frozenset(thing.id for thing in known.values()))
            things = {_key(thing): thing for thing in look.things()}
            self._note(id, term, [thing for key, thing in things.items() if key not in known or known[key].erased_at])
            # What was recorded and is not there any more went before a kill.
            gone = [thing for key, thing in known.items() if thing.erased_at is None and key not in things]
            self._note(id, term, [self._ended(thing) for thing in gone])
            stays += look.stays
            if not things:
                return stays, True
            for batch in _cut(list(things.values())):
                if end is not None and time.monotonic() >= end:
                    return stays, False
                for thing in batch:
                    look.end(thing)
                self._note(id, term, [self._ended(thing) for thing in batch])
            self.sweep()
        return stays, True

    def _ended(self, thing: ErasedThing) -> ErasedThing:
        return thing.model_copy(update={"erased_at": self.now()})

    def _note(self, id: str, term: int, things: list[ErasedThing]) -> None:
        self.index.jobs.renew(id, term, lease_s=_LEASE_S)
        for batch in _cut(things):
            self.index.jobs.append(id, term, [thing.model_dump_json().encode() for thing in batch])

    def _recorded(self, id: str) -> dict[str, ErasedThing]:
        """The recorded things, each as it was recorded last."""
        lines = self.batches.journal(id)
        return {_key(thing): thing for thing in map(ErasedThing.model_validate_json, lines)}

    def _id(self, subject: Subject) -> str:
        return "ers_" + digest("kvshelf.erasure", canonical_json(subject.model_dump()), key=self.index.key)

    def _receipt(
        self,
        subject: Subject,
        record: _Recorded,
        things: list[ErasedThing],
        status: Literal["dry_run", "in_progress", "completed"],
    ) -> Erasure:
        stays = list(record.stays)
        for item in self.index.jobs.listing("usage", subject.tenant, None, 1000):
            if (used := read(item, DayUsed)).by_model:
                why = "numbers of a day, without text"
                if used.names - subject.named(used):
                    why += " but ids of conversations and values of the guard's label, none of them of these labels"
                stays.append(StayingThing(kind="usage", id=item.id, why=why))
        stays += [
            StayingThing(kind="tombstone", id=thing.id, why="id and tenant, for 30 days")
            for thing in things
            if thing.kind == "cache" and thing.erased_at
        ]
        return Erasure(
            id=self._id(subject),
            status=status,
            **subject.model_dump(),
            created_at=record.created_at,
            completed_at=record.completed_at,
            homes=[self.home],
            erased=things,
            stays=stays,
            counts=dict(Counter(thing.kind for thing in things)),
            bytes=sum(thing.bytes for thing in things),
        )


class _Look:
    """One look through the home for a subject. known: ids from an earlier look, whose caches may be gone."""

    def __init__(self, eraser: Eraser, subject: Subject, known: Container[str]) -> None:
        self._eraser = eraser
        self._subject = subject
        self._known = known
        self._ids: set[str] = set()
        self._lines: dict[str, set[int]] = {}  # by file or batch; numbers from 0
        self._names_of_day: dict[str, tuple[datetime.date, set[str]]] = {}  # by the id of a day's usage
        self.stays: list[StayingThing] = []

    def things(self) -> Iterator[ErasedThing]:
        """The subject's things, in the order in which they can go."""
        caches = self._caches()
        sources = (read(item, SourceRecord).manifest for item in self._items("source"))
        lone = {manifest.id for manifest in sources if self._subject.has(manifest.labels, manifest.name)}
        derived = [item for id in caches for item in self._eraser.index.jobs.owned(id, self._subject.tenant)]
        self._ids = {*caches, *(item.id for item in derived), *lone}
        yield from self._of_batches()
        yield from self._of_requests()
        if self._subject.all:
            for kind in ("certificate", "workflow"):
                yield from (ErasedThing(kind=kind, id=item.id) for item in self._items(kind))
        else:
            workflows = (read(item, KeptWorkflow) for item in self._items("workflow"))
            why = "its steps name ids of erased caches; keep it without them, or delete it"
            self.stays += [
                StayingThing(kind="workflow", id=workflow.id, why=why)
                for workflow in workflows
                if any(map(self._has, workflow.models))
            ]
        yield from self._derived(derived, lone)
        for item in self._items("usage"):
            used = read(item, DayUsed)
            if names := self._subject.named(used):
                self._names_of_day[item.id] = used.day, names
                yield ErasedThing(kind="lines", id=item.id, lines=len(names))
        for entry in caches.values():
            blob = None if entry.text is None else entry.manifest().blob_digest
            yield ErasedThing(kind="cache", id=entry.id, digest=blob, bytes=entry.nbytes)

    def end(self, thing: ErasedThing) -> None:
        jobs, tenant = self._eraser.index.jobs, self._subject.tenant
        if thing.kind == "cache":
            with suppress(CacheNotFound):  # it went with one that it extends
                self._eraser.delete(thing.id, tenant=tenant, cascade=True)
        elif thing.kind == "lines":
            numbers = self._lines.get(thing.id, set())
            if thing.id in self._names_of_day:
                self._eraser.metering.forget_names(tenant, *self._names_of_day[thing.id])
            elif thing.id.startswith("file_"):
                self._eraser.files.erase_lines(thing.id, numbers, tenant=tenant)
            else:
                jobs.erase_lines(thing.id, sorted(numbers))
        elif (item := jobs.find(thing.id, tenant)) is not None:
            self._eraser.bodies.end(item)

    def _has(self, id: str) -> bool:
        return id in self._ids or id in self._known

    def _caches(self) -> dict[str, Entry]:
        """The stored caches of the subject, and those that extend them, which come first."""
        tenant, index = self._subject.tenant, self._eraser.index
        entries: dict[str, Entry] = {}
        pending = [entry for entry in index.stored() if entry.tenant == tenant and self._is_subjects(entry)]
        for entry in pending:  # which grows meanwhile
            if entry.id not in entries:
                entries[entry.id] = entry
                pending.extend(index.children(entry.id, tenant))
        return {id: entry for id, entry in reversed(entries.items()) if entry.stored}

    def _is_subjects(self, entry: Entry) -> bool:
        if entry.text is None:
            return self._subject.all
        manifest = entry.manifest()
        return self._subject.has(manifest.labels, manifest.name)

    def _derived(self, items: list[Item], lone: Container[str]) -> Iterator[ErasedThing]:
        """The things derived from caches. lone: ids of the caches whose sources go, although the caches may be gone."""
        ids: set[str] = set()
        for item in [*items, *self._items("source"), *(self._items("response") if self._subject.all else ())]:
            of_lone = item.kind == "source" and json.loads(item.text)["manifest"]["id"] in lone
            if item.id not in ids and (of_lone or self._subject.all or item.id in self._ids):
                ids.add(item.id)
                body = body_of(item)
                assert body is not None, "neither a source nor a response is empty"
                kind = "source" if item.kind == "source" else "response"
                yield ErasedThing(kind=kind, id=item.id, digest=body.digest, bytes=body.stored_bytes)

    def _of_requests(self) -> Iterator[ErasedThing]:
        for item in self._items("request"):
            if self._subject.all or self._names(item) or (item.held and self._asks_for(item)):
                if item.open:
                    self.stays.append(StayingThing(kind="request", id=item.id, why=_UNDER_WAY))
                body = body_of(item)
                size = 0 if body is None else body.stored_bytes
                yield ErasedThing(kind="request", id=item.id, digest=body and body.digest, bytes=size)

    def _names(self, item: Item) -> bool:
        return any(map(self._has, json.loads(item.text)["cache_ids"]))

    def _asks_for(self, item: Item) -> bool:
        body = body_of(item)
        assert body is not None, "it is held"
        try:
            body_fields = msgpack.unpackb(self._eraser.bodies.read(body, item.tenant, REQUEST_PREFIX + item.id))
        except (BlobError, ValueError):
            return False  # it cannot be worked on, either
        return isinstance(body_fields, dict) and self._subject.has(body_fields.get("labels"), body_fields.get("name"))

    def _of_batches(self) -> Iterator[ErasedThing]:
        whole: list[BatchRecord] = []
        rows: dict[str, _BatchRows] = {}  # by file
        for item in self._items("batch"):
            record = read(item, BatchRecord, version=item.version)
            options, subject = record.body.get("options", {}), self._subject
            by_metadata = bool(subject.labels) and subject.has(record.body.get("metadata"), None)
            if subject.has(options.get("labels"), options.get("name")) or by_metadata:
                whole.append(record)
            elif rows_of_batch := self._rows_of(record):
                for id in _files_of(record):
                    rows.setdefault(id, _BatchRows()).update(rows_of_batch)
                self._lines[record.id] = rows_of_batch.journal
            else:
                continue
            if not record.ended:
                self.stays.append(StayingThing(kind="batch", id=record.id, why=_UNDER_WAY))
        yield from self._of_files({id for record in whole for id in _files_of(record)}, rows)
        for id, numbers in self._lines.items():
            if numbers and not id.startswith("file_"):
                yield ErasedThing(kind="lines", id=id, lines=len(numbers))
        for record in whole:
            yield ErasedThing(kind="batch", id=record.id)

    def _rows_of(self, record: BatchRecord) -> _BatchRows:
        """The subject's rows of a batch: by their line of the input, or by the line of the journal."""
        rows = _BatchRows()
        with (
            suppress(FileNotFound),
            self._eraser.files.open(record.body["input_file_id"], tenant=record.tenant) as opened,
        ):
            for number, line in enumerate(opened.file, 1):
                if self._is_named(line) or self._has_labels(line):
                    rows.add(number, _parsed(line).get("custom_id"))
        journal = list(self._eraser.batches.numbered_journal(record.id))
        for _, line in journal:
            if self._is_named(line):
                row = json.loads(line)
                rows.add(row["line"], row["custom_id"])
        rows.journal = {number for number, line in journal if rows.has(_parsed(line))} if rows.lines else set()
        return rows

    def _is_named(self, line: bytes) -> bool:
        return any(self._has(match.group().decode()) for match in _IDS.finditer(line))

    def _of_files(self, whole: Container[str], rows: Mapping[str, _BatchRows]) -> Iterator[ErasedThing]:
        for item in self._items("file"):
            file = read(item, FileRecord)
            if self._subject.all or file.id in whole:
                yield ErasedThing(kind="file", id=file.id, digest=file.digest, bytes=file.nbytes)
                continue
            try:
                with self._eraser.files.open(file.id, tenant=file.tenant) as opened:
                    numbers, digest_of_lines, total = self._matching(opened.file, rows.get(file.id, _BatchRows()))
            except FileNotFound:
                continue  # it has expired, or is damaged
            if numbers and len(numbers) == total:
                yield ErasedThing(kind="file", id=file.id, digest=file.digest, bytes=file.nbytes)
            elif numbers:
                self._lines[file.id] = numbers
                yield ErasedThing(kind="lines", id=file.id, digest=digest_of_lines, lines=len(numbers))

    def _matching(self, file: BinaryIO, rows: _BatchRows) -> tuple[set[int], str, int]:
        """The numbers of a file's lines that are the subject's, their digest, and how many lines have anything. rows:
        of the batches whose input or result the file is."""
        numbers: set[int] = set()
        hasher, total = blake3(), 0
        for number, line in enumerate(file):
            if not line.strip():
                continue
            total += 1
            of_row = bool(rows) and rows.has({"line": number + 1} | _parsed(line))
            if of_row or self._is_named(line) or self._has_labels(line):
                numbers.add(number)
                hasher.update(line)
        return numbers, hasher.hexdigest(), total

    def _has_labels(self, line: bytes) -> bool:
        if b'"labels"' not in line and b'"name"' not in line:
            return False
        row = _parsed(line)
        bodies = (row, row.get("body"))
        return any(
            isinstance(body, dict) and self._subject.has(body.get("labels"), body.get("name")) for body in bodies
        )

    def _items(self, kind: Kind) -> Iterator[Item]:
        after = None
        while True:
            items = self._eraser.index.jobs.listing(kind, self._subject.tenant, after, _BATCH)
            yield from items
            if len(items) < _BATCH:
                return
            after = items[-1].id


@dataclass
class _BatchRows:
    """Rows of a batch: their lines in the input, from 1, and their custom ids; their lines in the journal, from 0."""

    lines: set[int] = field(default_factory=set)
    custom_ids: set[str] = field(default_factory=set)
    journal: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.lines)

    def add(self, line: int, custom_id: object) -> None:
        self.lines.add(line)
        if isinstance(custom_id, str):
            self.custom_ids.add(custom_id)

    def update(self, other: _BatchRows) -> None:
        self.lines |= other.lines
        self.custom_ids |= other.custom_ids

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether a line of the input, the journal or a result is of one of these rows. A result has the line of a row
        only where the row has no custom id."""
        custom_id = row.get("custom_id")
        return custom_id in self.custom_ids if isinstance(custom_id, str) else row.get("line") in self.lines


def _files_of(record: BatchRecord) -> Iterator[str]:
    ids = (record.body["input_file_id"], record.output_file_id, record.error_file_id)
    return (id for id in ids if id is not None)


def _parsed(line: bytes) -> dict[str, Any]:
    """A line as JSON; empty if it is no object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _key(thing: ErasedThing) -> str:
    return f"{thing.kind} {thing.id}"


def _cut(things: list[ErasedThing]) -> Iterator[list[ErasedThing]]:
    return (things[start : start + _BATCH] for start in range(0, len(things), _BATCH))
