"""What each level of many documents loses of their questions, measured once and kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvshelf.engine.certify.grading import GradedDocument, QuestionedDocument, default_ways, grade
from kvshelf.samples.suite import HaystackName, TaskName, make_case
from kvshelf.samples.tasks import CountTokens
from kvshelf_bench.options import counted
from kvshelf_bench.quality.dataset.documents import read_documents

if TYPE_CHECKING:
    from kvshelf_bench.engines import EngineOptions

KINDS: Final[tuple[tuple[TaskName, HaystackName], ...]] = (
    ("multikey", "prose"), ("needle", "filler"), ("digits32", "prose"), ("multikey", "filler"), ("needle", "prose"),
    ("multikey", "dense"),
)  # fmt: skip
"""Kinds of made documents, in turn."""

_SEED: Final = 500_000
_QUESTIONS: Final = 8
_ANSWER_TOKENS: Final = 12
_SIXTEEN_FACTS: Final = (440, 700)
_ONE_FACT: Final = (140, 600)
"""Tokens of a document, at least and at most."""


def graded_documents(
    options: EngineOptions, count: int, dataset: str | None, file: Path | None
) -> list[GradedDocument]:
    """The graded documents of a file, and those that it lacks, which are graded and written there."""
    known = [] if file is None or not file.exists() else file.read_text("utf-8").splitlines()
    rows = [GradedDocument.model_validate_json(line) for line in known]
    if dataset is None and len(rows) >= count:
        return rows[:count]
    engine = options.load()
    ways = default_ways(engine.coders.writes_klt)
    count_tokens = engine.encoder.require_text("document").count_tokens
    documents = list(_make_documents(count_tokens, count) if dataset is None else _read(dataset))
    with counted("documents", len(documents)) as advance:
        for document in documents[len(rows) :]:
            tokens = _ANSWER_TOKENS if dataset is None else 4 * _ANSWER_TOKENS
            rows.append(grade(engine, document, ways, max_new_tokens=tokens))
            if file is not None:
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(rows[-1].model_dump(mode="json")) + "\n")
            advance()
    return rows


def _make_documents(count_tokens: CountTokens, count: int) -> Iterator[QuestionedDocument]:
    for number in range(count):
        task, haystack = KINDS[number % len(KINDS)]
        tokens = random.Random(number).randint(*(_SIXTEEN_FACTS if task == "multikey" else _ONE_FACT))
        case = make_case(task, haystack, tokens, _SEED + number, count_tokens, questions=_QUESTIONS)
        yield QuestionedDocument(case.text, f"{task}/{haystack}", tuple(ask.text for ask in case.asks), None)


def _read(dataset: str) -> Iterator[QuestionedDocument]:
    for document in read_documents(dataset):
        yield QuestionedDocument(document.context, "", tuple(question.text for question in document.questions), None)
