"""`kvshelf bench quality --dataset`: from what was asked for to measured rows, tables, report, picture and folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.terminal import progress_bar
from kvshelf.workers.replica.create.sizes import Dimensions
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.measure import machine
from kvshelf_bench.options import Reporting, publish, rendered, split
from kvshelf_bench.quality.dataset import abilities, folder
from kvshelf_bench.quality.dataset.documents import Document, draw_documents, read_documents, read_prompts
from kvshelf_bench.quality.dataset.kvpress import Kvpress
from kvshelf_bench.quality.dataset.measuring import Asking, DatasetProtocol, DocumentUnit, make_units
from kvshelf_bench.quality.dataset.rows import RowRules
from kvshelf_bench.quality.dataset.summary import DatasetSummary, way_label
from kvshelf_bench.quality.dataset.tables import compare, compare_table, dataset_tables, notes
from kvshelf_bench.quality.grid import FEATURED, PLAIN, Changes, Row, make_grid, make_rows
from kvshelf_bench.quality.measuring import Progress, outcomes, require_resumable
from kvshelf_bench.quality.options import DatasetOptions
from kvshelf_bench.quality.outcome import Outcome
from kvshelf_bench.scorers.scorers import SCORERS

CUES = 150
"""Of each cache's figure by default, where the questions are unknown."""


@dataclass(frozen=True, kw_only=True)
class DatasetRequest(DatasetOptions):
    """The options of `kvshelf bench quality` for a dataset. changes: of the rows, where there are no `ways`."""

    bench: str
    resume: Path
    processes: int
    reporting: Reporting
    changes: Changes = field(default_factory=Changes)
    seed: int = 0
    picture: Path | None = None

    def asking(self) -> Asking:
        """Raises `InvalidRequest`."""
        _require(self.questions in ("known", "unknown"), "questions", "known or unknown", self.questions)
        known = self.questions == "known"
        if known and self.turns:
            raise InvalidRequest("--turns asks questions that are unknown; leave --questions out", param="turns")
        if known and self.cues:
            raise InvalidRequest("--cues measures caches for unknown questions; leave it out", param="cues")
        cues = (0 if known else CUES) if self.cues is None else self.cues
        return Asking(self.max_new_tokens, cues, known, self.turns)

    def rows(self) -> list[Row]:
        """Raises `InvalidRequest`."""
        if self.ways:
            return make_rows(split(self.ways))
        changes = replace(self.changes, policies=self.changes.policies or FEATURED)
        if not changes.ratios and not changes.budgets:
            changes = replace(changes, ratios=(0.5,))
        return make_grid("small", changes).rows()

    def documents(self) -> list[Document]:
        """Raises `InvalidRequest`."""
        if self.scorer:
            _require(self.scorer in SCORERS, "scorer", f"one of {', '.join(SCORERS)}", self.scorer)
        if self.dataset == abilities.NAME:
            documents = abilities.documents(self.seed, turns=self.turns)
            return draw_documents(documents, fraction=self.fraction, limit=self.limit, seed=self.seed)
        prompts = read_prompts(self.prompts) if self.prompts is not None else {}
        documents = read_documents(self.dataset, RowRules(self.scorer, prompts))
        return draw_documents(documents, fraction=self.fraction, limit=self.limit, seed=self.seed)

    def longest(self) -> int | None:
        """As of `run`. Raises `InvalidRequest`."""
        manner, colon, tokens = self.truncate.partition(":")
        fits = (manner == "middle" and (not colon or (tokens.isdecimal() and int(tokens) >= 2))) or not self.truncate
        _require(fits, "truncate", "middle, or middle:N with tokens from 2", self.truncate)
        return (int(tokens) if tokens else 0) if self.truncate else None


@dataclass(frozen=True)
class MadeDocuments:
    """Documents in place of those of a dataset. tables: more of them; draw: another picture."""

    documents: Sequence[Document]
    tables: Callable[[DatasetSummary], list[Table]]
    draw: Callable[..., None]


def measure(request: DatasetRequest, options: EngineOptions, source: MadeDocuments | None = None) -> None:
    """Read, measure, and publish. All that may be refused is refused before a model is loaded."""
    if request.results is not None:
        folder.require_new(request.results)
    before = None if request.compare is None else folder.read_report(request.compare)
    asking, rows, longest = request.asking(), request.rows(), request.longest()
    documents = request.documents() if source is None else source.documents
    kvpress = Kvpress.of(request.baseline, request.kvpress_python, options, asking)
    with _bar(len(make_units(documents, rows, asking))) as done:
        summary = run(
            documents, rows, options, request.resume, asking,
            longest=longest, processes=request.processes, progress=done,
        )  # fmt: skip
    if kvpress is not None:
        summary = summary.beside("kvpress", kvpress.run(summary.documents, rows))
    _publish(request, options, asking, summary, before, source)


def _publish(
    request: DatasetRequest,
    options: EngineOptions,
    asking: Asking,
    summary: DatasetSummary,
    before: dict[str, Any] | None,
    source: MadeDocuments | None,
) -> None:
    part = {name: getattr(request, name) for name in ("fraction", "limit", "seed", "scorer", "truncate")}
    report: dict[str, Any] = {"bench": request.bench, "dataset": request.dataset, **asdict(options), **part}
    report |= {"asking": asdict(asking), "machine": machine(), **summary.to_dict()}
    title = f"{options.model} on {Path(request.dataset).name}: {len(summary.documents)} documents, {_manner(asking)}"
    tables = dataset_tables(summary, title) + ([] if source is None else source.tables(summary))
    if before is not None and request.compare is not None:
        rows = compare(report, before)
        report["compared"] = rows
        tables.append(compare_table(rows, f"this run beside {request.compare.name}"))
    picture = None
    if find_spec("matplotlib") is not None:
        from kvshelf_bench.quality.dataset.picture import draw

        picture = partial(draw if source is None else source.draw, summary, title=title)
    if request.results is not None:
        folder.write(request.results, report, summary, rendered(tables, notes(summary), report["machine"]), picture)
    if request.picture is not None and picture is not None:
        picture(request.picture)
    publish(report, tables, request.reporting, notes=notes(summary))


def _manner(asking: Asking) -> str:
    if asking.turns:
        return "in turns"
    return f"the question {'known' if asking.known else 'unknown'} at compression"


@contextmanager
def _bar(units: int) -> Iterator[Progress[DocumentUnit]]:
    """A bar over the units, and above it a line for each row as soon as it is measured."""
    full: dict[str, tuple[int, ...]] = {}
    with progress_bar() as progress:
        bar = progress.add_task("documents and policies", total=units)

        def done(unit: DocumentUnit, outcomes: Sequence[Outcome], resumed: bool) -> None:
            for row, outcome in zip(unit.rows, outcomes, strict=True):
                text = f"refused: {outcome.refused}"
                if outcome.refused is None:
                    text = f"score {100 * fmean(outcome.partial):.1f} over {len(outcome.partial)} questions"
                    if row == PLAIN:
                        full[unit.document.id] = outcome.exact
                    elif had := full.get(unit.document.id):
                        text += f", {sum(was > now for was, now in zip(had, outcome.exact, strict=True))} lost"
                text += " (measured before)" if resumed else ""
                progress.console.print(
                    f"{unit.document.id}, {way_label(row)}: {text}", highlight=False, markup=False, soft_wrap=True
                )
            progress.advance(bar)

        yield done


def _require(legal: bool, param: str, rule: str, value: str) -> None:
    if not legal:
        raise InvalidRequest(f"--{param} is {value!r}; it must be {rule}", param=param)


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
    by_place = {(unit.document.id, row): known[protocol.key(unit, row)] for unit in units for row in unit.rows}
    by_row = {row: [by_place[document.id, row] for document in documents] for row in rows}
    return DatasetSummary.of(documents, by_row, Dimensions.of(engine.model).full_16bit_bytes(1))


def truncated(engine: Engine, document: Document, asking: Asking, longest: int) -> Document:
    """The document without the middle of its context where it has more tokens than `longest` (0: than the model takes
    with its longest question and answer, or with all that are kept as turns): as many from its beginning as from its
    end, as LongBench does."""
    form = engine.encoder.require_text("document")
    room = longest
    if not longest:
        kept = [SCORERS[one.scorer].right(one.answers) or "" if asking.turns else "" for one in document.questions]
        counts = (
            form.count_tokens(one.text + one.prefix) + max(asking.tokens(one), form.count_tokens(right))
            for one, right in zip(document.questions, kept, strict=True)
        )
        several = (tokens + _TEMPLATE_TOKENS for tokens in counts)
        room = engine.max_tokens - (sum(several) if asking.turns else max(several))
    token_ids = form.encode(document.context)
    if len(token_ids) <= room:
        return document
    if room < 2:
        raise InvalidRequest(f"{document.id}: its questions leave no room for a document", param="truncate")
    half = room // 2
    return replace(document, context=form.decode(token_ids[:half]) + form.decode(token_ids[-half:]))
