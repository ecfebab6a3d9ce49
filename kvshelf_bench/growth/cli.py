"""`kvshelf bench append`, `growing` and `turns`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.terminal import progress_bar
from kvshelf_bench.growth.options import Documents
from kvshelf_bench.options import Device, Dtype, Loading, Model, Reporting, Threads, counted, numbers, publish


def append(
    *,
    model: Model = "random:8",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    lengths: Annotated[str, typer.Option(help="Tokens of the stored document.")] = "4096,32768",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 3,
    reporting: Reporting,
) -> None:
    """Appending to a stored cache, beside compressing the whole text anew: seconds and bytes.

    --model random:8 is a Llama of 8 layers of random weights.
    """
    with needs_extra("serve", "the bench"):
        from kvshelf.store.url import open_store
        from kvshelf_bench.engines import EngineOptions
        from kvshelf_bench.growth.speed import growing_table, growings
        from kvshelf_bench.measure import load_warning, machine
        from kvshelf_bench.speed.subject import load_subject

    where, sizes = machine(), numbers(lengths)
    with (
        load_subject(EngineOptions(model, device, dtype, threads)) as subject,
        tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder,
        open_store(f"disk://{folder}/shelf") as store,
        progress_bar() as progress,
    ):
        rows = [*progress.track(growings(subject, store, sizes, rounds), 2 * len(sizes), description="appending")]
    report: dict[str, Any] = {"bench": "append", "model": model, "rounds": rounds, "machine": where, "rows": rows}
    publish(report, [growing_table(rows)], reporting, notes=load_warning(where))


@dataclass(frozen=True)
class _Caches:
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = (
        "keydiff,snapkv,kvzip,expected_attention,streaming_llm"
    )
    removed: Annotated[float, typer.Option(help="Fraction that the policies remove.")] = 0.5
    codec: Annotated[str, typer.Option(help="Of every cache.")] = "none"


def growing(loading: Loading, caches: _Caches, documents: Documents, reporting: Reporting) -> None:
    """Exact answers behind a document that grew by appends, beside the same text compressed as one."""
    with needs_extra("serve", "the bench"):
        from kvshelf_bench.growth.quality import measure_grown
        from kvshelf_bench.measure import machine

    engine, model, codec = loading.engine_options().load(), loading.model, caches.codec
    levels = [("full", 0.0), *((name.strip(), caches.removed) for name in caches.policies.split(","))]
    with counted(model, documents.documents * len(levels)) as step:
        rows = [measure_grown(engine, policy, removed, codec, documents, step) for policy, removed in levels]
    title = f"{model}, {codec}: {documents.tokens} tokens in {documents.appends + 1} parts, exact answers"
    table = Table("policy", "removed", "questions", "grown", "95 %", "as one", "bytes, grown / as one", title=title)
    for row in rows:
        grown, whole = (f"{100 * hits / row.questions:.1f} %" for hits in (row.grown, row.whole))
        size = f"{row.grown_bytes / row.whole_bytes:.3f}"
        cells = (f"{row.removed:.0%}", f"{row.questions}", grown, f"{row.low:.1%} - {row.high:.1%}", whole, size)
        table.add_row(row.policy, *cells)
    report: dict[str, Any] = {"bench": "growing", "model": model, "codec": codec, "machine": machine(), "rows": rows}
    publish(report, [table], reporting)


def turns(
    *,
    url: Annotated[str, typer.Option(help="Of a running service.")] = "http://127.0.0.1:8000",
    count: Annotated[int, typer.Option("--turns", min=2, max=48, help="Turns of the conversation.")] = 20,
    tokens: Annotated[int, typer.Option(min=300, help="Of the document, about.")] = 4096,
    reporting: Reporting,
) -> None:
    """A conversation about a stored document, sent whole at every turn: what is prefilled, and the time to the first
    token, with `store` and without."""
    with needs_extra("serve", "the bench"):
        from kvshelf.client import Client
        from kvshelf.samples.tasks import make_document
        from kvshelf_bench.growth.turns import conversation, turns_table
        from kvshelf_bench.measure import machine

    document = make_document("multikey", "prose", tokens, 0, lambda text: -(-len(text) // 4))  # about as many tokens
    questions = [document.questions[turn % len(document.questions)].text for turn in range(count)]
    where = machine()
    with Client(url) as client, counted("turns", 2 * len(questions)) as step:
        resent, plain = conversation(client, url, document.text, questions, store=False, progress=step)
        stored, texts = conversation(client, url, document.text, questions, store=True, progress=step)
    same = sum(a == b for a, b in zip(plain, texts, strict=True))
    report = {"bench": "turns", "machine": where, "stored": stored, "resent": resent, "same": same}
    publish(report, [turns_table(stored, resent, same)], reporting)
