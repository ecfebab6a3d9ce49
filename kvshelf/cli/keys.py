"""keys: edit the API key file of a service. A running service picks up every change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvshelf._extras import needs_extra
from kvshelf.cli import _common, _options

if TYPE_CHECKING:
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
    with _common.named_errors():
        scopes = [part.strip() for part in scope.split(",") if part.strip()]
        record, key = _opened(file).create(tenant, scopes, name=name, ttl_s=_common.seconds(ttl))
    _common.notes.print(
        f"key {record.id} of tenant {record.tenant}: {', '.join(record.scopes)}. Save it: it is not shown again"
    )
    print(key)


@app.command("list")
def list_keys(file: File, as_json: _options.AsJson = False) -> None:
    """List the keys with their tenants and scopes. The keys themselves are not stored."""
    with _common.named_errors(as_json=as_json):
        records = _opened(file).read()
    if as_json:
        for record in records:
            print(record.model_dump_json(exclude={"sha256"}))
        return
    rows = []
    for record in records:
        created, expires = (_common.local_time(at, "minutes") for at in (record.created_at, record.expires_at))
        rows.append((record.id, record.tenant, ",".join(record.scopes), created, expires, record.name))
    _common.print_table(_common.table(["ID", "TENANT", "SCOPES", "CREATED", "EXPIRES", "NAME"], rows))


@app.command()
def revoke(id: Annotated[str, typer.Argument(help="A key id, as `kvshelf keys list` shows it.")], file: File) -> None:
    """Remove a key from the file. A running service refuses it within a second."""
    with _common.named_errors():
        record = _opened(file).revoke(id)
    _common.notes.print(f"key {record.id} of tenant {record.tenant} is revoked")
