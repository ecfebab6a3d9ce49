"""`kvshelf bench perplexity`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.errors import InvalidRequest
from kvshelf_bench.options import Loading, Reporting, counted, numbers, publish, split

if TYPE_CHECKING:
    from kvshelf_bench.perplexity.perplexity import Stream


@dataclass(frozen=True)
class _Streams:
    ways: Annotated[str, typer.Option(help="How the beginning is kept: such as snapkv@0.9,lagkv@128,full/int4.")] = ""
    suffixes: Annotated[str, typer.Option(help="Suffix policies for what follows: such as window:every=1,h2o.")] = ""
    budgets: Annotated[str, typer.Option(help="Entries that these leave per KV head, comma-separated.")] = "512"

    def streams(self) -> list[Stream]:
        """Raises `InvalidRequest`."""
        from kvshelf_bench.perplexity.perplexity import Stream
        from kvshelf_bench.quality.grid import make_rows

        rows, budgets = make_rows(split(self.ways)), numbers(self.budgets, "--budgets")
        bounded = (Stream.bounded(rows[0], text, budget) for text, budget in product(split(self.suffixes), budgets))
        return [*map(Stream, rows), *bounded]


@dataclass(frozen=True)
class _Windows:
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window's beginning, which is compressed.")] = 1024
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a window that follow, which are measured.")] = 256
    windows: Annotated[int, typer.Option(min=1, help="Windows of the text, without overlap.")] = 4


def perplexity(
    file: Annotated[Path, typer.Argument(help="A text, in UTF-8: a book, say.")],
    loading: Loading,
    ways: _Streams,
    windows: _Windows,
    reporting: Reporting,
) -> None:
    """Perplexity of a text behind beginnings that policies compress, and under suffix policies while it is read."""
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.measure import machine
        from kvshelf_bench.perplexity.perplexity import perplexities, windows_of

    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="file") from error
    streams, model = ways.streams(), loading.model
    engine = loading.engine_options().load()
    context, tokens = windows.context, windows.tokens
    parts = windows_of(engine.encoder.require_text("file").encode(text), context, tokens, windows.windows)
    with counted(f"{model}, {file.name}", len(parts) * len(streams)) as step:
        results = perplexities(engine, parts, streams, step)
    title = f"{model} on {file.name}: {len(parts)} windows of {context} + {tokens} tokens"
    table = Table("way", "perplexity", "over full", "95 %", "kB", "entries added", title=title)
    for one in results:
        if one.refused is not None:
            table.add_row(one.way, f"refused: {one.refused}")
            continue
        bounds = f"{one.low:.3f}-{one.high:.3f}"
        sizes = f"{one.bytes / 1000:,.0f}", f"{one.entries}"
        table.add_row(one.way, f"{one.perplexity:.2f}", f"{one.over_full:.3f}", bounds, *sizes)
    report: dict[str, Any] = {"bench": "perplexity", "model": model, "file": file.name, "context": context}
    publish(report | {"machine": machine(), "ways": results}, [table], reporting)
