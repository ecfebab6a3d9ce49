"""What each way of keeping the documents of a dataset loses, from the outcomes of single documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from kvshelf_bench.measure import clustered_wilson
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.grid import BASELINE, Row, Variant
from kvshelf_bench.quality.outcome import Outcome

PLAIN = Row(Variant(BASELINE), 0.0)


@dataclass(frozen=True)
class Way:
    """A row over the documents that it took; `refused`: of the others, the reason by document.

    right: of `questions`; `low` and `high` bound their share (95 %, see `clustered_wilson`: documents are the
    independent units). lost: questions that the full cache has right and this one has not; won: the reverse.
    agreement and agreement_low: means of the caches' figures and of their lower bounds; None where none was measured,
    and where one has no bound. bytes_per_token: of the stored blob. prefill_s: with the policy and the codec;
    quality_s: of the figure; answer_s: of all questions of a document; means of a document, in seconds.
    """

    row: Row
    documents: int
    refused: Mapping[str, str]
    questions: int
    right: int
    low: float
    high: float
    lost: int
    won: int
    agreement: float | None
    agreement_low: float | None
    bytes_per_token: float
    prefill_s: float
    quality_s: float
    answer_s: float

    @classmethod
    def of(cls, row: Row, documents: Sequence[Document], outcomes: Sequence[Outcome], full: Sequence[Outcome]) -> Way:
        """`outcomes` and those of the full cache in the order of `documents`."""
        paired = list(zip(documents, outcomes, full, strict=True))
        refused = {document.id: one.refused for document, one, _ in paired if one.refused is not None}
        taken = [one for one in outcomes if one.refused is None]
        pairs = [(had, has) for _, one, plain in paired for had, has in zip(plain.exact, one.exact, strict=False)]
        exact = [(sum(one.exact), len(one.exact)) for one in taken]
        low, high = clustered_wilson(exact) if exact else (0.0, 1.0)
        return cls(
            row=row,
            documents=len(taken),
            refused=refused,
            questions=sum(size for _, size in exact),
            right=sum(hits for hits, _ in exact),
            low=low,
            high=high,
            lost=sum(had > has for had, has in pairs),
            won=sum(had < has for had, has in pairs),
            agreement=_mean([one.quality["agreement"] if one.quality else None for one in taken]),
            agreement_low=_mean([one.quality["low"] if one.quality else None for one in taken]),
            bytes_per_token=_mean([one.stored_bytes / one.document_tokens for one in taken]) or 0.0,
            prefill_s=_mean([one.prefill_s + one.compress_s + one.encode_s for one in taken]) or 0.0,
            quality_s=_mean([one.quality["probe_s"] if one.quality else 0.0 for one in taken]) or 0.0,
            answer_s=_mean([one.answer_s for one in taken]) or 0.0,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types, the row's settings among them."""
        row, rest = self.row, {name: value for name, value in vars(self).items() if name != "row"}
        settings = {"policy": row.variant.policy, "policy_params": dict(row.variant.params), "removed": row.removed}
        select = None if row.select is None else asdict(row.select)
        return {**settings, "codec": row.codec, "select": select, **rest}


@dataclass(frozen=True)
class DatasetSummary:
    """The table: ways in the order of the rows. full_16bit: bytes of the model's full cache per token in 16 bits."""

    documents: Sequence[Document]
    outcomes: Mapping[Row, Sequence[Outcome]]
    full_16bit: int

    @property
    def ways(self) -> list[Way]:
        full = self.outcomes[PLAIN]
        return [Way.of(row, self.documents, outcomes, full) for row, outcomes in self.outcomes.items()]

    def to_dict(self) -> dict[str, Any]:
        """JSON types: what every way lost, and each document's answers under it."""
        questions = [
            {"id": document.id, "questions": [asdict(question) for question in document.questions]}
            for document in self.documents
        ]
        ways = [
            way.to_dict() | {"outcomes": [_outcome(*pair) for pair in zip(self.documents, outcomes, strict=True)]}
            for way, outcomes in zip(self.ways, self.outcomes.values(), strict=True)
        ]
        return {"full_16bit": self.full_16bit, "documents": questions, "ways": ways}


def _outcome(document: Document, outcome: Outcome) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(outcome).items() if name not in ("key", "partial")}
    return {"id": document.id, **fields}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
