"""How well a model answers from the cache of each policy and codec, at how many bytes, on made documents.

Documents are compressed without their questions. Every policy gets the same documents; all codecs of a policy and ratio
encode one and the same compressed cache.
"""

from __future__ import annotations

from pathlib import Path

from kvshelf.samples.suite import make_case
from kvshelf.workers.replica.create.sizes import Dimensions
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.quality.grid import Grid, MadeUnit
from kvshelf_bench.quality.measuring import Progress, outcomes, require_resumable
from kvshelf_bench.quality.outcome import Protocol
from kvshelf_bench.quality.retrieval import counter
from kvshelf_bench.quality.summary import Summary


def run(
    grid: Grid,
    options: EngineOptions,
    resume: Path,
    *,
    processes: int = 0,
    progress: Progress[MadeUnit] = lambda *_: None,
) -> Summary:
    """Measure the units of `grid` that the file `resume` lacks, append them there, and summarize all units.

    processes: see `outcomes`. A policy that refuses a document refuses its cell. Raises `InvalidRequest` before any
    work for a length that cannot hold a task, and for a file that the bench did not write.
    """
    require_resumable(resume)
    engine = options.load()
    protocol = Protocol.of(engine, grid.questions, grid.seed)
    for cell in grid.cells():
        make_case(cell.task, cell.haystack, cell.tokens, 0, counter(engine), questions=grid.questions)
    units = grid.units()
    known = outcomes(units, protocol, engine, options, resume, processes=processes, progress=progress)
    measured = ((row, unit.cell, known[protocol.key(unit, row)]) for unit in units for row in unit.rows)
    return Summary.of(grid.cells(), grid.rows(), measured, Dimensions.of(engine.model).full_16bit_bytes(1))
