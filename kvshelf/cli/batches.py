"""batches: the batches of a running service. `kvshelf batch --url` begins one."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvshelf.cli import _options
from kvshelf.cli._commands import command
from kvshelf.cli.output import common, say, say_json

if TYPE_CHECKING:
    from rich.table import Table

    from kvshelf.api.batches import BatchObject

app = typer.Typer(help="List, show and cancel the batches of a running service.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="An id (batch_...), as `kvshelf batches list` shows it.")]


def list_batches(
    limit: Annotated[int, typer.Option(min=1, help="How many to list, newest first.")] = 100,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """List your batches, those that have ended within 30 days included."""
    with common.connected(url) as client:
        batches = list(itertools.islice(client.batches.list(limit=min(limit, 100)), limit))
        common.print_objects(batches, lambda: _table(batches), as_json=as_json)


def _table(batches: list[BatchObject]) -> Table:
    headings = ["ID", "STATUS", "DONE", "FAILED", "OF", "AGE", "MODEL"]
    return common.table(headings, map(_row, batches), numbers=[2, 3, 4, 5])


def _row(batch: BatchObject) -> tuple[str, ...]:
    counts = batch.request_counts
    numbers = (str(counts.completed), str(counts.failed), str(counts.total))
    age = common.duration(time.time() - batch.created_at)
    return (batch.id, batch.status, *numbers, age, batch.model or "-")


def show(id: Id, url: _options.Url = None, as_json: _options.AsJson = False) -> None:
    """Show a batch: its state, what it waits for, its counts and its files."""
    with common.connected(url) as client:
        batch = client.batches.retrieve(id)
    if as_json:
        say_json(batch)
        return
    counts, progress = batch.request_counts, batch.progress
    problems = [problem.message for problem in batch.errors.data] if batch.errors else []
    rows = {
        "id": batch.id,
        "status": batch.status + (f": {progress.reason}" if progress.reason else ""),
        "rows": f"{counts.completed} of {counts.total} done ({counts.reused} were there), {counts.failed} failed",
        "model": batch.model or "-",
        "priority": str(batch.priority),
        "window": batch.window or "-",
        "created": common.local_time(batch.created_at, "seconds"),
        "deadline": "-" if batch.expires_at is None else common.local_time(batch.expires_at, "seconds"),
        "input": batch.input_file_id,
        "output": batch.output_file_id or "-",
        "errors": batch.error_file_id or "-",
        "metadata": ", ".join(f"{key}={value}" for key, value in (batch.metadata or {}).items()) or "-",
        **({"problems": "; ".join(problems)} if problems else {}),
    }
    common.table_console().print(common.details(rows))


def cancel(id: Id, url: _options.Url = None, as_json: _options.AsJson = False) -> None:
    """Cancel a batch. Running rows stop after their layer; what is finished stays, and is in the result files."""
    with common.connected(url) as client:
        batch = client.batches.cancel(id)
    if as_json:
        say_json(batch)
    else:
        say(batch.id)
        common.notes.print(f"{batch.id}: {batch.status}", style="dim")


command(app, list_batches, "list")
command(app, show)
command(app, cancel)
