"""`kvshelf batch --url`: the same corpus, uploaded and compressed by a running service."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final, Protocol

from kvshelf.cli import _common, _progress
from kvshelf.client import Client
from kvshelf.client.batch_types import BatchObject
from kvshelf.corpus.files import FileSource
from kvshelf.corpus.output import require_format, write_output
from kvshelf.corpus.progress import Progress, RunState, Summary, WorkerProgress
from kvshelf.corpus.results import Result, failed
from kvshelf.corpus.rows import Row, RowError, require_defaults
from kvshelf.corpus.sources import Source
from kvshelf.errors import ConnectionFailed, NoWorker

Show = Callable[[Progress], None]

_PATIENCE_S: Final = 600.0
_PAUSE_S: Final = 3.0
_STATES: Final = {
    "completed": RunState.COMPLETED,
    "failed": RunState.FAILED,
    "cancelled": RunState.CANCELLED,
    "expired": RunState.CANCELLED,
    "cancelling": RunState.CANCELLING,
    "paused": RunState.WAITING,
}


class Asked(Protocol):
    """What `kvshelf batch` was asked for. fields: of `CreateCache`, for all rows; options: how the batch is run."""

    @property
    def input(self) -> str: ...
    @property
    def output(self) -> Path: ...
    @property
    def report(self) -> Path | None: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def as_json(self) -> bool: ...
    def told(self, summary: Summary) -> int: ...


def run_remote(url: str, asked: Asked) -> int:
    """Upload the corpus, wait for its end, write the output; returns the exit code.

    Ctrl-C cancels the batch and writes what is done. What is on the shelf is reused when the command is run again.
    """
    require_format(asked.output)
    require_defaults(asked.fields)
    source = FileSource(asked.input, asked.fields)
    with Client(url) as client, TemporaryFile() as upload:
        rows = list(_written(source, upload))
        with _progress.shown(quiet=asked.as_json) as show:
            summary, results = _done(client, upload, rows, asked, show)
    write_output(asked.output, results, file=source.several)
    if asked.report is not None:
        from kvshelf.corpus.report import write_report

        write_report(asked.report, summary, results)
    return asked.told(summary)


def _written(source: Source, upload: BinaryIO) -> Iterator[Row]:
    """Write the rows that can be sent, each known by its number; yields all of them, without their documents."""
    number = 0
    for shard in source.shards():
        for row in shard.read():
            if row.spec is not None:
                spec = {name: value for name, value in row.spec.items() if value is not None}
                upload.write(json.dumps({"custom_id": str(number), **spec}, ensure_ascii=False).encode() + b"\n")
            yield replace(row, spec=None)
            number += 1


def _done(
    client: Client, upload: BinaryIO, rows: Sequence[Row], asked: Asked, show: Show
) -> tuple[Summary, list[Result]]:
    """How the batch ended, and the result of every row."""
    results = [failed(row, row.error) for row in rows if row.error is not None]
    if len(results) == len(rows):
        reason = f"none of the {len(rows)} rows can be compressed"
        return Summary(RunState.FAILED, reason, total=len(rows), failed=len(rows)), results
    upload.seek(0)
    file = client.files.create(file=("corpus.jsonl", upload))
    options = {name: value for name, value in asked.options.items() if name != "retry_failed"}
    batch = client.batches.create(
        input_file_id=file.id,
        document_timeout_s=options.pop("document_deadline_s"),
        metadata={"input": asked.input[-512:]},
        **options,
    )
    told = len(results)
    batch = _followed(client, batch, lambda now: show(_snapshot(Progress, now, told)))
    for file_id in (batch.output_file_id, batch.error_file_id):
        results += _results(client, file_id, rows)
    for file_id in (file.id, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            client.files.delete(file_id)
    return _snapshot(Summary, batch, told), results


def _followed(client: Client, batch: BatchObject, show: Callable[[BatchObject], None]) -> BatchObject:
    """The batch as it ended. A service that is restarted meanwhile is waited for."""
    lost_at: float | None = None
    while not batch.ended:
        try:
            for now in client.batches.events(batch.id):
                batch, lost_at = now, None
                show(now)
        except KeyboardInterrupt:
            batch = client.batches.cancel(batch.id)
        except (ConnectionFailed, NoWorker):
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > _PATIENCE_S:
                raise
            _common.notes.print("the service does not answer; the batch goes on with it", style="yellow")
            time.sleep(_PAUSE_S)
    return batch


def _results(client: Client, file_id: str | None, rows: Sequence[Row]) -> Iterator[Result]:
    if file_id is None:
        return
    for text in client.files.content(file_id).splitlines():
        line = json.loads(text)
        row = rows[int(line["custom_id"])]
        if "error" in line:
            yield failed(row, RowError(**line["error"]), attempts=line["attempts"])
            continue
        yield Result(
            row.source,
            row.line,
            row.custom_id,
            cache_id=line["cache_id"],
            document_id=line["document_id"],
            tokens=line["tokens"]["document"],
            kept=line["tokens"]["kept"],
            bytes_full=line["bytes"]["full"],
            bytes_stored=line["bytes"]["stored"],
            quality=line["quality"],
            attempts=line["attempts"],
            seconds=line["seconds"],
            reused=line["reused"],
            levels=tuple(line.get("levels", ())),
            nbytes=row.nbytes,
        )


def _snapshot(kind: Callable[..., Any], batch: BatchObject, refused: int) -> Any:
    """A batch of a service as the progress of a run. refused: rows that were never sent."""
    counts, told = batch.request_counts, batch.progress
    problems = [] if batch.errors is None else [error.message for error in batch.errors.data]
    reason = "its completion window is over" if batch.status == "expired" else "; ".join(problems) or told.reason
    total = counts.total + refused
    return kind(
        state=_STATES.get(batch.status, RunState.RUNNING),
        reason=reason,
        total=total,
        done=counts.completed,
        reused=counts.reused,
        failed=counts.failed + refused,
        tokens=told.tokens,
        bytes_full=told.bytes_full,
        bytes_stored=told.bytes_stored,
        tokens_per_s=told.tokens_per_s,
        elapsed_s=told.elapsed_s,
        eta_s=told.eta_s,
        fraction=(counts.completed + counts.failed + refused) / total if total else 0.0,
        gpu_hours=told.gpu_hours,
        workers={name: WorkerProgress(**share.model_dump()) for name, share in told.workers.items()},
    )
