"""How well a model answers from what each policy and codec keeps, at how many bytes.

Every document is compressed without knowing its questions. The same documents are asked under every policy; all codecs
of a policy and ratio are applied to one and the same compressed cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvshelf.bench.engines import EngineOptions
from kvshelf.bench.quality.journal import Journal
from kvshelf.bench.quality.outcome import Outcome, Protocol, measure_unit
from kvshelf.bench.quality.plan import Plan, Unit
from kvshelf.bench.quality.pool import default_processes, measured
from kvshelf.bench.quality.retrieval import counter
from kvshelf.bench.quality.suite import make_case
from kvshelf.bench.quality.summary import Summary
from kvshelf.workers.engine.engine import Engine

Progress = Callable[[Unit, bool], None]
"""Called with each unit that is done, and whether it was found in the journal."""


def run(
    plan: Plan, options: EngineOptions, journal: Path, *, processes: int = 0, progress: Progress = lambda *_: None
) -> Summary:
    """Measure everything in `plan` that `journal` does not hold yet, write it there, and put all of it together.

    processes: 0 means one per core. The result depends neither on it nor on the order of the units: each unit is a
    function of its settings alone, and each process runs on `options.threads` threads. A policy that refuses a document
    refuses its cell. Raises `InvalidRequest` before any work for a length that cannot hold a task, and for a file that
    the bench did not write.
    """
    if journal.exists():  # only then: a run that is refused for its lengths leaves no file
        with Journal(journal) as file:
            file.load()
    engine = options.load()
    protocol = Protocol.of(engine, plan.questions, plan.seed)
    for cell in plan.cells():
        make_case(cell.task, cell.haystack, cell.tokens, 0, counter(engine), questions=plan.questions)
    units = plan.units()
    with Journal(journal) as file:
        known = file.load()
        missing = []
        for unit in units:
            rest = _missing(unit, protocol, known)
            if rest.rows:
                missing.append(rest)
            else:
                progress(unit, True)
        for unit, outcomes in _measured(missing, protocol, options, engine, processes):
            for row, outcome in zip(unit.rows, outcomes, strict=True):
                file.append(outcome, _about(unit, row.codec, row.exported))
                known[outcome.key] = outcome
            progress(unit, False)
    found = ((row, unit.cell, known[protocol.key(unit, row)]) for unit in units for row in unit.rows)
    return Summary.of(plan.cells(), plan.rows(), found)


def _missing(unit: Unit, protocol: Protocol, known: Mapping[str, Outcome]) -> Unit:
    """The unit with the rows that have yet to be measured."""
    return replace(unit, rows=tuple(row for row in unit.rows if protocol.key(unit, row) not in known))


def _measured(
    units: list[Unit], protocol: Protocol, options: EngineOptions, engine: Engine, processes: int
) -> Iterator[tuple[Unit, list[Outcome]]]:
    """In this process where one is enough, which also shows an error where it is."""
    processes = processes or default_processes(protocol.device)
    if processes == 1 or len(units) < 2 * processes:
        for unit in units:
            yield unit, measure_unit(engine, unit, protocol)
        return
    for place, outcomes in measured(units, protocol, options, processes):
        yield units[place], outcomes


def _about(unit: Unit, codec: str, exported: bool) -> dict[str, object]:
    return {
        "cell": unit.cell.label,
        "document": unit.document,
        "policy": unit.variant.label,
        "removed": unit.removed,
        "codec": codec,
        "exported": exported,
    }
