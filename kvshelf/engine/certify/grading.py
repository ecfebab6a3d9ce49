"""Grades documents: what each level of a document loses of its questions, by its own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvshelf.api import Quality, Way
from kvshelf.api.strict import ResponseBody
from kvshelf.engine.certify.scoring import contains, words
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.quality import CUES
from kvshelf.errors import CallerError
from kvshelf.model.text import EncodedDocument


@dataclass(frozen=True)
class QuestionedDocument:
    """A document and its questions. answers: of each question those that are right; None: the full cache's is."""

    text: str
    group: str
    questions: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...] | None


class GradedLevel(ResponseBody):
    """What a way made of a document. whole: whether all entries stay. quality: None where nothing could be measured."""

    whole: bool
    nbytes: int
    loss: float
    quality: Quality | None


class GradedDocument(ResponseBody):
    """levels: one for each way; None: its policy refuses the document. full_bytes: of the cache in 16 bits. full_loss:
    of the full cache itself, 0 where that is the reference."""

    group: str
    tokens: int
    questions: int
    full_bytes: int
    full_loss: float
    levels: list[GradedLevel | None]


def default_ways(transforms: bool) -> list[Way]:
    """Levels that take two prefills: forms of the full cache, then keydiff, which is fast, and kvcues, which keeps its
    quality longest. transforms: whether the model has those of codec klt."""
    whole = ("int8", "klt:step=1", "klt:step=1.9,steps=kl") if transforms else ("int8", "int4")
    removed = (("keydiff", (0.5, 0.75, 0.875)), ("kvcues", (0.5, 0.75, 0.875, 0.9375)))
    codec = "klt" if transforms else "int4"
    fewer = [Way(policy=policy, compression_ratio=ratio, codec=codec) for policy, ratios in removed for ratio in ratios]
    return [*(Way(policy="full", compression_ratio=None, codec=form) for form in whole), *fewer]


def grade(
    engine: Engine, document: QuestionedDocument, ways: Sequence[Way], *, max_new_tokens: int = 32
) -> GradedDocument:
    """What each way loses of the document. Raises as `Engine.prepare` for the full cache."""
    encoded = engine.encode_document(document.text)
    full = engine.run(engine.prepare(encoded, policy="full")).cache
    levels = levels_of(engine, encoded, ways)
    runs = iter(engine.run_levels([level for level in levels if level is not None], cues=CUES))
    compressions = [None if level is None else next(runs) for level in levels]
    caches = [full, *(compression.cache for compression in compressions if compression is not None)]
    pairs = [(cache, question) for cache in caches for question in document.questions]
    texts = iter(engine.answer_all(pairs, max_new_tokens=max_new_tokens))
    answered = [[next(texts).text for _ in document.questions] for _ in caches]
    losses = iter([_loss(document, answered[0], answers) for answers in answered])
    full_loss = next(losses)
    return GradedDocument(
        group=document.group,
        tokens=len(encoded.token_ids),
        questions=len(document.questions),
        full_bytes=full.bytes_full * 2 // engine.model.dtype.itemsize,
        full_loss=full_loss,
        levels=[
            compression
            and GradedLevel(
                whole=compression.cache.kept_tokens == compression.cache.num_tokens,
                nbytes=compression.cache.pack().nbytes,
                loss=next(losses),
                quality=compression.quality,
            )
            for compression in compressions
        ],
    )


def levels_of(engine: Engine, encoded: EncodedDocument, ways: Sequence[Way]) -> list[Level | None]:
    """A level for each way; None where its policy refuses the document. Raises what every policy would."""
    engine.prepare(encoded, policy="full")
    return [_level(engine, encoded, way) for way in ways]


def _level(engine: Engine, encoded: EncodedDocument, way: Way) -> Level | None:
    try:
        job = engine.prepare(encoded, policy=way.policy, compression_ratio=way.compression_ratio)
        return engine.compressor.level(job, way.codec)
    except CallerError:  # what a policy refuses, others may take
        return None


def _loss(document: QuestionedDocument, full: Sequence[str], answers: Sequence[str]) -> float:
    """The share of the answers that are wrong, or, where nobody says what is right, not the full cache's."""
    if document.answers is None:
        lost = [words(answer) != words(whole) for answer, whole in zip(answers, full, strict=True)]
    else:
        lost = [not contains(answer, right) for answer, right in zip(answers, document.answers, strict=True)]
    return sum(lost) / len(lost)
