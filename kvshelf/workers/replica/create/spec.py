"""What a creation asks for, as the engine understands it. A spec has the fields of `CreateCache`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvshelf.errors import DocumentTooLong, InvalidRequest
from kvshelf.store.artifact.identity import canonical_json
from kvshelf.workers.engine.decode.generation import Checkpoint
from kvshelf.workers.engine.engine import Compression, Engine
from kvshelf.workers.engine.inputs.encode import Document
from kvshelf.workers.engine.inputs.job import Level
from kvshelf.workers.engine.quality import QUESTIONS
from kvshelf.workers.model.text import EncodedDocument
from kvshelf.workers.policies import build
from kvshelf.workers.replica.create.auto import MIN_QUALITY, Selection, auto

AUTO: Final = "auto"
"""The policy of a creation that leaves policy, ratio and codec to be chosen."""


@dataclass(frozen=True)
class Levels:
    """Levels of one document, all of which are wanted: work for the thread that owns the model.

    `questions`: by how many the cost of each is measured, see `Engine.run_levels`.
    """

    levels: tuple[Level, ...]
    questions: int = QUESTIONS

    @property
    def num_tokens(self) -> int:
        return self.levels[0].job.num_tokens

    def run(self, engine: Engine, *, checkpoint: Checkpoint | None = None) -> list[Compression]:
        """A compression for each, in their order."""
        return engine.run_levels(self.levels, questions=self.questions, checkpoint=checkpoint)


def wanted(
    engine: Engine, spec: Mapping[str, Any], questions: int, max_document_tokens: int | None
) -> Levels | Selection:
    """The ways to keep the document: all of them, or the smallest that is good enough. No work of the model.

    `questions` measure what each costs where nothing is to be selected. Raises as `Engine.prepare` does.
    """
    require_policy(spec)
    document = encoded(engine, spec, max_document_tokens)
    floor = spec["min_quality"]
    if spec["policy"] == AUTO:
        return auto(engine, document, min_quality=MIN_QUALITY if floor is None else floor)
    jobs = [
        engine.prepare(
            document,
            policy=spec["policy"],
            compression_ratio=ratio,
            budget_tokens=spec["budget_tokens"],
            policy_params=spec["policy_params"],
            expected_questions=spec["expected_questions"],
        )
        for ratio in spec["levels"] or [spec["compression_ratio"]]
    ]
    levels = tuple(Level(job, spec["codec"]) for job in jobs)
    return Levels(levels, questions) if floor is None else Selection(levels, floor)


def require_policy(spec: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for a policy or a parameter that does not exist, and for levels of one that has none."""
    if spec["policy"] == AUTO:
        return
    policy = build(spec["policy"], spec["policy_params"])
    if spec["levels"] and not policy.takes_budget:
        raise InvalidRequest(f"policy {policy.name!r} keeps everything and takes no levels", param="levels")


def encoded(engine: Engine, spec: Mapping[str, Any], max_document_tokens: int | None) -> EncodedDocument:
    """The document's token ids. Raises as `Engine.encode_document`; `DocumentTooLong` also above `max_document_tokens`,
    which is what this service takes of what the model could."""
    found = engine.encode_document(document_of(spec), layout=spec["layout"])
    if max_document_tokens is not None and len(found.token_ids) > max_document_tokens:
        raise DocumentTooLong(
            f"the document has {len(found.token_ids)} tokens, and this service takes {max_document_tokens} "
            "(max_document_tokens); split it",
            param="document",
        )
    return found


def document_of(spec: Mapping[str, Any]) -> Document:
    """The one document of a creation."""
    found: Document = next(spec[name] for name in ("document", "messages", "token_ids") if spec[name] is not None)
    return found


def source_of(spec: Mapping[str, Any]) -> str | None:
    """What is kept beside the cache as its document: the text, or the messages as JSON. None: nothing is to be kept."""
    if not spec["keep_source"]:
        return None
    document: str | None = spec["document"]
    return document if document is not None else canonical_json(spec["messages"])
