"""keys: edit the API key file of a service; a running service picks up every change. usage: what their tenants use."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvshelf._extras import needs_extra
from kvshelf.cli import _options
from kvshelf.cli._commands import command
from kvshelf.cli.output import common, say, say_json

if TYPE_CHECKING:
    from kvshelf.api.usage import LabelUse, MoneyCost, TtlUse, UsageReport, UsageRow
    from kvshelf.api.usage.prices import Prices
    from kvshelf.client import Client
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
    scopes = [part.strip() for part in scope.split(",") if part.strip()]
    record, key = _opened(file).create(tenant, scopes, name=name, ttl_s=common.seconds(ttl))
    common.notes.print(
        f"key {record.id} of tenant {record.tenant}: {', '.join(record.scopes)}. Save it: it is not shown again"
    )
    say(key)


def list_keys(file: File, as_json: _options.AsJson = False) -> None:
    """List the keys with their tenants and scopes. The keys themselves are not stored."""
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


def revoke(id: Annotated[str, typer.Argument(help="A key id, as `kvshelf keys list` shows it.")], file: File) -> None:
    """Remove a key from the file. A running service refuses it within a second."""
    record = _opened(file).revoke(id)
    common.notes.print(f"key {record.id} of tenant {record.tenant} is revoked")


def usage(
    from_: Annotated[
        str | None, typer.Option("--from", help="First day: 2026-01-31.  [default: 29 days before]")
    ] = None,
    to: Annotated[str | None, typer.Option(help="Last day.  [default: today, in UTC]")] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(metavar="day|model|tenant|conversation|guard_group", help="A row for each. May be repeated."),
    ] = None,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Needs a key with the scope admin.")] = False,
    label: Annotated[str | None, typer.Option(help="Also what is on the shelf, by the values of this label.")] = None,
    prices: _options.Prices = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Show what your tenant has used of a service, and what it has on the shelf now.

    With --prices all of it in money, and the lifetimes of caches that did not pay back.
    """
    window: dict[str, Any] = {"from_": from_, "to": to, "all_tenants": all_tenants or None, "label": label}
    with common.connected(url) as client:
        if prices is None:
            report = client.usage(**window, group_by=group_by or None)
        else:
            from kvshelf.api.usage.prices import read_prices

            report = _priced(client, window, group_by or [], read_prices(prices))
    if as_json:
        say_json(report)
    else:
        _print(report)


def _priced(client: Client, window: Mapping[str, Any], groups: Sequence[str], prices: Prices) -> UsageReport:
    """A report in money. Labels and lifetimes are those of the caller's own caches, which alone can be listed."""
    from kvshelf.api.usage.prices import by_label, by_ttl, priced

    report = priced(client.usage(**window, group_by=sorted({*groups, "model"})), groups, prices)
    if window["all_tenants"]:
        return report
    caches = list(client.caches.list(limit=1000))
    ended = client.caches.list(limit=1000, ended=True)
    tenant, label = report.stored[0].tenant, window["label"]
    more = {
        "labels": by_label(caches, tenant, label, prices) if label else [],
        "ttls": by_ttl([*caches, *ended], tenant, prices, time.time()),
    }
    return report.model_copy(update=more)


def _print(report: UsageReport) -> None:
    from kvshelf.api.usage import Group

    groups = [name for name in get_args(Group) if any(getattr(row, name) is not None for row in report.data)]
    money = report.currency
    headings = ["ANSWERS", "CREATED", "READ", "HITS", "PREFILLED", "ANSWERED", "WORKER", "QUALITY", "SAVED"]
    headings += [f"COST {money}", f"SAVED {money}"] if money else []
    rows = [
        [*(str(getattr(row, name) or "-") for name in groups), *_amounts(row), *_money(row.cost, money)]
        for row in report.data
    ]
    _table([*map(str.upper, groups), *headings], rows, len(groups))
    for stored in report.stored:
        month = "" if stored.month is None else f", {stored.month:,.2f} {money} a month"
        line = f"{stored.tenant} stores {stored.caches} caches, {common.megabytes(stored.bytes)}{month}"
        common.notes.print(line, style="dim")
    if report.labels:
        _print_labels(report.labels, money)
    for use in report.ttls:
        if line := _advise(use, money or ""):
            common.notes.print(line, style="yellow", soft_wrap=True)


def _print_labels(labels: Sequence[LabelUse], money: str | None) -> None:
    headings = ["TENANT", "LABEL", "CACHES", "STORED", "ASKED", "MADE", "SAVED"]
    headings += [f"COST {money}", f"SAVED {money}", "A MONTH"] if money else []
    rows = [
        [
            use.tenant,
            "-" if use.value is None else use.value,
            str(use.caches),
            common.megabytes(use.bytes),
            str(use.uses),
            *(f"{seconds:,.1f} s" for seconds in (use.made_s, use.saved_s)),
            *_money(use.cost, money),
            *([] if use.month is None else [f"{use.month:,.2f}"]),
        ]
        for use in labels
    ]
    _table(headings, rows, 2)


def _advise(use: TtlUse, money: str) -> str:
    """What a lifetime says to who chose it; nothing where most of its caches paid back."""
    if 2 * use.paid_back >= use.caches:
        return ""
    text = f"ttl {common.duration(use.ttl_s)}: {use.caches - use.paid_back} of {use.caches} caches did not pay back"
    text += f" ({use.lost:,.2f} {money} lost)"
    if use.within_s is None:
        return f"{text}; none was asked: compress such documents when they are asked"
    if use.within_s <= use.ttl_s / 2:
        lifetime = common.duration(max(use.within_s, 60.0))
        return f"{text}; of those that were asked, 95 of 100 had their last question within {lifetime}: shorten it"
    return f"{text}; {use.unused} were never asked"


def _money(cost: MoneyCost | None, money: str | None) -> list[str]:
    if money is None:
        return []
    return ["-", "-"] if cost is None else [f"{amount:,.2f}" for amount in (cost.worker, cost.saved)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> None:
    common.print_table(common.table(headings, rows, numbers=range(texts, len(headings))))


def _amounts(row: UsageRow) -> list[str]:
    tokens = (row.prefill_tokens, row.completion_tokens)
    return [
        str(row.answers),
        str(row.caches_created),
        f"{row.cache_read_tokens:,}",
        "-" if row.hit_share is None else f"{row.hit_share:.1%}",
        *(f"{count:,}" for count in tokens),
        *(f"{seconds:,.1f} s" for seconds in (row.worker_s, row.quality_s, row.saved_s)),
    ]


command(app, create)
command(app, list_keys, "list")
command(app, revoke)
