"""A corpus that a running service compresses: uploaded, followed, and brought back as results of its rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final

import structlog

from kvshelf.api.batches import BatchObject
from kvshelf.client import Client
from kvshelf.corpus.input.rows import MAX_DOCUMENT_BYTES, Row, RowError
from kvshelf.corpus.input.sources import Source
from kvshelf.corpus.output.results import Result, failed
from kvshelf.corpus.run.progress import Progress, RunState, Summary, WorkerProgress
from kvshelf.errors import BodyTooLarge, ConnectionFailed, NoWorker

log = structlog.get_logger("kvshelf.corpus")

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


def run_at(
    client: Client, source: Source, options: Mapping[str, Any], about: str, show: Show
) -> tuple[Summary, list[Result]]:
    """How the batch ended, and the result of every row, of those as well that cannot be sent.

    options: of `client.batches.create`, for how it is run. about: what the service is told of where the rows are from.
    A service that is restarted meanwhile is waited for; KeyboardInterrupt cancels the batch. In the end nothing of it
    is left there but the caches.
    """
    with TemporaryFile() as upload:
        rows = list(_written(source, upload))
        results = [failed(row, row.error) for row in rows if row.error is not None]
        if len(results) == len(rows):
            reason = f"none of the {len(rows)} rows can be compressed"
            return Summary(RunState.FAILED, reason, total=len(rows), failed=len(rows)), results
        upload.seek(0)
        file = client.files.create(file=("corpus.jsonl", upload))
    batch = client.batches.create(input_file_id=file.id, metadata={"input": about[-512:]}, **options)
    refused = len(results)
    batch = _followed(client, batch, lambda now: show(_snapshot(Progress, now, refused)), show)
    for file_id in (batch.output_file_id, batch.error_file_id):
        results += _results(client, file_id, rows)
    for file_id in (file.id, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            client.files.delete(file_id)
    return _snapshot(Summary, batch, refused), results


def _written(source: Source, upload: BinaryIO) -> Iterator[Row]:
    """Write the rows that can be sent, each known by its number; yields all of them, without their documents."""
    number = 0
    for shard in source.shards():
        for row in shard.read():
            if row.spec is not None:
                spec = row.spec.model_dump(mode="json", exclude_unset=True, exclude_none=True)
                line = json.dumps({"custom_id": str(number), **spec}, ensure_ascii=False).encode()
                if len(line) > MAX_DOCUMENT_BYTES:  # which the service would not read, so not know whose it is
                    row = replace(row, error=RowError.of(_too_large(len(line))))
                else:
                    upload.write(line + b"\n")
            yield replace(row, spec=None)
            number += 1


def _too_large(nbytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"as a line of JSON, which is how a service gets it, this row has {nbytes} bytes, and a line may have "
        f"{MAX_DOCUMENT_BYTES}; compress it without --url"
    )


def _followed(client: Client, batch: BatchObject, told: Callable[[BatchObject], None], show: Show) -> BatchObject:
    """The batch as it ended."""
    lost_at: float | None = None
    while not batch.ended:
        try:
            for now in client.batches.events(batch.id):
                batch, lost_at = now, None
                told(now)
        except KeyboardInterrupt:
            batch = client.batches.cancel(batch.id)
        except (ConnectionFailed, NoWorker):
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > _PATIENCE_S:
                raise
            show(Progress(RunState.WAITING, "the service does not answer; the batch goes on with it"))
            time.sleep(_PAUSE_S)
    return batch


def _results(client: Client, file_id: str | None, rows: Sequence[Row]) -> Iterator[Result]:
    if file_id is None:
        return
    by_id = {str(number): row for number, row in enumerate(rows)}
    by_line = dict(enumerate((row for row in rows if row.error is None), 1))
    for text in client.files.content(file_id).splitlines():
        line = json.loads(text)
        # What the service could not read has no custom id, but its place in what was sent.
        row = by_id.get(line["custom_id"]) or by_line.get(line.get("line"))
        if row is None:
            log.warning("the service has a result of a row that it was not sent", result=line)
            continue
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
