"""Certificates: made of graded documents, and what they allow for another one."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal

from kvshelf.api import Certificate, CertifiedBy, GroupBound, Quality, Way, WayResult
from kvshelf.engine.certify.grading import GradedDocument, GradedLevel
from kvshelf.engine.certify.risk import Graded, KeptLevel, largest_limit, require_bound, shift
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.quality import VERSION
from kvshelf.errors import InvalidRequest, ModelMismatch
from kvshelf.methods.policies import build

UNLIKELY: Final = 0.01
"""Values that shift along the rows as is less likely than this are taken to be sorted, or of two kinds."""


@dataclass(frozen=True)
class CertificateTerms:
    """What a certificate is of. by: the label that makes groups. data: the digest of the questions."""

    name: str
    alpha: float
    reference: Literal["full", "answers"]
    data: str
    by: str = ""


def require_enough(groups: Iterable[str], about: CertificateTerms) -> None:
    """Raises `InvalidRequest` for an alpha that is no share or a group that is too small. groups: of each document."""
    counts = Counter(groups)
    if not counts:
        raise InvalidRequest("there are no questions; give one JSON object a line", param="file")
    for group, count in counts.items():
        require_bound(count, about.alpha, f"{about.by} {group!r}" if about.by else "")


def require_mixed(values: Sequence[float], what: str) -> None:
    """Raises `InvalidRequest` for rows whose values shift along the file: as they stand they are not exchangeable."""
    if (likely := shift(values)) < UNLIKELY:
        raise InvalidRequest(
            f"the {what} of the documents shifts along the file (p = {likely:.2g}): the rows are sorted, or a part of "
            "them is of another kind. A bound holds for documents drawn as these were: give each kind its own group, "
            "or, if the order means nothing, shuffle the rows",
            param="file",
        )


def figure_of(quality: Quality | None) -> float:
    """The divergence of a cache from the full one, of all cues; infinite where it could not be measured."""
    return math.inf if quality is None or quality.agreement is None or not quality.full else quality.kl


def graded(document: GradedDocument, figure: Callable[[Quality | None], float] = figure_of) -> Graded:
    """A document as the bound takes it. One level stands for each way: what its policy refused is never allowed.
    figure: of a way that removes entries. Ways that remove none go before, one after the other (`_whole_figure`): what
    rounding changes is as rare where it diverges more."""
    count = len(document.levels)
    refused = KeptLevel(document.full_bytes, math.inf, document.full_loss)

    def of_level(place: int, level: GradedLevel) -> KeptLevel:
        own = _whole_figure(place - count, level.quality) if level.whole else figure(level.quality)
        return KeptLevel(level.nbytes, own, level.loss)

    levels = [refused if level is None else of_level(place, level) for place, level in enumerate(document.levels)]
    return Graded(levels, document.full_bytes, document.full_loss)


def _whole_figure(place: int, quality: Quality | None) -> float:
    """Of a way that removes nothing: by its place (below 0), then by its divergence; below that of the next place."""
    kl = figure_of(quality)
    return place + (kl / (1 + kl) if kl < math.inf else 1.0)


def certify(
    engine: Engine, about: CertificateTerms, documents: Sequence[GradedDocument], ways: Sequence[Way]
) -> tuple[Certificate, list[str]]:
    """The certificate of an engine's documents, in the order of their rows, and warnings: which figures and losses
    shift along it. Raises `InvalidRequest` as `require_enough`, and where the full cache itself loses too much."""
    require_enough([document.group for document in documents], about)
    groups, warnings = {}, []
    for group in sorted({document.group for document in documents}):
        of_group = [document for document in documents if document.group == group]
        where = f"{about.by} {group!r}: " if about.by else ""
        try:
            groups[group] = _bound(of_group, about.alpha)
        except InvalidRequest as error:
            raise InvalidRequest(where + error.message, param=error.param) from error
        warnings += [where + warning for warning in _shifts(list(map(graded, of_group)))]
    certificate = Certificate(
        name=about.name,
        alpha=about.alpha,
        reference=about.reference,
        by=about.by,
        model=engine.name,
        weights=engine.identity.weights,
        tokenizer=engine.identity.tokenizer,
        fingerprint=engine.identity.fingerprint(),
        transforms=_transforms(engine),
        quality_version=VERSION,
        ways=list(ways),
        groups=groups,
        data=about.data,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    return certificate.signed(), warnings


def _bound(documents: Sequence[GradedDocument], alpha: float) -> GroupBound:
    as_graded = list(map(graded, documents))
    limit = largest_limit(as_graded, alpha)
    kept = [document.at(limit) for document in as_graded]
    tokens = [document.tokens for document in documents]
    whole = sum(document.whole for document in as_graded)
    return GroupBound(
        documents=len(documents),
        questions=sum(document.questions for document in documents),
        limit=None if limit == math.inf else limit,
        tokens=(min(tokens), max(tokens)),
        share=sum(level.nbytes for level in kept) / whole,
        loss=fmean(level.loss for level in kept),
        ways=[
            WayResult(share=sum(level.nbytes for level in levels) / whole, loss=fmean(level.loss for level in levels))
            for levels in zip(*(document.levels for document in as_graded), strict=True)
        ],
    )


def _shifts(documents: Sequence[Graded]) -> list[str]:
    values = {
        "divergence": [min(level.figure for level in document.levels) for document in documents],
        "loss": [fmean(level.loss for level in document.levels) for document in documents],
    }
    return [
        f"the {what} shifts along the file (p = {p:.2g}): are all documents of one kind?"
        for what, of_documents in values.items()
        if (p := shift(of_documents)) < UNLIKELY
    ]


@dataclass(frozen=True)
class Certified:
    """What a certificate allows for one document. limit: a level is allowed whose figure is below it. places: of the
    codecs of ways that remove no entries, below 0."""

    by: CertifiedBy
    limit: float
    places: tuple[tuple[str, int], ...]

    def allows(self, level: Level, quality: Quality | None) -> bool:
        """Whether the document may be kept at a level of this quality."""
        if level.job.identity.policy == "full":
            return _whole_figure(dict(self.places)[level.codec], quality) < self.limit
        return figure_of(quality) < self.limit


def certified(engine: Engine, certificate: Certificate, labels: Mapping[str, str], tokens: int) -> Certified:
    """What a certificate allows for a document. Raises `ModelMismatch` and `InvalidRequest` for what it does not speak
    of: another model, tokenizer or policy space, a group that it has not, and a length outside that of its documents.
    """
    _require_model(engine, certificate)
    group = _group(certificate, labels, tokens)
    origin = CertifiedBy(name=certificate.name, alpha=certificate.alpha, digest=certificate.digest)
    places = enumerate(certificate.ways, -len(certificate.ways))
    whole = tuple((way.codec, place) for place, way in places if way.policy == "full")
    return Certified(origin, math.inf if group.limit is None else group.limit, whole)


def _require_model(engine: Engine, certificate: Certificate) -> None:
    own, name = engine.identity, certificate.name
    if (fingerprint := own.fingerprint()) != certificate.fingerprint:
        field = "dtype, positions or template"
        if own.weights != certificate.weights:
            field = "weights"
        elif own.tokenizer != certificate.tokenizer:
            field = "tokenizer"
        raise ModelMismatch(
            f"certificate {name!r} was made with {certificate.model!r} (fingerprint {certificate.fingerprint[:16]}), "
            f"and {engine.name!r} has {fingerprint[:16]}: {field} differs; certify the questions with this model",
            cache_fingerprint=certificate.fingerprint,
            model_fingerprint=fingerprint,
            field=field,
        )
    if certificate.quality_version != VERSION:
        raise _other_space(name, "the measure of quality has changed since")
    if certificate.transforms != _transforms(engine):
        raise _other_space(name, "the transforms of codec klt has changed since")
    for way in certificate.ways:
        try:
            build(way.policy, {})
        except InvalidRequest as error:
            raise _other_space(name, error.message) from error


def _other_space(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"certificate {name!r} was made with another policy space: {reason}; certify the questions again",
        param="certificate",
    )


def _transforms(engine: Engine) -> str:
    return engine.coders.own.transforms.digest if engine.coders.has_own else ""


def _group(certificate: Certificate, labels: Mapping[str, str], tokens: int) -> GroupBound:
    name, by = certificate.name, certificate.by
    value = labels.get(by, "") if by else ""
    if (group := certificate.groups.get(value)) is None:
        known = ", ".join(map(repr, certificate.groups))
        raise InvalidRequest(
            f"certificate {name!r} has no documents with {by} {value!r:.80}; it has {known:.400}: give the document "
            f"one of these as its label {by!r}, or certify questions about such documents",
            param="labels",
        )
    shortest, longest = group.tokens
    if not shortest <= tokens <= longest:
        raise InvalidRequest(
            f"the document has {tokens} tokens, and certificate {name!r} was made from documents of {shortest} to "
            f"{longest}: it says nothing of others; certify questions about such documents",
            param="certificate",
        )
    return group
