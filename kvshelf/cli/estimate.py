"""estimate: what putting a document on the shelf would take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf.cli import _common
from kvshelf.cli._common import AsJson, Url, connected

if TYPE_CHECKING:
    from kvshelf.api import EstimateObject, PolicyEstimate


def estimate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text file in UTF-8; - is standard input.")],
    policy: Annotated[
        str | None, typer.Option(help="Only this policy, or what auto would try.  [default: all]")
    ] = None,
    compression_ratio: Annotated[float | None, typer.Option(help="Fraction of the entries REMOVED, 0.75 say.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Entries kept per layer and head, instead.")] = None,
    level: Annotated[list[float] | None, typer.Option(help="A ratio of several. May be repeated.")] = None,
    param: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A parameter of the policy.")] = None,
    model: Annotated[str | None, typer.Option(help="One of the service's models.")] = None,
    layout: Annotated[str | None, typer.Option(help="chat or plain.")] = None,
    codec: Annotated[str | None, typer.Option(help="Only this codec.  [default: the five without parameters]")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Tokens, bytes and seconds that `put` would take, by policy and codec. Nothing is compressed or stored."""
    fields: dict[str, Any] = {
        "policy": policy,
        "policy_params": _common.parameters(param) or None,
        "compression_ratio": compression_ratio,
        "budget_tokens": budget_tokens,
        "levels": level or None,
        "model": model,
        "layout": layout,
        "codec": codec,
    }
    with connected(url, as_json=as_json) as client:
        document = {"document": _common.standard_input()} if file == Path("-") else {"file": file}
        found = client.estimate(**document, **fields)
        if as_json:
            _common.print_object(found)
        else:
            _common.table_console().print(_table(found))
            _common.notes.print(_about(found), style="dim", soft_wrap=True)


def _table(found: EstimateObject) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("POLICY", no_wrap=True)
    codecs = list(dict.fromkeys(codec for row in found.policies for codec in row.bytes_stored or ()))
    for heading in ("KEPT", "SECONDS", *codecs):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.policies:
        table.add_row(row.policy, *_cells(row, codecs))
    return table


def _cells(row: PolicyEstimate, codecs: list[str]) -> list[str]:
    if row.bytes_stored is None or row.seconds is None:
        return ["refused"]
    mark = {"measured": "", "other_policies": "~", "assumed": "?"}[row.basis or "assumed"]
    sizes = [_common.megabytes(row.bytes_stored[codec]) if codec in row.bytes_stored else "" for codec in codecs]
    return [str(row.kept), f"{mark}{row.seconds:.3g}", *sizes]


def _about(found: EstimateObject) -> str:
    return (
        f"{found.tokens} tokens, {_common.megabytes(found.bytes_full)} uncompressed. Seconds are measured on "
        f"{found.measured_tokens} tokens; ~ on other policies, ? assumed from the size of the model."
    )
