"""Runs rows of the quality bench over the documents of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvshelf.workers.replica.create.sizes import Shape
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.measuring import DatasetProtocol, DocumentUnit, make_units
from kvshelf_bench.quality.dataset.summary import DatasetSummary
from kvshelf_bench.quality.grid import Row
from kvshelf_bench.quality.measuring import Progress, outcomes, require_resumable


def run(
    documents: Sequence[Document],
    rows: Sequence[Row],
    options: EngineOptions,
    resume: Path,
    *,
    max_new_tokens: int,
    cues: int,
    processes: int = 0,
    progress: Progress[DocumentUnit] = lambda *_: None,
) -> DatasetSummary:
    """Measure what the file `resume` lacks, append it there, and summarize all. `rows` begin with the full cache.

    processes: see `outcomes`. Raises `InvalidRequest` before any work for a file that the bench did not write.
    """
    require_resumable(resume)
    engine = options.load()
    protocol = DatasetProtocol.of(engine, max_new_tokens, cues)
    units = make_units(documents, rows)
    known = outcomes(units, protocol, engine, options, resume, processes=processes, progress=progress)
    found = {(unit.document.id, row): known[protocol.key(unit, row)] for unit in units for row in unit.rows}
    by_row = {row: [found[document.id, row] for document in documents] for row in rows}
    return DatasetSummary(documents, by_row, Shape.of(engine.model).full_16bit_bytes(1))
