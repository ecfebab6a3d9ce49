"""One document of a dataset under the rows of one policy: compressed once, asked all its questions in one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.engine import Compression, Engine
from kvshelf.engine.inputs.job import Level, shared
from kvshelf.engine.quality import Reference
from kvshelf.errors import KvshelfError
from kvshelf_bench import scorers
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.grid import Row, Unit, Variant
from kvshelf_bench.quality.outcome import Outcome, selecting, shared_settings, transforms_of

REVISION: Final = 1
"""Raised whenever the outcome of the same document, questions and settings changes."""


@dataclass(frozen=True)
class DocumentUnit(Unit):
    """Of a document of a dataset."""

    document: Document

    @property
    def about(self) -> dict[str, Any]:
        return {"document": self.document.id, **super().about}


def make_units(documents: Sequence[Document], rows: Sequence[Row]) -> list[DocumentUnit]:
    """Document by document through all policies: a run that is stopped has all rows of some documents."""
    groups: dict[Variant, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.variant, []).append(row)
    return [
        DocumentUnit(variant, tuple(group), document) for document in documents for variant, group in groups.items()
    ]


@dataclass(frozen=True)
class DatasetProtocol:
    """The settings that all units of a run share. cues: of the figure of each cache; 0 measures none."""

    model: str  # fingerprint of the model's identity
    device: str  # "cpu" or "cuda"
    max_new_tokens: int
    cues: int
    transforms: str | None = None  # digest of those of codec klt

    @classmethod
    def of(cls, engine: Engine, max_new_tokens: int, cues: int) -> DatasetProtocol:
        device = engine.model.device.type
        return cls(engine.identity.fingerprint(), device, max_new_tokens, cues, transforms_of(engine))

    def key(self, unit: DocumentUnit, row: Row) -> str:
        """A digest of all that the result depends on: model, document, questions and the settings of the row."""
        document = {"context": unit.document.context, "questions": [asdict(one) for one in unit.document.questions]}
        settings = {"revision": REVISION, **document, **shared_settings(self, row)}
        return digest("kvshelf_bench.quality.dataset", canonical_json(settings))

    def measure(self, engine: Engine, unit: DocumentUnit) -> list[Outcome]:
        """The outcomes of the unit's rows: the document compressed once, without its questions, for all shares
        removed."""
        levels: dict[float, Level] = {}
        refused: dict[float, str] = {}
        for removed in dict.fromkeys(row.removed for row in unit.rows):
            try:
                levels[removed] = self._level(engine, unit, removed)
            except KvshelfError as error:
                refused[removed] = error.message
        made: dict[float, tuple[Compression, Reference | None]] = {}
        for group in shared(list(levels.values())):
            of_group = [removed for removed, level in levels.items() if any(level is one for one in group)]
            try:
                prefill = engine.prefill(group, cues=self.cues)
                made |= {at: (one, prefill.reference) for at, one in zip(of_group, prefill.compressions, strict=True)}
            except KvshelfError as error:
                refused |= dict.fromkeys(of_group, error.message)
        return [
            Outcome(self.key(unit, row), refused=refused[row.removed])
            if row.removed in refused
            else self._measured(engine, unit, row, *made[row.removed])
            for row in unit.rows
        ]

    def _level(self, engine: Engine, unit: DocumentUnit, removed: float) -> Level:
        ratio, params = removed if unit.variant.takes_budget else None, dict(unit.variant.params)
        return engine.level(
            engine.prepare(
                unit.document.context, policy=unit.variant.policy, compression_ratio=ratio, policy_params=params
            )
        )

    def _measured(
        self, engine: Engine, unit: DocumentUnit, row: Row, compression: Compression, reference: Reference | None
    ) -> Outcome:
        try:
            return self._row(engine, unit, row, compression, reference)
        except KvshelfError as error:
            return Outcome(self.key(unit, row), refused=error.message)

    def _row(
        self, engine: Engine, unit: DocumentUnit, row: Row, compression: Compression, reference: Reference | None
    ) -> Outcome:
        started = time.perf_counter()
        cache = engine.encoded(compression.cache, row.codec)
        encoded = time.perf_counter()
        quality = None if reference is None else engine.measure(cache, reference)
        asked = time.perf_counter()
        answers = engine.answer_all(
            [(cache, question.text) for question in unit.document.questions],
            max_new_tokens=self.max_new_tokens,
            **selecting(cache, row.select),
        )
        done = time.perf_counter()
        scores = [
            scorers.contains(answer.text, question.answers)
            for answer, question in zip(answers, unit.document.questions, strict=True)
        ]
        read = sum(answer.usage.read_tokens for answer in answers) / len(answers)
        return Outcome(
            key=self.key(unit, row),
            exact=tuple(int(score == 1) for score in scores),
            partial=tuple(scores),
            document_tokens=cache.num_tokens,
            stored_bytes=len(cache.to_bytes()),
            read_share=read / engine.attach(cache).read_tokens,
            prefill_s=compression.prefill_s,
            compress_s=compression.compress_s,
            encode_s=encoded - started,
            answer_s=done - asked,
            answers=tuple(answer.text for answer in answers),
            quality=None if quality is None else quality.model_dump(),
        )
