"""The documents of a dataset and their questions. Rows of one context are one document."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvshelf.errors import InvalidRequest
from kvshelf_bench.quality.dataset.files import bad, read_rows
from kvshelf_bench.quality.dataset.rows import PLACE, Question, RowRules, beside_others, shape_of


@dataclass(frozen=True)
class Document:
    id: str
    context: str
    questions: tuple[Question, ...]


def read_documents(source: str | Path, reading: RowRules | None = None) -> list[Document]:
    """The documents of a file, a folder or a dataset of the hub. Raises `InvalidRequest` that names the line."""
    documents: dict[str, Document] = {}
    named: dict[str, str] = {}
    shape, first = None, ""
    for row in read_rows(str(source)):
        row_shape = shape_of(row)
        if shape is None:
            shape, first = row_shape, row.where
        if row_shape is not shape:
            raise bad(f"{row.where} has the shape {row_shape.name}, and {first} {shape.name}; give files of one shape")
        context, questions = row_shape.read(row, reading or RowRules())
        if known := documents.get(context):
            documents[context] = replace(known, questions=known.questions + questions)
        else:
            if row.id in named:
                raise bad(
                    f"{row.where} has another context than {named[row.id]}, and its id {row.id!r}; give it its own"
                )
            named[row.id] = row.where
            documents[context] = Document(row.id, context, questions)
    if not documents:
        raise bad(f"{source} has no row")
    changed = beside_others([question for document in documents.values() for question in document.questions])
    return [
        replace(document, questions=tuple(changed.get(one, one) for one in document.questions))
        for document in documents.values()
    ]


def read_prompts(path: Path) -> dict[str, str]:
    """The prompts of tasks, from a file as LongBench's `dataset2prompt.json`. Raises `InvalidRequest`."""
    try:
        prompts = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"--prompts {path} cannot be read: {error}", param="prompts") from error
    if not isinstance(prompts, dict) or not all(isinstance(one, str) and PLACE in one for one in prompts.values()):
        raise InvalidRequest(f"--prompts {path} must be an object of texts that contain {PLACE}", param="prompts")
    return prompts


def draw_documents(documents: Sequence[Document], *, fraction: float, limit: int | None, seed: int) -> list[Document]:
    """A fraction of the documents (at least one), drawn by a seed, and of these the first `limit`, in their order."""
    count = max(1, round(fraction * len(documents)))
    places = sorted(random.Random(seed).sample(range(len(documents)), count))
    return [documents[place] for place in places][:limit]
