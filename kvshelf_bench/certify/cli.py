"""`kvshelf bench certify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf_bench.options import Loading, Reporting, counted, decimals, publish, writable

if TYPE_CHECKING:
    from kvshelf_bench.certify.splits import SplitResult


@dataclass(frozen=True)
class _Graded:
    """The documents, and where what was graded is kept."""

    documents: Annotated[int, typer.Option(min=1, help="Made documents to grade, of six kinds.")] = 300
    dataset: Annotated[
        str | None, typer.Option(help="Documents of yours in their place, as of `kvshelf bench quality`.")
    ] = None
    losses: Annotated[
        Path | None,
        typer.Option(
            callback=writable, help="File of what was graded, JSON lines: kept, and read again in place of it."
        ),
    ] = None


def certify(
    *,
    documents: _Graded,
    alphas: Annotated[
        str, typer.Option(help="Shares of answers that may be lost, comma-separated.")
    ] = "0.01,0.02,0.05,0.1",
    splits: Annotated[
        int, typer.Option(min=1, help="Splits of the documents: two thirds certify, the others count.")
    ] = 500,
    loading: Loading,
    reporting: Reporting,
) -> None:
    """Whether the bound of `kvshelf certify` holds, and what it saves: documents are graded once and split many times.

    Of each figure: the mean loss of the documents that did not certify, and their bytes, of full caches in 16 bits and
    of one level for all documents that the same bound allows (pooled).
    """
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.certify.losses import graded_documents
        from kvshelf_bench.certify.splits import ORDERS, outcomes
        from kvshelf_bench.measure import machine, use_threads

    bounds = decimals(alphas, "--alphas", 0, 1)
    use_threads(loading.threads)
    rows = graded_documents(loading.engine_options(), documents.documents, documents.dataset, documents.losses)
    results: list[SplitResult] = []
    with counted("splits", len(bounds) * len(ORDERS)) as advance:
        for outcome in outcomes(rows, bounds, splits):
            results.append(outcome)
            advance()
    report = {"bench": "certify", "machine": machine(), "documents": len(rows), "outcomes": results}
    publish(report, [_table(results)], reporting, notes=f"{len(rows)} documents, {splits} splits")


def _table(results: list[SplitResult]) -> Table:
    table = Table("alpha", "figure", "refused", "mean loss", "bytes", "pooled: loss", "bytes", "of pooled")
    for one in results:
        cells = ("-",) * 5
        if one.loss is not None:
            numbers = f"{one.loss:.4f}", f"{one.share:.4f}", f"{one.pooled_loss:.4f}", f"{one.pooled_share:.4f}"
            cells = (*numbers, f"{one.share / one.pooled_share:.2f}")
        table.add_row(f"{one.alpha:g}", one.order, str(one.refused), *cells)
    return table
