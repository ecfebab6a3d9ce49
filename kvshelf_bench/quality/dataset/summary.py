"""What each way of keeping the documents of a dataset loses, from the outcomes of single documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from kvshelf_bench.measure import clustered_mean, clustered_wilson
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.grid import PLAIN, Row
from kvshelf_bench.quality.outcome import Outcome
from kvshelf_bench.quality.tables import read_label


@dataclass(frozen=True)
class WayScore:
    """A way to keep documents, over those that it took; `refused`: of the others, the reason by document.

    score: the mean over all questions, from 0 to 1; `low` and `high` bound it (95 %; documents are the independent
    units), `tasks`: of each task. change and change_error: the mean difference to the full cache on the same questions,
    and half of its 95 % interval; None for the full cache itself. right: questions with the score 1, of `questions`.
    lost: those that the full cache has right and this one has not; won: the reverse. first_tokens: the share of answers
    that begin with the full cache's first token (LagKV's FGT); None where another system tells none. agreement and
    agreement_low: means of the caches' figures and of their lower bounds; None where none was measured, and where one
    has no bound. bytes: of the stored blob of a document; bytes_per_token: of its token. prefill_s: with the policy and
    the codec; quality_s: of the figure; answer_s: of all questions of a document; means of a document, in seconds.
    """

    name: str
    documents: int
    refused: Mapping[str, str]
    questions: int
    score: float
    low: float
    high: float
    tasks: Mapping[str, float]
    change: float | None
    change_error: float | None
    right: int
    lost: int
    won: int
    first_tokens: float | None
    agreement: float | None
    agreement_low: float | None
    bytes: float
    bytes_per_token: float
    prefill_s: float
    quality_s: float
    answer_s: float

    @classmethod
    def of(
        cls, name: str, documents: Sequence[Document], outcomes: Sequence[Outcome], full: Sequence[Outcome]
    ) -> WayScore:
        """`outcomes` and those of the full cache in the order of `documents`."""
        paired = list(zip(documents, outcomes, full, strict=True))
        accepted = [one for one in outcomes if one.refused is None]
        compared = [(one, plain) for _, one, plain in paired if one.refused is None and plain.refused is None]
        pairs = [pair for one, plain in compared for pair in zip(plain.exact, one.exact, strict=True)]
        changes = [[b - a for a, b in zip(plain.partial, one.partial, strict=True)] for one, plain in compared]
        change, error = clustered_mean(changes) if changes and outcomes is not full else (None, None)
        firsts = [a == b for one, plain in compared for a, b in zip(plain.first_tokens, one.first_tokens, strict=False)]
        low, high = interval(accepted)
        return cls(
            name=name,
            documents=len(accepted),
            refused={document.id: one.refused for document, one, _ in paired if one.refused is not None},
            questions=sum(len(one.partial) for one in accepted),
            score=fmean(score for one in accepted for score in one.partial) if accepted else 0.0,
            low=low,
            high=high,
            tasks=by_task((document, one) for document, one, _ in paired if one.refused is None),
            change=change,
            change_error=error,
            right=sum(sum(one.exact) for one in accepted),
            lost=sum(had > has for had, has in pairs),
            won=sum(had < has for had, has in pairs),
            first_tokens=fmean(firsts) if firsts else None,
            agreement=_mean([one.quality["agreement"] if one.quality else None for one in accepted]),
            agreement_low=_mean([one.quality["low"] if one.quality else None for one in accepted]),
            bytes=_mean([one.stored_bytes for one in accepted]) or 0.0,
            bytes_per_token=_mean([one.stored_bytes / one.document_tokens for one in accepted]) or 0.0,
            prefill_s=_mean([one.prefill_s + one.compress_s + one.encode_s for one in accepted]) or 0.0,
            quality_s=_mean([one.quality["probe_s"] if one.quality else 0.0 for one in accepted]) or 0.0,
            answer_s=_mean([one.answer_s for one in accepted]) or 0.0,
        )


@dataclass(frozen=True)
class DatasetSummary:
    """The table: rows by the name of their way, the full cache first. full_16bit: its bytes per token in 16 bits."""

    documents: Sequence[Document]
    outcomes: Mapping[str, Sequence[Outcome]]
    rows: Mapping[str, Row]
    full_16bit: int

    @classmethod
    def of(
        cls, documents: Sequence[Document], outcomes: Mapping[Row, Sequence[Outcome]], full_16bit: int
    ) -> DatasetSummary:
        """`outcomes` of each row in the order of `documents`."""
        named = {way_label(row): of_row for row, of_row in outcomes.items()}
        return cls(documents, named, {way_label(row): row for row in outcomes}, full_16bit)

    def beside(self, system: str, others: Mapping[Row, Sequence[Outcome]]) -> DatasetSummary:
        """With the same rows as another system made them."""
        names = {row: f"{system} {way_label(row)}" for row in others}
        outcomes = {names[row]: of_row for row, of_row in others.items()}
        rows = {name: row for row, name in names.items()}
        return replace(self, outcomes={**self.outcomes, **outcomes}, rows={**self.rows, **rows})

    @cached_property
    def ways(self) -> list[WayScore]:
        full = self.outcomes[way_label(PLAIN)]
        return [WayScore.of(name, self.documents, outcomes, full) for name, outcomes in self.outcomes.items()]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(question.task for document in self.documents for question in document.questions))

    def to_dict(self) -> dict[str, Any]:
        """JSON types: what every way lost, and each document's answers under it."""
        questions = [
            {"id": document.id, "questions": [asdict(question) for question in document.questions]}
            for document in self.documents
        ]
        ways = [
            {"way": way.name, **self.rows[way.name].to_dict(), **_plain(way)}
            | {"outcomes": [_outcome(*pair) for pair in zip(self.documents, outcomes, strict=True)]}
            for way, outcomes in zip(self.ways, self.outcomes.values(), strict=True)
        ]
        return {"full_16bit": self.full_16bit, "documents": questions, "ways": ways}


def way_label(row: Row) -> str:
    read = f" {row.select.label} {read_label(row)}" if row.select is not None else ""
    return row.label + read


def interval(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Bounds of the mean score (95 %): of a share where each answer is right or wrong, otherwise of a mean."""
    if not outcomes:
        return 0.0, 1.0
    if all(score in (0, 1) for one in outcomes for score in one.partial):
        return clustered_wilson([(sum(one.exact), len(one.exact)) for one in outcomes])
    mean, half = clustered_mean([one.partial for one in outcomes])
    return max(0.0, mean - half), min(1.0, mean + half)


def by_task(outcomes: Any) -> dict[str, float]:
    """The mean score of each task, from documents with their outcomes."""
    scores: dict[str, list[float]] = {}
    for document, outcome in outcomes:
        for question, score in zip(document.questions, outcome.partial, strict=True):
            scores.setdefault(question.task, []).append(score)
    return {task: fmean(of_task) for task, of_task in scores.items()}


def _plain(way: WayScore) -> dict[str, Any]:
    fields = {name: value for name, value in vars(way).items() if name != "name"}
    return {name: None if value == float("inf") else value for name, value in fields.items()}  # as JSON has it


def _outcome(document: Document, outcome: Outcome) -> dict[str, Any]:
    fields = {("scores" if name == "partial" else name): value for name, value in asdict(outcome).items()}
    return {"id": document.id, **{name: value for name, value in fields.items() if name != "key"}}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
