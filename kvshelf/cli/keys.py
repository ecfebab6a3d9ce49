"""keys: edit the API key file of a service; a running service picks up every change. usage: what their tenants use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvshelf._extras import needs_extra
from kvshelf.cli import _options
from kvshelf.cli.output import common, say, say_json

if TYPE_CHECKING:
    from kvshelf.api.usage import UsageReport, UsageRow
    from kvshelf.service.access.keyfile import KeyFile

app = typer.Typer(help="Create, list and revoke the API keys of a service.", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Option("--file", envvar="KVSHELF_API_KEY_FILE", help="The key file; `create` makes it if it is missing."),
]


def _opened(file: Path) -> KeyFile:
    with needs_extra("serve", purpose="kvshelf keys"):
        from kvshelf.service.access.keyfile import KeyFile

    return KeyFile(file)


@app.command()
def create(
    file: File,
    tenant: Annotated[str, typer.Option(help="Tenant of the key. A tenant sees only its own caches.")],
    scope: Annotated[
        str, typer.Option(help="What the key allows, separated by commas: read, write, admin.")
    ] = "read,write",
    ttl: Annotated[
        str | None, typer.Option(help="How long the key is valid: 15m, 2h, 90d.  [default: forever]")
    ] = None,
    name: Annotated[str, typer.Option(help="A note on what the key is for.")] = "",
) -> None:
    """Create a key and print it once. The file stores only its digest."""
    with common.named_errors():
        scopes = [part.strip() for part in scope.split(",") if part.strip()]
        record, key = _opened(file).create(tenant, scopes, name=name, ttl_s=common.seconds(ttl))
    common.notes.print(
        f"key {record.id} of tenant {record.tenant}: {', '.join(record.scopes)}. Save it: it is not shown again"
    )
    say(key)


@app.command("list")
def list_keys(file: File, as_json: _options.AsJson = False) -> None:
    """List the keys with their tenants and scopes. The keys themselves are not stored."""
    with common.named_errors(as_json=as_json):
        records = _opened(file).read()
    if as_json:
        for record in records:
            say_json(record.model_dump(mode="json", exclude={"sha256"}))
        return
    rows = []
    for record in records:
        created, expires = (common.local_time(at, "minutes") for at in (record.created_at, record.expires_at))
        rows.append((record.id, record.tenant, ",".join(record.scopes), created, expires, record.name))
    common.print_table(common.table(["ID", "TENANT", "SCOPES", "CREATED", "EXPIRES", "NAME"], rows))


@app.command()
def revoke(id: Annotated[str, typer.Argument(help="A key id, as `kvshelf keys list` shows it.")], file: File) -> None:
    """Remove a key from the file. A running service refuses it within a second."""
    with common.named_errors():
        record = _opened(file).revoke(id)
    common.notes.print(f"key {record.id} of tenant {record.tenant} is revoked")


def usage(
    from_: Annotated[
        str | None, typer.Option("--from", help="First day: 2026-01-31.  [default: 29 days before]")
    ] = None,
    to: Annotated[str | None, typer.Option(help="Last day.  [default: today, in UTC]")] = None,
    group_by: Annotated[
        list[str] | None, typer.Option(metavar="day|model|tenant", help="A row for each. May be repeated.")
    ] = None,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Needs a key with the scope admin.")] = False,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Show what your tenant has used of a service, and what it has on the shelf now."""
    with common.connected(url, as_json=as_json) as client:
        report = client.usage(from_=from_, to=to, group_by=group_by or None, all_tenants=all_tenants or None)
    if as_json:
        common.print_object(report)
    else:
        _print(report)


def _print(report: UsageReport) -> None:
    groups = [name for name in ("day", "model", "tenant") if any(getattr(row, name) is not None for row in report.data)]
    headings = [
        *map(str.upper, groups),
        "ANSWERS",
        "CREATED",
        "READ",
        "PREFILLED",
        "ANSWERED",
        "WORKER",
        "QUALITY",
        "SAVED",
    ]
    rows = [[*(str(getattr(row, name)) for name in groups), *_amounts(row)] for row in report.data]
    numbers = range(len(groups), len(headings))
    common.print_table(common.table(headings, rows, numbers=numbers))
    for stored in report.stored:
        common.notes.print(
            f"{stored.tenant} stores {stored.caches} caches, {common.megabytes(stored.bytes)}", style="dim"
        )


def _amounts(row: UsageRow) -> list[str]:
    tokens = (row.cache_read_tokens, row.prefill_tokens, row.completion_tokens)
    return [
        str(row.answers),
        str(row.caches_created),
        *(f"{count:,}" for count in tokens),
        *(f"{seconds:,.1f} s" for seconds in (row.worker_s, row.quality_s, row.saved_s)),
    ]
