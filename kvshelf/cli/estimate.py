"""estimate: the cost of a put, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf.cli import _common
from kvshelf.cli._common import BUDGET_HELP, LAYOUT_HELP, MODEL_HELP, RATIO_HELP, AsJson, Parameters, Url, connected

if TYPE_CHECKING:
    from kvshelf.api import EstimateObject, PolicyEstimate


def estimate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A UTF-8 text file; - reads standard input.")],
    policy: Annotated[
        str | None, typer.Option(help="Estimate only this policy; auto: the ones it would try.  [default: all]")
    ] = None,
    compression_ratio: Annotated[float | None, typer.Option(help=RATIO_HELP)] = None,
    budget_tokens: Annotated[int | None, typer.Option(help=BUDGET_HELP)] = None,
    level: Annotated[list[float] | None, typer.Option(help="A compression ratio. May be repeated.")] = None,
    param: Parameters = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    layout: Annotated[str | None, typer.Option(help=LAYOUT_HELP)] = None,
    codec: Annotated[
        str | None, typer.Option(help="Estimate only this codec.  [default: the five without parameters]")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the tokens, bytes and seconds of a `put`, by policy and codec. Nothing is compressed or stored."""
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
        f"{found.tokens} tokens, {_common.megabytes(found.bytes_full)} uncompressed. Seconds are scaled from "
        f"{found.measured_tokens} measured tokens; ~ measured on other policies, ? assumed from the size of the model."
    )
