"""Runs rows of the quality bench over the documents of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.workers.replica.create.sizes import Shape
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.measuring import Asking, DatasetProtocol, DocumentUnit, make_units
from kvshelf_bench.quality.dataset.summary import DatasetSummary
from kvshelf_bench.quality.grid import Row
from kvshelf_bench.quality.measuring import Progress, outcomes, require_resumable

_TEMPLATE_TOKENS = 64
"""Room for what a chat template writes around the document and a question."""


def run(
    documents: Sequence[Document],
    rows: Sequence[Row],
    options: EngineOptions,
    resume: Path,
    asking: Asking,
    *,
    longest: int | None = None,
    processes: int = 0,
    progress: Progress[DocumentUnit] = lambda *_: None,
) -> DatasetSummary:
    """Measure what the file `resume` lacks, append it there, and summarize all. `rows` begin with the full cache.

    longest: the tokens of a context beyond which its middle is cut out (0: what the model takes); None cuts none, and a
    document that is too long is refused. processes: see `outcomes`. Raises `InvalidRequest` before any work for a file
    that the bench did not write.
    """
    require_resumable(resume)
    engine = options.load()
    if longest is not None:
        documents = [truncated(engine, document, asking, longest) for document in documents]
    protocol = DatasetProtocol.of(engine, asking)
    units = make_units(documents, rows, asking)
    known = outcomes(units, protocol, engine, options, resume, processes=processes, progress=progress)
    found = {(unit.document.id, row): known[protocol.key(unit, row)] for unit in units for row in unit.rows}
    by_row = {row: [found[document.id, row] for document in documents] for row in rows}
    return DatasetSummary.of(documents, by_row, Shape.of(engine.model).full_16bit_bytes(1))


def truncated(engine: Engine, document: Document, asking: Asking, longest: int) -> Document:
    """The document without the middle of its context where it has more tokens than `longest` (0: than the model takes
    with its longest question and answer): as many from its beginning as from its end, as LongBench does."""
    form = engine.encoder.require_text("document")
    room = longest
    if not longest:
        asked = (form.count_tokens(one.text + one.prefix) + asking.tokens(one) for one in document.questions)
        room = engine.max_tokens - max(asked) - _TEMPLATE_TOKENS
    token_ids = form.encode(document.context)
    if len(token_ids) <= room:
        return document
    if room < 2:
        raise InvalidRequest(f"{document.id}: its questions leave no room for a document", param="truncate")
    half = room // 2
    return replace(document, context=form.decode(token_ids[:half]) + form.decode(token_ids[-half:]))
