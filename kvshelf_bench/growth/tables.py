"""The tables of the benches of documents that grow."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvshelf_bench.growth.speed import APPENDED, Growing
from kvshelf_bench.growth.turns import Turned
from kvshelf_bench.measure import Spread


def growing_table(found: Sequence[Growing]) -> Table:
    """A row for each length and level."""
    headings = ("tokens", "policy", "codec", "prefilled", "append", "all anew", "append / anew", "written", "of new")
    table = Table(*headings, "of all", title=f"{APPENDED} tokens appended to a stored cache")
    for row in found:
        table.add_row(
            f"{row.tokens}", row.policy, row.codec, f"{row.prefilled}", _ms(row.append_s), _ms(row.anew_s),
            f"1/{1 / row.ratio.median:.1f}", f"{row.written_bytes / 1e6:.2f} MB",
            f"{row.written_bytes / row.new_bytes:.2f}", f"{row.written_bytes / row.whole_bytes:.1%}",
        )  # fmt: skip
    return table


def turns_table(stored: Sequence[Turned], resent: Sequence[Turned], same: int) -> Table:
    """A row for each turn."""
    table = Table("turn", "from the shelf", "prefilled", "first token", "without store: prefilled", "first token")
    table.title = f"a conversation that is sent whole at every turn; {same} of {len(stored)} answers the same"
    for row, plain in zip(stored, resent, strict=True):
        table.add_row(
            f"{row.number}", f"{row.read}", f"{row.prefilled}", f"{1000 * row.first_s:.0f} ms",
            f"{plain.prefilled}", f"{1000 * plain.first_s:.0f} ms",
        )  # fmt: skip
    return table


def _ms(spread: Spread) -> str:
    return f"{1000 * spread.median:,.1f} ms"
