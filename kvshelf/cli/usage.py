"""usage: what a tenant has used of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvshelf.cli import _common, _options

if TYPE_CHECKING:
    from kvshelf.api.usage import UsageReport, UsageRow


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
    with _common.connected(url, as_json=as_json) as client:
        found = client.usage(from_=from_, to=to, group_by=group_by or None, all_tenants=all_tenants or None)
    if as_json:
        _common.print_object(found)
    else:
        _print(found)


def _print(found: UsageReport) -> None:
    groups = [name for name in ("day", "model", "tenant") if any(getattr(row, name) is not None for row in found.data)]
    headings = [*map(str.upper, groups), "ANSWERS", "CREATED", "READ", "PREFILLED", "ANSWERED", "WORKER", "SAVED"]
    rows = [[*(str(getattr(row, name)) for name in groups), *_amounts(row)] for row in found.data]
    numbers = range(len(groups), len(headings))
    _common.print_table(_common.table(headings, rows, numbers=numbers))
    for each in found.stored:
        _common.notes.print(f"{each.tenant} stores {each.caches} caches, {_common.megabytes(each.bytes)}", style="dim")


def _amounts(row: UsageRow) -> list[str]:
    tokens = (row.cache_read_tokens, row.prefill_tokens, row.completion_tokens)
    return [
        str(row.answers),
        str(row.caches_created),
        *(f"{count:,}" for count in tokens),
        *(f"{seconds:,.1f} s" for seconds in (row.worker_s, row.saved_s)),
    ]
