"""The documents of a dataset and their questions, from a file of JSON lines.

A row is `{"context": text, "question": [text, ...], "answers": [[text, ...], ...]}`: for each question its right
answers, one of which the model's answer has to contain; a text alone is one right answer. Rows of one context are one
document. `id` names the document in results; other fields are for people.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvshelf.errors import InvalidRequest
from kvshelf_bench.scorers import words

FIELDS: Final = ("context", "question", "answers")


@dataclass(frozen=True)
class Question:
    """A question, and the answers that are right."""

    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """A text, and questions that it answers."""

    id: str
    context: str
    questions: tuple[Question, ...]


def read_documents(path: Path) -> list[Document]:
    """The documents of a file, in its order. Raises `InvalidRequest` that names the line."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--dataset {path} cannot be read: {error}", param="dataset") from error
    documents: dict[str, Document] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        document = _document(line, f"{path}, line {number}", f"line {number}")
        first = documents.setdefault(document.context, document)
        if first is not document:
            documents[document.context] = replace(first, questions=first.questions + document.questions)
    named: dict[str, Document] = {}
    for document in documents.values():
        if named.setdefault(document.id, document) is not document:
            raise _bad(f"{path}: two contexts have the id {document.id!r}; give each one of its own")
    if not documents:
        raise _bad(f"{path} has no row")
    return list(documents.values())


def chosen(documents: Sequence[Document], *, fraction: float, limit: int | None, seed: int) -> list[Document]:
    """A fraction of the documents (at least one), drawn by a seed, and of these the first `limit`, in their order."""
    count = max(1, round(fraction * len(documents)))
    places = sorted(random.Random(seed).sample(range(len(documents)), count))
    return [documents[place] for place in places][:limit]


def _document(line: str, where: str, name: str) -> Document:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a character, as "\ud800", is no text
    except (ValueError, RecursionError) as error:
        raise _bad(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict) or not all(field in row for field in FIELDS):
        has = f"the fields {', '.join(map(repr, row)) or 'none'}" if isinstance(row, dict) else type(row).__name__
        raise _bad(f"{where} has {has}; a row needs {', '.join(FIELDS)}")
    context, asked, right = (row[field] for field in FIELDS)
    if not _is_text(context):
        raise _bad(f"{where}: context must be a text that is not empty")
    if not (isinstance(asked, list) and asked and all(map(_is_text, asked))):
        raise _bad(f"{where}: question must be a list of texts that are not empty")
    if not (isinstance(right, list) and len(right) == len(asked)):
        found = len(right) if isinstance(right, list) else type(right).__name__
        raise _bad(f"{where}: answers must be a list with one entry for each of {len(asked)} questions, not {found}")
    questions = tuple(Question(text, _answers(one, text, where)) for text, one in zip(asked, right, strict=True))
    own = row.get("id", name)
    if not _is_text(own):
        raise _bad(f"{where}: id must be a text that is not empty")
    return Document(own, context, questions)


def _answers(given: Any, question: str, where: str) -> tuple[str, ...]:
    answers = [given] if isinstance(given, str) else given
    if not (isinstance(answers, list) and answers and all(map(_is_text, answers))):
        raise _bad(f"{where}: the answers of {question!r} must be texts that are not empty, at least one")
    for answer in answers:
        if not words(answer):
            raise _bad(f"{where}: the answer {answer!r} of {question!r} has no word, so no answer could contain it")
    return tuple(answers)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="dataset")
