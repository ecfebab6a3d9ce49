"""What a creation asks of the engine: its document, and the levels to keep it at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvshelf.api import CreateCache, Estimate
from kvshelf.api.inspect import KeptOf
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
"""The policy of a creation that leaves policy, ratio and codec to the service."""


@dataclass(frozen=True)
class Levels:
    """Levels of one document, all of them to be made by the thread that owns the model.

    `questions` measure the quality of each, see `Engine.run_levels`.
    """

    levels: tuple[Level, ...]
    questions: int = QUESTIONS

    @property
    def num_tokens(self) -> int:
        return self.levels[0].job.num_tokens

    def run(self, engine: Engine, *, checkpoint: Checkpoint | None = None) -> list[Compression]:
        """A compression for each, in their order."""
        return engine.run_levels(self.levels, questions=self.questions, checkpoint=checkpoint)


def requested_levels(
    engine: Engine, spec: CreateCache, questions: int, max_document_tokens: int | None
) -> Levels | Selection:
    """The levels to keep the document at: all of them, or the smallest that is good enough. The model does not run.

    `questions` measure the quality of each level, unless a `Selection` does. Raises as `Engine.prepare` does.
    """
    require_policy(spec)
    document = encode(engine, spec, max_document_tokens)
    floor = spec.min_quality
    if spec.policy == AUTO:
        return auto(engine, document, min_quality=MIN_QUALITY if floor is None else floor)
    jobs = [
        engine.prepare(
            document,
            policy=spec.policy,
            compression_ratio=ratio,
            budget_tokens=spec.budget_tokens,
            policy_params=spec.policy_params,
            expected_questions=spec.expected_questions,
        )
        for ratio in (spec.levels or (spec.compression_ratio,))
    ]
    levels = tuple(engine.level(job, spec.codec) for job in jobs)
    return Levels(levels, questions) if floor is None else Selection(levels, floor)


def require_policy(spec: CreateCache) -> None:
    """Raises `InvalidRequest` for an unknown policy or parameter, and for levels of a policy without a budget."""
    if spec.policy == AUTO:
        return
    policy = build(spec.policy, spec.policy_params)
    if spec.levels and not policy.takes_budget:
        raise InvalidRequest(f"policy {policy.name!r} keeps everything and takes no levels", param="levels")


def encode(engine: Engine, spec: CreateCache | Estimate, max_document_tokens: int | None) -> EncodedDocument:
    """The document's token ids. Raises as `Engine.encode_document`, and `DocumentTooLong` above `max_document_tokens`,
    the service's own limit, below the model's."""
    found = engine.encode_document(document_of(spec), layout=spec.layout)
    if max_document_tokens is not None and len(found.token_ids) > max_document_tokens:
        raise DocumentTooLong(
            f"the document has {len(found.token_ids)} tokens, and this service takes {max_document_tokens} "
            "(max_document_tokens); split it",
            param="document",
        )
    return found


def document_of(spec: CreateCache | KeptOf) -> Document:
    """The one document of a request: text, messages or token ids."""
    if spec.messages is not None:
        return [message.model_dump() for message in spec.messages]
    document = spec.document if spec.document is not None else spec.token_ids
    assert document is not None  # the types ask for exactly one of the three
    return document


def source_of(spec: CreateCache) -> str | None:
    """The source to keep beside the cache: the text, or the messages as JSON. None without `keep_source`."""
    if not spec.keep_source:
        return None
    return spec.document if spec.document is not None else canonical_json(document_of(spec))
