"""Grades documents: what each level of a document loses of its questions, by its own model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.certify.certificate import Certificate, Way
from kvshelf.engine.certify.risk import Graded, Kept, require_bound
from kvshelf.engine.engine import Compression, Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.errors import InvalidRequest
from kvshelf.model.text import EncodedDocument

DEFAULT_WAYS = (
    Way(policy="full", compression_ratio=None, codec="int8"),
    Way(policy="full", compression_ratio=None, codec="int4"),
    Way(policy="keydiff", compression_ratio=0.5, codec="int4"),
    Way(policy="keydiff", compression_ratio=0.75, codec="int4"),
    Way(policy="keydiff", compression_ratio=0.875, codec="int4"),
)
"""Levels that share one prefill, for any model."""


@dataclass(frozen=True)
class Asked:
    """A document and its questions. answers: of each question those that are right; None: the full cache's is."""

    text: str
    label: str
    questions: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...] | None


def grade(engine: Engine, document: Asked, ways: Sequence[Way], *, max_new_tokens: int = 48) -> tuple[Graded, int, int]:
    """What each way loses of the document, its tokens and its questions. Raises as `Engine.prepare`."""
    encoded = engine.encode_document(document.text)
    full = engine.run(engine.prepare(encoded, policy="full")).cache

    def answer(cache: CompressedCache, question: str) -> str:
        return engine.answer(cache, question, max_new_tokens=max_new_tokens).text

    told = [answer(full, question) for question in document.questions]
    right = document.answers or tuple((text,) for text in told)

    def loss(answers: Sequence[str]) -> float:
        pairs = zip(answers, right, strict=True)
        lost = [not _same(one, known, whole=document.answers is None) for one, known in pairs]
        return sum(lost) / len(lost)

    kept = []
    for compression in engine.run_levels(_levels(engine, encoded, ways)):
        cache = compression.cache
        answers = [answer(cache, question) for question in document.questions]
        kept.append(Kept(cache.pack().nbytes, figure_of(compression), loss(answers)))
    whole = full.bytes_full * 2 // engine.model.dtype.itemsize
    return Graded(tuple(kept), whole, loss(told)), len(encoded.token_ids), len(document.questions)


def figure_of(compression: Compression) -> float:
    """The divergence of a cache from the full one that was measured with it; infinite where none could be."""
    quality = compression.quality
    return math.inf if quality is None or quality.agreement is None else quality.kl


def kept_under(engine: Engine, text: str, certificate: Certificate, *, label: str = "") -> Compression:
    """A document at the smallest level that a certificate allows; whole where it allows none. Raises as
    `Certificate.bound` before any work of the model, and as `Engine.prepare`."""
    encoded = engine.encode_document(text)
    bound = certificate.bound(label, len(encoded.token_ids), engine.identity.fingerprint())
    made = engine.run_levels(_levels(engine, encoded, certificate.ways))
    below = [one for one in made if figure_of(one) < bound.below]
    if below:
        return min(below, key=lambda one: one.cache.pack().nbytes)
    return engine.run(engine.prepare(encoded, policy="full"))


def grouped(rows: Sequence[tuple[str, str, str, tuple[str, ...] | None]]) -> list[Asked]:
    """Rows of text, label, question and right answers, by document, in the order of their first rows. Raises
    `InvalidRequest` where a document has two labels, and where some questions have answers and others have none."""
    if not rows:
        raise InvalidRequest("there are no questions; give one JSON object a line", param="file")
    if len({answers is None for *_, answers in rows}) > 1:
        raise InvalidRequest(
            "some questions have answers, and others have none; give all of them, or none", param="file"
        )
    found: dict[str, list[tuple[str, str, tuple[str, ...] | None]]] = {}
    for text, label, question, answers in rows:
        found.setdefault(text, []).append((label, question, answers))
    return list(_asked(found))


def require_enough(documents: Sequence[Asked], alpha: float) -> None:
    """Raises `InvalidRequest` before any work where a label has too few documents for a bound, saying how many."""
    for label in {document.label for document in documents}:
        of_label = sum(document.label == label for document in documents)
        require_bound(of_label, alpha, label)


def _asked(found: dict[str, list[tuple[str, str, tuple[str, ...] | None]]]) -> Iterator[Asked]:
    for text, of_document in found.items():
        labels = {label for label, _, _ in of_document}
        if len(labels) > 1:
            raise InvalidRequest(
                f"the document {text[:40]!r} has the labels {', '.join(map(repr, sorted(labels)))}; give it one",
                param="file",
            )
        answers = tuple(known for _, _, known in of_document if known is not None)
        yield Asked(text, labels.pop(), tuple(question for _, question, _ in of_document), answers or None)


def _levels(engine: Engine, encoded: EncodedDocument, ways: Sequence[Way]) -> list[Level]:
    jobs = [engine.prepare(encoded, policy=way.policy, compression_ratio=way.compression_ratio) for way in ways]
    return [engine.level(job, way.codec) for job, way in zip(jobs, ways, strict=True)]


def _same(answer: str, known: Sequence[str], *, whole: bool) -> bool:
    """Whether an answer is one of those that are known, or, unless `whole`, says one of them."""
    said = _plain(answer)
    return any(said == _plain(one) if whole else _plain(one) in said for one in known)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
