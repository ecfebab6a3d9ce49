"""A corpus that a running service compresses: upload its rows, follow the batch, fetch the rows as they ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final

import structlog

from kvshelf.api.batches import UNDONE, BatchObject
from kvshelf.client import Client
from kvshelf.corpus.input.rows import MAX_DOCUMENT_BYTES
from kvshelf.corpus.row import Row, RowError, Shard
from kvshelf.corpus.run.progress import INTERRUPTED, Progress, RunState, Summary
from kvshelf.errors import BodyTooLarge, CallerError, ConnectionFailed, LoadError, NoWorker

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
    client: Client, shards: Sequence[Shard], options: Mapping[str, Any], about: str, show: Show
) -> tuple[Summary, list[Row]]:
    """Run a batch at a service; returns its summary, and every row as it ended, including rows that cannot be sent.

    options: arguments of `client.batches.create`, with the defaults of the rows, so that the service can refuse what no
    row could use. about: the origin of the rows, which the service shows. Waits for a service that restarts;
    KeyboardInterrupt cancels the batch. In the end only the caches are left at the service.

    Raises what the service answers to a batch that it refuses, such as `InvalidRequest` for an unknown policy.
    """
    with TemporaryFile() as upload:
        rows = list(uploaded_rows(shards, upload))
        ended = [row for row in rows if row.error is not None]
        if len(ended) == len(rows):
            reason = f"none of the {len(rows)} rows can be compressed"
            return Summary(RunState.FAILED, reason, total=len(rows), failed=len(rows)), ended
        upload.seek(0)
        file = client.files.create(file=("corpus.jsonl", upload))
    try:
        batch = client.batches.create(input_file_id=file.id, metadata={"input": about[-512:]}, **options)
    except (CallerError, LoadError):  # after these there is no batch that needs the file
        client.files.delete(file.id)
        raise
    refused = len(ended)
    batch, interrupted = _followed(client, batch, lambda now: show(_snapshot(Progress, now, refused)), show)
    for file_id in (batch.output_file_id, batch.error_file_id):
        ended += _ended(client, file_id, rows)
    for file_id in (file.id, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            client.files.delete(file_id)
    summary: Summary = _snapshot(Summary, batch, refused)
    return replace(summary, reason=INTERRUPTED) if interrupted else summary, ended


def uploaded_rows(shards: Sequence[Shard], upload: BinaryIO) -> Iterator[Row]:
    """Write the rows that can be sent, with their numbers as custom ids; yields all rows, without their documents."""
    for number, row in enumerate(row for shard in shards for row in shard.read()):
        if row.spec is None:
            yield row
            continue
        # With its nulls: a field that a row sets to null does not get the batch's default at the service.
        spec = row.spec.model_dump(mode="json", exclude_unset=True)
        line = json.dumps({"custom_id": str(number), **spec}, ensure_ascii=False).encode()
        if len(line) > MAX_DOCUMENT_BYTES:  # the service would not read it, and could not say which row it is
            limit = f"this row has {len(line)} bytes, and a line may have {MAX_DOCUMENT_BYTES}"
            wrong = f"as a line of JSON, which is how a service gets it, {limit}; compress it without --url"
            yield row.failed(BodyTooLarge(wrong))
            continue
        upload.write(line + b"\n")
        yield replace(row, spec=None)


def _followed(
    client: Client, batch: BatchObject, report: Callable[[BatchObject], None], show: Show
) -> tuple[BatchObject, bool]:
    """The batch at its end, followed through restarts of the service, and whether Ctrl-C cancelled it."""
    lost_at: float | None = None
    interrupted = False
    while not batch.ended:
        try:
            for now in client.batches.events(batch.id):
                batch, lost_at = now, None
                report(now)
        except KeyboardInterrupt:
            batch, interrupted = client.batches.cancel(batch.id), True
        except (ConnectionFailed, NoWorker):
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > _PATIENCE_S:
                raise
            show(Progress(RunState.WAITING, "the service does not answer; the batch goes on with it"))
            time.sleep(_PAUSE_S)
    return batch, interrupted


def _ended(client: Client, file_id: str | None, rows: Sequence[Row]) -> Iterator[Row]:
    """The rows of a results file, as they ended, without those that were left undone; no rows if `file_id` is None."""
    if file_id is None:
        return
    by_id = {str(number): row for number, row in enumerate(rows)}
    by_line = dict(enumerate((row for row in rows if row.error is None), 1))
    for text in client.files.content(file_id).splitlines():
        line = json.loads(text)
        # The result of a line that the service could not read has no custom id, but the line's number in the upload.
        row = by_id.get(line["custom_id"]) or by_line.get(line.get("line"))
        if row is None:
            log.warning("the service has a result of a row that it was not sent", result=line)
            continue
        if "error" in line:
            if line["error"]["code"] in UNDONE.values():
                continue
            yield row.failed(RowError(**line["error"]), attempts=line["attempts"])
            continue
        yield replace(
            row,
            **{name: line[name] for name in ("cache_id", "document_id", "quality", "attempts", "seconds", "reused")},
            tokens=line["tokens"]["document"],
            kept=line["tokens"]["kept"],
            bytes_full=line["bytes"]["full"],
            bytes_full_16bit=line["bytes"]["full_16bit"],
            bytes_stored=line["bytes"]["stored"],
            levels=tuple(line.get("levels", ())),
        )


def _snapshot(kind: Callable[..., Any], batch: BatchObject, refused: int) -> Any:
    """A batch of a service as the progress of a run. refused: rows that were not sent."""
    counts, progress = batch.request_counts, batch.progress
    problems = [] if batch.errors is None else [error.message for error in batch.errors.data]
    reason = "its completion window is over" if batch.status == "expired" else "; ".join(problems) or progress.reason
    total = counts.total + refused
    return kind(
        state=_STATES.get(batch.status, RunState.RUNNING),
        reason=reason,
        total=total,
        done=counts.completed,
        reused=counts.reused,
        failed=counts.failed + refused,
        fraction=(counts.completed + counts.failed + refused) / total if total else 0.0,
        workers=progress.workers,
        **progress.model_dump(exclude={"reason", "workers"}),
    )
