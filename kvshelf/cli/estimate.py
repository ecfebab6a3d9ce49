"""estimate: the cost of a put, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf.cli import _forms, _options
from kvshelf.cli.output import common, say_json
from kvshelf.cli.output.common import connected

if TYPE_CHECKING:
    from kvshelf.api import EstimateObject, PolicyEstimate


def estimate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A UTF-8 text file; - reads standard input.")],
    fields: Annotated[dict[str, Any], _forms.COST],
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Estimate the tokens, bytes and seconds of a `put`, by policy and codec. Nothing is compressed or stored."""
    with connected(url) as client:
        document = {"document": common.standard_input()} if file == Path("-") else {"file": file}
        costs = client.estimate(**document, **fields)
        if as_json:
            say_json(costs)
        else:
            common.print_table(_table(costs))
            common.notes.print(_about(costs), style="dim", soft_wrap=True)


def _table(costs: EstimateObject) -> Table:
    codecs = list(dict.fromkeys(codec for row in costs.policies for codec in row.bytes_stored or ()))
    headings = ("POLICY", "KEPT", "ADDED", "SECONDS", *codecs)
    rows = ((row.policy, *_cells(row, codecs, costs.bytes_full_16bit)) for row in costs.policies)
    return common.table(headings, rows, numbers=range(1, len(headings)))


def _cells(row: PolicyEstimate, codecs: list[str], full_16bit: int) -> list[str]:
    if row.bytes_stored is None:
        return ["refused"]
    added = "unknown" if row.compress_share is None else f"{row.compress_share:.0%}"
    mark = {None: "", "measured": "", "other_policies": "~", "assumed": "?"}[row.basis]
    seconds = "unknown" if row.seconds is None else f"{mark}{row.seconds:.3g}"
    stored = [row.bytes_stored.get(codec) for codec in codecs]
    sizes = ["" if size is None else f"{common.megabytes(size)} ({size / full_16bit:.1%})" for size in stored]
    return [str(row.kept), added, seconds, *sizes]


def _about(costs: EstimateObject) -> str:
    return (
        f"{costs.tokens} tokens. Shares are of {common.megabytes(costs.bytes_full_16bit)}, the uncompressed cache in "
        "16 bits. ADDED is what the policy adds to the time of a prefill, measured on kvshelf-tiny. Seconds are scaled "
        f"from {costs.measured_tokens} measured tokens; ~ measured on other policies, ? assumed from the size of the "
        "model; both then with what the policy adds."
    )
