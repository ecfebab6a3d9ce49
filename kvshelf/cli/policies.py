"""policies, selectors, suffixes: what each method does, when to choose it, and how it measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.cli import _options
from kvshelf.cli.output import common, say_json
from kvshelf.errors import InvalidRequest, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvshelf.api import PolicyObject, SelectorObject, SuffixPolicyObject

    Method = PolicyObject | SelectorObject | SuffixPolicyObject

Numbers = Mapping[str, Callable[[list[dict[str, Any]]], str]]
"""Columns of figures by their headings, each made of the measured rows of a method."""

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
    methods = _named(_listed(url, "policies"), name, "policy", "policies")
    numbers = {f"{100 * removed:.4g} %": partial(_exact, removed=removed) for removed in _REMOVED}
    _print(methods, name, ("POLICY", "WHAT IT KEEPS"), numbers, _LEGEND, as_json=as_json)


def selectors(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show only this selector, with its parameters.")
    ] = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """List the selectors, which choose for one question what it reads of a stored cache, and how they measured.

    Lists the selectors of this version, or with --url those of a service. With NAME, shows one selector in full.
    """
    methods = _named(_listed(url, "selectors"), name, "selector", "selectors")
    numbers = {f"1/{round(1 / share)}": partial(_read, share=share) for share in _SHARES}
    _print(methods, name, ("SELECTOR", "WHAT IT READS"), numbers, _SELECTORS_LEGEND, as_json=as_json)


def suffixes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show only this suffix policy, with its parameters.")
    ] = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """List the suffix policies, which bound what an answer holds in memory beside its documents.

    Lists those of this version, or with --url those of a service. With NAME, shows one in full.
    """
    methods = _named(_listed(url, "suffix_policies"), name, "suffix policy", "suffixes")
    _print(methods, name, ("POLICY", "WHAT STAYS"), {}, _SUFFIXES_LEGEND, as_json=as_json)


def _named(methods: list[Any], name: str | None, kind: str, command: str) -> list[Any]:
    """Those of this name, or all. Raises `InvalidRequest` for a name that none has."""
    names = [method.id for method in methods]
    if name is not None and name not in names:
        raise InvalidRequest(
            f"unknown {kind} {name!r}{nearest(name, names)}; `kvshelf {command}` lists them", param=kind
        )
    return [method for method in methods if name in (None, method.id)]


def _print(
    methods: Sequence[Method],
    name: str | None,
    headings: tuple[str, str],
    numbers: Numbers,
    legend: str,
    *,
    as_json: bool,
) -> None:
    """A table, or one method in full."""
    if as_json:
        for method in methods:
            say_json(method)
    elif name is not None:
        _show(methods[0])
    else:
        console = common.table_console()
        console.print(_table(methods, headings, numbers))
        console.print(legend, style="dim")


_SHARES = (0.25, 0.125, 0.0625, 0.03125)

_SELECTORS_LEGEND = (
    "Numbers: per cent of exact answers if a token of an answer reads that part of a document's entries, all of which "
    "are stored under int4; the mean over the tasks that kvshelf-tiny solves with the full cache. `kvshelf selectors "
    "NAME` shows parameters, `kvshelf bench quality --select` measures your own model."
)


def _read(measured: list[dict[str, Any]], share: float) -> str:
    rows = [row for row in measured if row["share"] == share and not row["params"]]
    return f"{100 * rows[0]['exact']:.0f}" if rows else "-"


_SUFFIXES_LEGEND = "`kvshelf suffixes NAME` shows parameters, `kvshelf ask --suffix NAME` uses one."

_LEGEND = (
    "Numbers: per cent of exact answers after removing that share of the entries, when the question is not known yet; "
    "the mean over the tasks that kvshelf-tiny solves with the full cache. `kvshelf policies NAME` shows parameters, "
    "`kvshelf bench quality` measures your own model."
)


def _listed(url: str | None, group: str) -> list[Any]:
    """Those of a service, or else of this version. group: the client's name for them."""
    if url is not None:
        with common.connected(url) as client:
            return getattr(client, group).list()  # type: ignore[no-any-return]
    from kvshelf import api
    from kvshelf.methods.catalog import catalog
    from kvshelf.methods.method import POLICY, SELECTOR, SUFFIX_POLICY, Kind

    homes: dict[str, tuple[type[BaseModel], Kind, str]] = {
        "policies": (api.PolicyObject, POLICY, "policies, beside policies"),
        "selectors": (api.SelectorObject, SELECTOR, "selectors, beside selectors or policies"),
        "suffix_policies": (api.SuffixPolicyObject, SUFFIX_POLICY, "suffixes, beside suffix policies"),
    }
    listed, kind, purpose = homes[group]
    with needs_extra("serve", purpose=f"kvshelf {purpose} of other packages,"):
        return [listed.model_validate(info.to_dict()) for info in catalog(kind)]


def _table(methods: Sequence[Method], headings: tuple[str, str], numbers: Numbers) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column(headings[0], no_wrap=True)
    for heading in (headings[1], "CHOOSE IT"):
        table.add_column(heading, ratio=3)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for method in methods:
        figures = (number(_rows(method)) for number in numbers.values())
        table.add_row(method.id, method.summary, method.advice or "-", *figures)
    return table


def _rows(method: Method) -> list[dict[str, Any]]:
    """What the quality bench measured; of suffix policies it measures nothing."""
    return getattr(method, "measured", [])


def _exact(measured: list[dict[str, Any]], removed: float) -> str:
    rows = [row for row in measured if row["codec"] == "none" and row["removed"] in (removed, 0.0)]
    return f"{100 * rows[0]['exact']:.0f}" if rows else "-"


def _show(policy: Method) -> None:
    console = common.table_console()
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
    for row in _rows(policy):
        console.print(_measured(row))


def _measured(row: dict[str, Any]) -> str:
    if "share" in row:
        params = "".join(f", {name} {value}" for name, value in row["params"].items())
        return f"{row['read_share']:.1%} of the entries read{params}, codec {row['codec']}: {row['exact']:.1%} exact"
    return (
        f"{row['removed']:.4g} removed, codec {row['codec']}: {row['exact']:.1%} exact, "
        f"{row['bytes_per_token']:.0f} bytes per document token, {row['compress_share']:.1%} of the prefill's time"
    )
