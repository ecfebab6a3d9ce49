"""policies: the compression policies, when to choose each, and how they measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.cli import _common, _options
from kvshelf.errors import InvalidRequest, nearest

if TYPE_CHECKING:
    from kvshelf.api import PolicyObject

_REMOVED = (0.5, 0.75, 0.875, 0.9375)


def policies(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show only this policy, with its parameters.")
    ] = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """List the compression policies, when to choose each, and what they cost on the bundled model.

    Lists the policies of this version, or with --url those of a service. With NAME, shows one policy in full.
    """
    with _common.named_errors(as_json=as_json):
        found = _found(url, as_json)
        if name is not None:
            names = [policy.id for policy in found]
            if name not in names:
                raise InvalidRequest(
                    f"unknown policy {name!r}{nearest(name, names)}; `kvshelf policies` lists them", param="policy"
                )
            found = [found[names.index(name)]]
    if as_json:
        for policy in found:
            _common.print_object(policy)
    elif name is not None:
        _show(found[0])
    else:
        console = _common.table_console()
        console.print(_table(found))
        console.print(_LEGEND, style="dim")


_LEGEND = (
    "Numbers: per cent of exact answers after removing that share of the entries, when the question is not known yet; "
    "the mean over the tasks that kvshelf-tiny solves with the full cache. `kvshelf policies NAME` shows parameters, "
    "`kvshelf bench quality` measures your own model."
)


def _found(url: str | None, as_json: bool) -> list[PolicyObject]:
    if url is not None:
        with _common.connected(url, as_json=as_json) as client:
            return client.policies.list()
    from kvshelf.api import PolicyObject
    from kvshelf.workers.policies import catalog

    with needs_extra("serve", purpose="kvshelf policies, beside policies of other packages,"):
        return [PolicyObject.model_validate(info.to_dict()) for info in catalog()]


def _table(policies: list[PolicyObject]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("POLICY", no_wrap=True)
    table.add_column("WHAT IT KEEPS", ratio=3)
    table.add_column("CHOOSE IT", ratio=3)
    for removed in _REMOVED:
        table.add_column(f"{100 * removed:.4g} %", justify="right", no_wrap=True)
    for policy in policies:
        cells = [_exact(policy.measured, removed) for removed in _REMOVED]
        table.add_row(policy.id, policy.summary, policy.advice or "-", *cells)
    return table


def _exact(measured: list[dict[str, Any]], removed: float) -> str:
    rows = [row for row in measured if row["codec"] == "none" and row["removed"] in (removed, 0.0)]
    return f"{100 * rows[0]['exact']:.0f}" if rows else "-"


def _show(policy: PolicyObject) -> None:
    console = _common.table_console()
    console.print(f"{policy.id}: {policy.summary}", style="bold")
    for line in (f"Choose it: {policy.advice}" if policy.advice else "", f"Source: {policy.source}"):
        if line:
            console.print(line)
    headings = ("PARAMETER", "DEFAULT", "LEGAL", "MEANING")
    table = Table(*headings, box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name, about in policy.parameters.items():
        default = "null" if about["default"] is None else str(about["default"])
        table.add_row(name, default, str(about["legal"]), str(about["help"]))
    console.print(table if policy.parameters else "It has no parameters.")
    for row in policy.measured:
        console.print(
            f"{row['removed']:.4g} removed, codec {row['codec']}: {row['exact']:.1%} exact, "
            f"{row['bytes_per_token']:.0f} bytes per document token, {row['compress_share']:.1%} of the prefill's time"
        )
