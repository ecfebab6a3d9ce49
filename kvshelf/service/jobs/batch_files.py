"""The files of a batch: checks its input before the work and writes its result files after it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, BinaryIO, Final

from kvshelf.api.batches import UNDONE, BatchError, BatchStatus, RequestCounts
from kvshelf.corpus.row import Row, RowError
from kvshelf.corpus.run.stored import last_results
from kvshelf.errors import BlobError, FileNotFound, InternalError, StoreError
from kvshelf.service.jobs.batch_questions import result_line
from kvshelf.service.storage import space_for
from kvshelf.store.base import Store
from kvshelf.store.jobs.batches import BatchRecord
from kvshelf.store.jobs.bodies import digest_of

_PIECE: Final = 1 << 20
_CHILD: Final = "kvshelf.service.jobs.undone_child"
_MEMORY_BYTES: Final = 1 << 30
_CPU_S: Final = 600


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
    """Write a batch's two result files from its journal: rows with a cache or an answer, and rows with an error. To the
    latter belong those that a cancelled or expired batch left undone; the counts are without them.

    The record names each file as soon as it is stored. If the store has no space for the second one, the next try
    replaces the first, so no file is orphaned. Raises `StateConflict` if the lease of `term` is over, `StoreError`.
    """
    outcomes: Counter[str] = Counter()
    ended: set[int] = set()
    with space_for("the results of a batch"), TemporaryFile() as output, TemporaryFile() as errors:

        def write(result: Row) -> None:
            line = result_line(result, record.id) if record.asks else result.output(file=False)
            text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
            (errors if result.error else output).write(text.encode() + b"\n")

        for result in last_results(store.batches, record.id):
            write(result)
            ended.add(result.line)
            outcomes["failed" if result.error else "reused" if result.reused else "made"] += 1
        counts = RequestCounts(
            total=record.counts.total,
            completed=outcomes["made"] + outcomes["reused"],
            failed=outcomes["failed"],
            reused=outcomes["reused"],
        )
        for row in _undone(store, record, outcome(record, counts)[0], ended):
            write(row)
        _keep(store, record, term, output, "output", "output_file_id")
        _keep(store, record, term, errors, "errors", "error_file_id")
    return counts


def _undone(store: Store, record: BatchRecord, state: BatchStatus, ended: Container[int]) -> Iterator[Row]:
    """The rows that a batch leaves undone as it ends in this state, as error rows: those of lines that have not ended.
    None of an input that is gone or was never checked."""
    if state not in UNDONE or not record.counts.total:
        return
    why = RowError(UNDONE[state], f"the batch was {state} before this row was done; a retry of the batch does it")
    input_id, tenant, endpoint = record.body["input_file_id"], record.tenant, record.body["endpoint"]
    with suppress(FileNotFound), store.files.open(input_id, tenant=tenant) as opened:
        for row in _rows(opened.file, endpoint):
            if row.line not in ended:
                yield row.failed(why)


def _rows(file: BinaryIO, endpoint: str) -> Iterator[Row]:
    """The rows of an input, without what they ask for, by a process of its own. Raises `InternalError`."""
    command = [sys.executable, "-PB", "-m", _CHILD, endpoint, f"{_MEMORY_BYTES}", f"{_CPU_S}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        feeding = Thread(target=_feed, args=(file, child.stdin), name="rows")
        feeding.start()
        for line, custom_id in map(json.loads, child.stdout):
            yield Row("", line, custom_id=custom_id)
        feeding.join()
    if child.returncode:
        raise InternalError(f"the process that reads the rows of a batch ended with {child.returncode}")


def _feed(file: BinaryIO, pipe: IO[bytes]) -> None:
    with suppress(BrokenPipeError), pipe:  # the exit code of who reads it says more
        shutil.copyfileobj(file, pipe, _PIECE)


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
        batch_id=record.id,
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
