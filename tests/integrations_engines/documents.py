"""Documents and questions that both tests ask."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvshelf.model.source import bundled_folder

CHARACTERS = 3600


def documents() -> list[tuple[str, list[str]]]:
    """Texts of about 800 tokens and five questions about each: real ones of `KVSHELF_REAL_DOCUMENTS`, or a handbook."""
    if named := os.environ.get("KVSHELF_REAL_DOCUMENTS"):
        rows = [json.loads(line) for line in Path(named).read_text().splitlines()[:10]]
        return [(row["context"][:CHARACTERS], row["question"][:5]) for row in rows]
    handbook = Path(bundled_folder("handbook"))
    questions = [row["question"] for row in json.loads((handbook / "questions.json").read_text())]
    return [((handbook / "handbook.md").read_text()[:CHARACTERS], questions[:5])]
