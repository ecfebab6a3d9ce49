"""One document under the rows of one policy, compressed once or once for each known question, asked in one batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final, TypeAlias

from kvshelf.api.answers import Answer
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level, shared
from kvshelf.engine.prefill.prefill import Compression
from kvshelf.engine.quality import Reference
from kvshelf.errors import KvshelfError
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.rows import Question
from kvshelf_bench.quality.grid import Row, Unit, Variant
from kvshelf_bench.quality.outcome import Outcome, selecting, shared_settings, transforms_of
from kvshelf_bench.scorers.scorers import SCORERS, scored

REVISION: Final = 3
"""Raised whenever the outcome of the same document, questions and settings changes."""

ANSWER_TOKENS: Final = 48
"""Of an answer, where neither the user nor the row nor its benchmark says."""

NOTHING: Final = "(no answer)"
"""In the place of an empty answer that is kept as a turn: a turn has a text."""

Kept: TypeAlias = tuple[Variant, float, int | None]
"""As `Row.kept`."""

Prefilled: TypeAlias = tuple[Compression, Reference | None]
"""What a prefill gave for one of its sizes."""


@dataclass(frozen=True)
class Asking:
    """How documents are asked. max_new_tokens: of an answer; 0: as the rows say. cues: of the figure of each cache; 0
    measures none. known: the question is known at compression, once for each, under policies that look at questions.
    turns: each question is asked behind the earlier ones and their right answers."""

    max_new_tokens: int = 0
    cues: int = 0
    known: bool = False
    turns: bool = False

    def known_to(self, row: Row) -> bool:
        """Whether the row's policy sees the question at compression."""
        return self.known and row.variant.takes_questions

    def tokens(self, question: Question) -> int:
        """Most tokens of an answer."""
        return self.max_new_tokens or question.max_new_tokens or ANSWER_TOKENS


@dataclass(frozen=True)
class DocumentUnit(Unit):
    document: Document

    @property
    def about(self) -> dict[str, Any]:
        return {"document": self.document.id}


def make_units(documents: Sequence[Document], rows: Sequence[Row], asking: Asking) -> list[DocumentUnit]:
    """Document by document through all policies: a run that is stopped has all rows of some documents. All policies
    that look at a known question are one unit, as they share the prefill of each question."""
    groups: dict[Variant | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(None if asking.known_to(row) else row.variant, []).append(row)
    return [DocumentUnit(tuple(group), document) for document in documents for group in groups.values()]


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
        protocol = replace(self, asking=replace(self.asking, known=self.asking.known_to(row)))
        document = {"context": unit.document.context, "questions": [asdict(one) for one in unit.document.questions]}
        settings = {"revision": REVISION, **document, **shared_settings(protocol, row)}
        return digest("kvshelf_bench.quality.dataset", canonical_json(settings))

    def measure(self, engine: Engine, unit: DocumentUnit) -> list[Outcome]:
        """The outcomes of the unit's rows: one compression for all sizes, or one for each known question."""
        keys = [self.key(unit, row) for row in unit.rows]
        if not self.asking.known_to(unit.rows[0]):
            outcomes = self._outcomes(engine, unit, unit.document.questions)
        else:
            by_question = [
                self._outcomes(engine, unit, [question], (question.text,)) for question in unit.document.questions
            ]
            outcomes = [joined(of_row) for of_row in zip(*by_question, strict=True)]
        return [replace(outcome, key=key) for key, outcome in zip(keys, outcomes, strict=True)]

    def _outcomes(
        self, engine: Engine, unit: DocumentUnit, questions: Sequence[Question], expected: Sequence[str] = ()
    ) -> list[Outcome]:
        """Of the rows, without their keys; one prefill where their policies allow it."""
        levels: dict[Kept, Level] = {}
        refused: dict[Kept, str] = {}
        for row in unit.rows:
            if row.kept not in levels and row.kept not in refused:
                try:
                    job = engine.prepare(unit.document.context, expected_questions=expected, **row.sizes)
                    levels[row.kept] = engine.compressor.level(job)
                except KvshelfError as error:
                    refused[row.kept] = error.message
        prefilled: dict[Kept, Prefilled] = {}
        for group in shared(list(levels.values())):
            of_group = [kept for kept, level in levels.items() if any(level is one for one in group)]
            try:
                prefill = engine.compressor.prefill(group, cues=self.asking.cues)
                prefilled |= {
                    at: (one, prefill.reference) for at, one in zip(of_group, prefill.compressions, strict=True)
                }
            except KvshelfError as error:
                refused |= dict.fromkeys(of_group, error.message)
        rows = [row for row in unit.rows if row.kept in prefilled]
        batches = [rows] if expected else [[row] for row in rows]
        answered = {
            row: one for batch in batches for row, one in self._answered(engine, questions, batch, prefilled).items()
        }
        return [answered[row] if row in answered else Outcome("", refused=refused[row.kept]) for row in unit.rows]

    def _answered(
        self, engine: Engine, questions: Sequence[Question], rows: Sequence[Row], prefilled: Mapping[Kept, Prefilled]
    ) -> dict[Row, Outcome]:
        """Of rows that are asked in one batch. One that cannot be asked is refused alone."""
        try:
            measured = {row: self._measured(engine, row, *prefilled[row.kept]) for row in rows}
            started = time.perf_counter()
            ask = _in_turns if self.asking.turns else _at_once
            answers = ask(engine, [(row, cache) for row, (cache, _) in measured.items()], questions, self.asking)
            seconds = (time.perf_counter() - started) / len(rows)
        except KvshelfError as error:
            if len(rows) == 1:
                return {rows[0]: Outcome("", refused=error.message)}
            return {
                row: one for alone in rows for row, one in self._answered(engine, questions, [alone], prefilled).items()
            }
        return {
            row: replace(outcome, answer_s=seconds, **_scored(engine, cache, questions, of_row))
            for (row, (cache, outcome)), of_row in zip(measured.items(), answers, strict=True)
        }

    def _measured(
        self, engine: Engine, row: Row, compression: Compression, reference: Reference | None
    ) -> tuple[CompressedCache, Outcome]:
        """The cache that is asked, and what there is to say of it before."""
        started = time.perf_counter()
        cache = engine.encoded(compression.cache, row.codec)
        encoded = time.perf_counter()
        quality = None if reference is None else engine.compressor.measure(cache, reference)
        return cache, Outcome(
            key="",
            document_tokens=cache.num_tokens,
            stored_bytes=len(cache.to_bytes()),
            prefill_s=compression.prefill_s,
            compress_s=compression.compress_s,
            encode_s=encoded - started,
            quality=None if quality is None else quality.model_dump(),
        )


def _scored(
    engine: Engine, cache: CompressedCache, questions: Sequence[Question], answers: Sequence[Answer]
) -> dict[str, Any]:
    """The fields of an outcome that its answers give."""
    scores = [score_of(question, answer.text) for question, answer in zip(questions, answers, strict=True)]
    read = sum(answer.usage.read_tokens for answer in answers) / len(answers)
    return {
        "exact": tuple(int(score == 1) for score in scores),
        "partial": tuple(round(score, 6) for score in scores),
        "read_share": read / engine.attach(cache).read_tokens,
        "answers": tuple(answer.text for answer in answers),
        "first_tokens": tuple(answer.token_ids[0] if answer.token_ids else -1 for answer in answers),
    }


def score_of(question: Question, answer: str) -> float:
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
    engine: Engine, caches: Sequence[tuple[Row, CompressedCache]], questions: Sequence[Question], asking: Asking
) -> list[list[Answer]]:
    """All questions of each cache as it is, those that are read alike and answered at one length in one batch."""
    groups: dict[Any, list[tuple[int, int]]] = {}
    for place, (row, _) in enumerate(caches):
        for number, question in enumerate(questions):
            groups.setdefault((row.select, asking.tokens(question)), []).append((place, number))
    answers: dict[tuple[int, int], Answer] = {}
    for (select, tokens), places in groups.items():
        prompts = [(caches[at][1], _prompt(engine, caches[at][1], questions[number])) for at, number in places]
        batch = engine.answer_all(prompts, max_new_tokens=tokens, **selecting(prompts[0][0], select))
        answers |= dict(zip(places, batch, strict=True))
    return [[answers[place, number] for number in range(len(questions))] for place in range(len(caches))]


def _in_turns(
    engine: Engine, caches: Sequence[tuple[Row, CompressedCache]], questions: Sequence[Question], asking: Asking
) -> list[list[Answer]]:
    """Each question behind the earlier ones with their right answers, as SCBench's multi-turn mode has it; with the
    row's own where no right one is known, as of rules."""
    answers_of: list[list[Answer]] = [[] for _ in caches]
    for question in questions:
        for answers, of_row in zip(answers_of, _at_once(engine, caches, [question], asking), strict=True):
            answers += of_row
        right, grown = SCORERS[question.scorer].right(question.answers), []
        for (row, cache), answers in zip(caches, answers_of, strict=True):
            text = right or answers[-1].text.strip() or NOTHING
            turn = [{"role": "user", "content": question.text}, {"role": "assistant", "content": text}]
            grown.append((row, engine.extend(cache, turn, policy="full")))
        caches = grown
    return answers_of


def _prompt(engine: Engine, cache: CompressedCache, question: Question) -> str | list[int]:
    """The question, and what the answer begins with."""
    if not question.prefix:
        return question.text
    return engine.encode_query(cache, question.text) + engine.encoder.require_text("prompt").encode(question.prefix)
