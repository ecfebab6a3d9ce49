"""serve and policies: what the service is, and what it can do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.cli import _common
from kvshelf.cli._common import AsJson, Store, Url

if TYPE_CHECKING:
    from kvshelf.client.types import PolicyObject


def serve(
    store: Store = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A bundled name, a folder or a hub id; the first one is the default. May be repeated."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Replicas of each model.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each replica.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a running Ray cluster.  [default: a local one]")] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free port.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show the settings and stop.")] = False,
) -> None:
    """Run the service until it is stopped.

    Every option can also be given as an environment variable: --store is KVSHELF_STORE, --model KVSHELF_MODELS, and so
    on; an option wins over its variable.
    """
    with _common.named_errors(), needs_extra("serve", purpose="kvshelf serve"):
        from kvshelf.service.settings import load_settings

        settings = load_settings(
            store=store,
            models=tuple(model) if model else None,
            device=device,
            dtype=dtype,
            replicas=replicas,
            threads=threads,
            address=address,
            host=host,
            port=port,
            log_level=log_level,
        )
        if print_config:
            print(json.dumps(settings.redacted(), indent=2))
            return
        from kvshelf.service.server import serve as run

        run(settings)


def policies(url: Url = None, as_json: AsJson = False) -> None:
    """List the compression policies and their parameters: this version's, or with --url those of a service."""
    if url is not None:
        with _common.connected(url, as_json=as_json) as client:
            found = client.policies.list()
    else:
        with _common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf policies without --url"):
            found = _installed_policies()
    if as_json:
        for policy in found:
            _common.print_object(policy)
    else:
        _common.table_console().print(_table(found))


def _installed_policies() -> list[PolicyObject]:
    from kvshelf.client.types import PolicyObject
    from kvshelf.workers.policies import catalog

    described = [info.to_dict() for info in catalog()]
    return [PolicyObject.model_validate({"id": info["name"]} | info) for info in described]


def _table(policies: list[PolicyObject]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("POLICY", no_wrap=True)
    table.add_column("WHAT IT KEEPS", ratio=3)
    table.add_column("PARAMETERS", ratio=2)
    table.add_column("SOURCE", ratio=2)
    for policy in policies:
        parameters = ", ".join(f"{name}={about['default']}" for name, about in policy.parameters.items())
        table.add_row(policy.id, policy.summary, parameters or "-", policy.source)
    return table
