"""`kvshelf bench models`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.terminal import progress_bar
from kvshelf_bench.options import Reporting, Threads, choices, publish

if TYPE_CHECKING:
    from kvshelf_bench.models.trial import TrialOutcome


def models(
    *,
    types: Annotated[str, typer.Option(help="Model types of transformers, comma-separated.  [default: all]")] = "",
    limit_s: Annotated[float, typer.Option("--limit", min=1, help="Seconds that a type may take.")] = 60.0,
    threads: Threads = 1,
    reporting: Reporting,
) -> None:
    """Which model types of transformers kvshelf takes: a small random model of each, behind a stored document.

    exact: its logits behind the document are those that it gives when it reads the document again. refused: kvshelf
    says that it cannot attach to it. wrong and error: mistakes of kvshelf, and the exit code is 1.
    """
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.measure import machine, use_threads
        from kvshelf_bench.models.small import TYPES
        from kvshelf_bench.models.trial import ERROR, WHAT, WRONG, tried

    chosen = choices(types, TYPES, "--types") if types else list(TYPES)
    use_threads(threads)
    where = machine()
    with progress_bar() as progress:
        outcomes = [tried(model_type, limit_s) for model_type in progress.track(chosen, description="model types")]
    publish({"bench": "models", "machine": where, "outcomes": outcomes}, [_table(outcomes)], reporting)
    if not reporting.as_json:
        counter = Counter(outcome.what for outcome in outcomes)
        counts = ", ".join(f"{what} {counter[what]}" for what in WHAT)
        typer.echo(f"{counts} of transformers {where['transformers']}")
    if any(outcome.what in (WRONG, ERROR) for outcome in outcomes):
        raise typer.Exit(1)


def _table(outcomes: Sequence[TrialOutcome]) -> Table:
    table = Table("type", "outcome", "why, or the difference of logits")
    for outcome in outcomes:
        shown = outcome.why if outcome.difference is None else f"{outcome.difference:.1e} of the largest"
        table.add_row(outcome.model_type, outcome.what, shown)
    return table
