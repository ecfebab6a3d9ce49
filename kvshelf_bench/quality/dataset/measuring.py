"""One document of a dataset under the rows of one policy: compressed once, asked all its questions in one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.decode.generation import Answer
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level, shared
from kvshelf.engine.prefill.prefill import Compression
from kvshelf.engine.quality import Reference
from kvshelf.errors import KvshelfError
from kvshelf.methods.policies import build
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.rows import Question
from kvshelf_bench.quality.grid import Row, Unit, Variant
from kvshelf_bench.quality.outcome import Outcome, selecting, shared_settings, transforms_of
from kvshelf_bench.scorers.scorers import scored

REVISION: Final = 2
"""Raised whenever the outcome of the same document, questions and settings changes."""

ANSWER_TOKENS: Final = 48
"""Of an answer, where neither the user nor the row nor its benchmark says."""


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
class Asking:
    """How documents are asked. max_new_tokens: of an answer; 0: as the rows say. cues: of the figure of each cache; 0
    measures none. known: the question is known at compression, which is done once for each question, under policies
    that look at questions. turns: each question is asked behind the earlier ones and their right answers, kept as
    turns."""

    max_new_tokens: int = 0
    cues: int = 0
    known: bool = False
    turns: bool = False

    def tokens(self, question: Question) -> int:
        """Most tokens of an answer."""
        return self.max_new_tokens or question.max_new_tokens or ANSWER_TOKENS


@dataclass(frozen=True)
class DatasetProtocol:
    """The settings that all units of a run share."""

    model: str  # fingerprint of the model's identity
    device: str  # "cpu" or "cuda"
    asking: Asking
    transforms: str | None = None  # digest of those of codec klt

    @classmethod
    def of(cls, engine: Engine, asking: Asking) -> DatasetProtocol:
        return cls(engine.identity.fingerprint(), engine.model.device.type, asking, transforms_of(engine))

    def key(self, unit: DocumentUnit, row: Row) -> str:
        """A digest of all that the result depends on: model, document, questions and the settings of the row. Where a
        policy looks at no question, known and unknown ones have one result."""
        own = replace(self, asking=replace(self.asking, known=self._known(unit)))
        document = {"context": unit.document.context, "questions": [asdict(one) for one in unit.document.questions]}
        settings = {"revision": REVISION, **document, **shared_settings(own, row)}
        return digest("kvshelf_bench.quality.dataset", canonical_json(settings))

    def measure(self, engine: Engine, unit: DocumentUnit) -> list[Outcome]:
        """The outcomes of the unit's rows: the document compressed once for all sizes, or for all sizes of each
        question that is known."""
        keys = [self.key(unit, row) for row in unit.rows]
        if not self._known(unit):
            outcomes = self._outcomes(engine, unit, unit.document.questions)
        else:
            each = [self._outcomes(engine, unit, [question], (question.text,)) for question in unit.document.questions]
            outcomes = [joined(of_row) for of_row in zip(*each, strict=True)]
        return [replace(outcome, key=key) for key, outcome in zip(keys, outcomes, strict=True)]

    def _known(self, unit: DocumentUnit) -> bool:
        return self.asking.known and build(unit.variant.policy, dict(unit.variant.params)).takes_questions

    def _outcomes(
        self, engine: Engine, unit: DocumentUnit, questions: Sequence[Question], expected: Sequence[str] = ()
    ) -> list[Outcome]:
        """Of the rows, without their keys; one prefill where their policies allow it."""
        levels: dict[Any, Level] = {}
        refused: dict[Any, str] = {}
        for row in unit.rows:
            if row.kept not in levels and row.kept not in refused:
                try:
                    job = engine.prepare(unit.document.context, expected_questions=expected, **row.sizes)
                    levels[row.kept] = engine.compressor.level(job)
                except KvshelfError as error:
                    refused[row.kept] = error.message
        made: dict[Any, tuple[Compression, Reference | None]] = {}
        for group in shared(list(levels.values())):
            of_group = [kept for kept, level in levels.items() if any(level is one for one in group)]
            try:
                prefill = engine.compressor.prefill(group, cues=self.asking.cues)
                made |= {at: (one, prefill.reference) for at, one in zip(of_group, prefill.compressions, strict=True)}
            except KvshelfError as error:
                refused |= dict.fromkeys(of_group, error.message)
        outcomes = []
        for row in unit.rows:
            try:
                missing = refused.get(row.kept)
                outcomes.append(
                    Outcome("", refused=missing) if missing else self._row(engine, questions, row, *made[row.kept])
                )
            except KvshelfError as error:
                outcomes.append(Outcome("", refused=error.message))
        return outcomes

    def _row(
        self,
        engine: Engine,
        questions: Sequence[Question],
        row: Row,
        compression: Compression,
        reference: Reference | None,
    ) -> Outcome:
        started = time.perf_counter()
        cache = engine.encoded(compression.cache, row.codec)
        encoded = time.perf_counter()
        quality = None if reference is None else engine.compressor.measure(cache, reference)
        asked = time.perf_counter()
        ask = _in_turns if self.asking.turns else _at_once
        answers = ask(engine, cache, row, questions, self.asking)
        done = time.perf_counter()
        scores = [score_of(question, answer.text) for question, answer in zip(questions, answers, strict=True)]
        read = sum(answer.usage.read_tokens for answer in answers) / len(answers)
        return Outcome(
            key="",
            exact=tuple(int(score == 1) for score in scores),
            partial=tuple(round(score, 6) for score in scores),
            document_tokens=cache.num_tokens,
            stored_bytes=len(cache.to_bytes()),
            read_share=read / engine.attach(cache).read_tokens,
            prefill_s=compression.prefill_s,
            compress_s=compression.compress_s,
            encode_s=encoded - started,
            answer_s=done - asked,
            answers=tuple(answer.text for answer in answers),
            first_tokens=tuple(answer.token_ids[0] if answer.token_ids else -1 for answer in answers),
            quality=None if quality is None else quality.model_dump(),
        )


def score_of(question: Question, answer: str) -> float:
    """The score of an answer to a question."""
    return scored(question.scorer, answer, question.answers, question.classes, first_line=question.first_line)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of a document that was compressed for each question: means of sizes, sums of times."""
    if refused := next((one.refused for one in outcomes if one.refused is not None), None):
        return Outcome("", refused=refused)
    whole: dict[str, Any] = {
        name: tuple(value for one in outcomes for value in getattr(one, name))
        for name in ("exact", "partial", "answers", "first_tokens")
    }
    for name in ("prefill_s", "compress_s", "encode_s", "answer_s"):
        whole[name] = sum(getattr(one, name) for one in outcomes)
    whole["stored_bytes"] = round(fmean(one.stored_bytes for one in outcomes))
    whole["read_share"] = fmean(one.read_share for one in outcomes)
    return replace(outcomes[0], **whole)


def _at_once(
    engine: Engine, cache: CompressedCache, row: Row, questions: Sequence[Question], asking: Asking
) -> list[Answer]:
    """All questions of the cache as it is, those with answers of one length in one batch."""
    answers: dict[int, Answer] = {}
    for tokens in dict.fromkeys(map(asking.tokens, questions)):
        places = [place for place, question in enumerate(questions) if asking.tokens(question) == tokens]
        batch = engine.answer_all(
            [(cache, _prompt(engine, cache, questions[place])) for place in places],
            max_new_tokens=tokens,
            **selecting(cache, row.select),
        )
        answers |= dict(zip(places, batch, strict=True))
    return [answers[place] for place in range(len(questions))]


def _in_turns(
    engine: Engine, cache: CompressedCache, row: Row, questions: Sequence[Question], asking: Asking
) -> list[Answer]:
    """Each question behind the earlier ones with their right answers, as SCBench's multi-turn mode has it."""
    answers = []
    for question in questions:
        answers += _at_once(engine, cache, row, [question], asking)
        turn = [{"role": "user", "content": question.text}, {"role": "assistant", "content": question.answers[0]}]
        cache = engine.extend(cache, turn, policy="full")
    return answers


def _prompt(engine: Engine, cache: CompressedCache, question: Question) -> str | list[int]:
    """The question, and what the answer begins with."""
    if not question.prefix:
        return question.text
    return engine.encode_query(cache, question.text) + engine.encoder.require_text("prompt").encode(question.prefix)
