"""The files of a batch: checks its input before the work and writes its result files after it."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from tempfile import TemporaryFile
from typing import BinaryIO, Final

from kvshelf.api.batches import BatchError, BatchStatus, RequestCounts
from kvshelf.corpus.run.stored import last_results
from kvshelf.errors import BlobError, FileNotFound, StoreError
from kvshelf.service.jobs.batch_questions import result_line
from kvshelf.service.storage import space_for
from kvshelf.store.base import Store
from kvshelf.store.jobs.batches import BatchRecord
from kvshelf.store.jobs.bodies import digest_of

_PIECE: Final = 1 << 20


class BadInput(Exception):
    """The input file as a whole is unusable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.problem = BatchError(code=code, message=message, param="input_file_id")


def count_rows(store: Store, file_id: str, tenant: str, max_rows: int) -> int:
    """The number of lines in an input file. Reads and verifies all of it. Raises `BadInput`, `FileNotFound`."""
    try:
        with store.files.open(file_id, tenant=tenant) as opened:
            rows = _lines(opened.file)
            opened.file.seek(0)
            if digest_of(opened.file) != opened.digest:
                raise BlobError("other bytes came back", reason="digest_mismatch")
    except BlobError as error:
        message = f"file {file_id} is not what was uploaded ({error}); upload it again"
        raise BadInput("file_damaged", message) from error
    if rows == 0:
        raise BadInput("empty_file", f"file {file_id} has no line")
    if rows > max_rows:
        raise BadInput(
            "too_many_rows", f"file {file_id} has {rows} lines, and a batch takes {max_rows}; cut it into several"
        )
    return rows


def _lines(file: BinaryIO) -> int:
    count, last = 0, b"\n"
    while piece := file.read(_PIECE):
        count += piece.count(b"\n")
        last = piece[-1:]
    return count + (last != b"\n")


def write_results(store: Store, record: BatchRecord, term: int) -> RequestCounts:
    """Write a batch's two result files from its journal: rows with a cache or an answer, and rows with an error.

    The record names each file as soon as it is stored. If the store has no space for the second one, the next try
    replaces the first, so no file is orphaned. Raises `StateConflict` if the lease of `term` is over, `StoreError`.
    """
    found: Counter[str] = Counter()
    with space_for("the results of a batch"), TemporaryFile() as output, TemporaryFile() as errors:
        for result in last_results(store.batches, record.id):
            said = result_line(result, record.id) if record.asks else result.output(file=False)
            line = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
            (errors if result.error else output).write(line.encode() + b"\n")
            found["failed" if result.error else "reused" if result.reused else "made"] += 1
        _keep(store, record, term, output, "output", "output_file_id")
        _keep(store, record, term, errors, "errors", "error_file_id")
    made, reused = found["made"], found["reused"]
    return RequestCounts(total=record.counts.total, completed=made + reused, failed=found["failed"], reused=reused)


def _keep(store: Store, record: BatchRecord, term: int, file: BinaryIO, name: str, field: str) -> None:
    """Store a result file in place of the one that the record names in `field`."""
    file.flush()
    kept = store.files.create(
        file,
        tenant=record.tenant,
        filename=f"{record.id}_{name}.jsonl",
        purpose="batch_output",
        ttl_s=record.body["output_keep_s"],
        beyond_quota=True,  # results are small compared with caches, and the batch cannot end without them
    )
    stale = kept.id  # until the record names it
    try:
        update = {field: kept.id}
        store.batches.update(record.id, lambda now: now.model_copy(update=update), tenant=record.tenant, term=term)
        stale = getattr(record, field)
    finally:
        if stale is not None:
            with suppress(FileNotFound, StoreError):
                store.files.delete(stale, tenant=record.tenant)


def outcome(record: BatchRecord, counts: RequestCounts) -> tuple[BatchStatus, tuple[BatchError, ...]]:
    """The state in which a batch with these rows ends, and the problems of the batch as a whole."""
    if record.problems:
        return "failed", record.problems
    if record.state == "cancelling":
        return "cancelled", ()
    if not counts.total or counts.completed + counts.failed < counts.total:  # total is 0 before the input is checked
        return "expired", ()
    if counts.completed == 0:
        return "failed", (BatchError(code="no_success", message="no row succeeded; the error file says why"),)
    return "completed", ()
