"""The types of /v1/certificates: a bound of the answers that compressed caches lose, from graded questions."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvshelf.api.strict import ListBody, RequestBody, ResponseBody, misuse

CertificateName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Way(ResponseBody):
    """One way to keep a document: the ways of a certificate are its policy space."""

    policy: str
    compression_ratio: float | None
    codec: str


class WayResult(ResponseBody):
    """One way on the documents of a group. `share`: bytes, of full caches in 16 bits. `loss`: share of lost answers."""

    share: float
    loss: float


class GroupBound(ResponseBody):
    """The bound of the documents of one group. A document is kept at the smallest of the ways whose figure is below
    `limit` (null: at the smallest), or whole, under codec none. The figure is `quality.kl` under a way that removes
    entries; of ways that remove none it is below 0: their place less the number of all ways, and a share of 1 that
    rises with `quality.kl`. `tokens`: of its shortest and longest document. `share`: bytes of all its documents so
    kept, of those of full caches in 16 bits. `loss`: the share of their answers that was lost. `ways`: the same where
    all are kept by one way, in the order of the certificate's."""

    documents: int
    questions: int
    limit: float | None
    tokens: tuple[int, int]
    share: float
    loss: float
    ways: list[WayResult]


class Certificate(RequestBody):
    """Of documents like these, kept as it says, at most `alpha` of the answers differ from those of the full cache
    (`reference` full), or are wrong (answers), on average.

    `groups`: by the value of the label `by`, each with documents of its own; one group, "", without it. `model`,
    `weights`, `tokenizer`, `fingerprint`: whose caches these are. `transforms`: of codec klt. `quality_version`: of the
    figures. `data`: the digest of the questions. `digest`: SHA-256 of all other fields.
    """

    object: Literal["certificate"] = "certificate"
    name: CertificateName
    alpha: Annotated[float, Field(gt=0, lt=1)]
    method: Literal["conformal-risk-control/kl"] = "conformal-risk-control/kl"
    reference: Literal["full", "answers"]
    by: str = ""
    model: str
    weights: str
    tokenizer: str
    fingerprint: str
    transforms: str = ""
    quality_version: int
    ways: Annotated[list[Way], Field(max_length=64)]
    groups: Annotated[dict[str, GroupBound], Field(min_length=1, max_length=256)]
    data: str
    date: str
    digest: str = ""

    @model_validator(mode="after")
    def _unchanged(self) -> Self:
        if any(len(group.ways) != len(self.ways) for group in self.groups.values()):
            raise misuse("groups", "each group tells of each of the ways; make the certificate again")
        if self.digest and self.digest != self.signature():
            raise misuse("digest", "it was changed since it was made: its digest is another one; certify again")
        return self

    def signature(self) -> str:
        """Hex digest of all other fields."""
        text = json.dumps(self.model_dump(mode="json", exclude={"digest"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def signed(self) -> Self:
        """With its digest."""
        return self.model_copy(update={"digest": self.signature()})


class CertifiedBy(ResponseBody):
    """The certificate under which a cache was made."""

    name: str
    alpha: float
    digest: str


class CertificateList(ListBody):
    """GET /v1/certificates: newest first."""

    data: list[Certificate]


class CertificateDeleted(ResponseBody):
    """The answer to DELETE."""

    name: str
    object: Literal["certificate"] = "certificate"
    deleted: bool = True
