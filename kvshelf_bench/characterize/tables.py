"""The tables of `kvshelf bench characterize` (every cell, and which way wins where) and of `heads`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from kvshelf_bench.characterize.heads import MASS, TAU, Head
from kvshelf_bench.characterize.load import LoadCell
from kvshelf_bench.measure import Spread
from kvshelf_bench.options import ratio

EVEN: Final = 0.05
"""Ways that differ from the best by no more than this share of it win with it."""


@dataclass(frozen=True)
class _Measure:
    title: str
    value: Callable[[LoadCell], float | None]
    shown: Callable[[float], str]
    most: bool = False

    def winners(self, cells: Sequence[LoadCell]) -> str:
        """The ways that are best, or even with it, the best one first with its value."""
        found = {cell.system: value for cell in cells if (value := self.value(cell)) is not None}
        if not found:
            return "-"
        ranked = sorted(found, key=found.__getitem__, reverse=self.most)
        best = found[ranked[0]]
        even = [name for name in ranked if abs(found[name] - best) <= EVEN * abs(best)]
        return f"{', '.join(even)}: {self.shown(best)}" if len(even) < len(found) else f"all: {self.shown(best)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


MEASURES: Final = (
    _Measure("first token", lambda cell: cell.first_s, _ms),
    _Measure("p95", lambda cell: cell.first_p95_s, _ms),
    _Measure("tokens/s", lambda cell: cell.tokens_per_s, lambda rate: f"{rate:,.0f}", most=True),
    _Measure("memory", lambda cell: cell.memory_bytes, lambda held: f"{held / 1e6:,.1f} MB"),
    _Measure("PTE", lambda cell: cell.equivalents, lambda cost: f"{cost:,.0f}"),
    _Measure("exact", lambda cell: cell.exact, lambda share: f"{share:.0%}", most=True),
)


def cells_table(cells: Sequence[LoadCell]) -> Table:
    """One row for each model, rate and way."""
    table = Table("model", "rate", "system", "share", *(measure.title for measure in MEASURES))
    table.title = "documents under int4; of the share, quest reads and h2o and kvzip keep; PTE of an answer"
    for cell in cells:
        found = ((measure, measure.value(cell)) for measure in MEASURES)
        shown = ("-" if value is None else measure.shown(value) for measure, value in found)
        table.add_row(cell.model, f"{cell.rate:g}/s", cell.system, f"{cell.share:g}", *shown)
    return table


def winners_table(cells: Sequence[LoadCell]) -> Table:
    """Which wins where: a row for each model, rate and share. `full` has no share and is compared in each row."""
    table = Table("model", "rate", "share", *(measure.title for measure in MEASURES))
    table.title = f"which wins where: the best, and those within {EVEN:.0%} of it"
    shares = sorted({cell.share for cell in cells if cell.system != "full"}, reverse=True) or [1.0]
    for model, rate in dict.fromkeys((cell.model, cell.rate) for cell in cells):
        here = [cell for cell in cells if (cell.model, cell.rate) == (model, rate)]
        for share in shares:
            compared = [cell for cell in here if cell.system == "full" or cell.share == share]
            table.add_row(model, f"{rate:g}/s", f"{share:g}", *(each.winners(compared) for each in MEASURES))
    return table


def heads_table(heads: Sequence[Head]) -> Table:
    """One row for each layer: median and range over its KV heads."""
    table = Table("layer", "heads", "sparsity", "redundancy", "mergeable")
    table.title = (
        f"share of tokens beyond those that receive {MASS:.0%} of the attention; similarity of the most similar other "
        f"token; share of tokens where it is {TAU} or more"
    )
    for layer in dict.fromkeys(head.layer for head in heads):
        own = [head for head in heads if head.layer == layer]
        columns = ([getattr(head, name) for head in own] for name in ("sparsity", "redundancy", "mergeable"))
        table.add_row(str(layer), str(len(own)), *(ratio(Spread.of(column)) for column in columns))
    return table
