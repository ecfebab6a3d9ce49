"""A certificate: the bound of a model's caches, with all that it was made of, and how documents are kept under it."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, ValidationError

from kvshelf.api.strict import ResponseBody
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.atomic import written
from kvshelf.engine.certify.risk import Graded, largest_limit
from kvshelf.errors import InvalidRequest, ModelMismatch, NotFound
from kvshelf.model.calibration import data_folder

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LIMIT: Final = 1 << 20
"""Bytes of a file."""


class Way(ResponseBody):
    """One way to keep a document; the ways of a certificate are its policy space."""

    policy: str
    compression_ratio: float | None
    codec: str


class Bound(ResponseBody):
    """The bound of the documents of one label. limit: a document is kept at its smallest level whose `quality.kl` is
    below it; null: at its smallest level. tokens: of the shortest and the longest document. share: bytes of all
    documents so kept, of those of their full caches in 16 bits. loss: the share of their answers that was lost."""

    documents: int
    questions: int
    limit: float | None
    tokens: tuple[int, int]
    share: float
    loss: float

    @property
    def below(self) -> float:
        """The limit as a number."""
        return math.inf if self.limit is None else self.limit


class Certificate(ResponseBody):
    """Of documents like these, kept as it says, at most `alpha` of the answers differ from those of the full cache
    (`reference` "full"), or are wrong ("answers"), on average. `bounds`: by label, each with its own documents. model,
    fingerprint: whose caches these are. data: the digest of the questions. digest: of all other fields."""

    object: Literal["certificate"] = "certificate"
    name: str
    alpha: Annotated[float, Field(gt=0, lt=1)]
    method: Literal["conformal-risk-control/kl"] = "conformal-risk-control/kl"
    reference: Literal["full", "answers"]
    model: str
    fingerprint: str
    ways: list[Way]
    bounds: dict[str, Bound]
    data: str
    date: str
    digest: str = ""

    @classmethod
    def of(
        cls, graded: Mapping[str, Sequence[tuple[Graded, int, int]]], alpha: float, **about: str | Sequence[Way]
    ) -> Self:
        """From the documents of each label, each with its tokens and its questions. about: the fields that say what
        they are of. Raises `InvalidRequest` as `largest_limit`, for the first label without a bound."""
        bounds = {}
        for label, documents in graded.items():
            try:
                bounds[label] = _bound(documents, alpha)
            except InvalidRequest as error:
                where = f"label {label!r}: " if label else ""
                raise InvalidRequest(where + error.message, param=error.param) from error
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        made = cls.model_validate({"alpha": alpha, "bounds": bounds, "date": today, **about})
        return made.model_copy(update={"digest": made.signature()})

    def signature(self) -> str:
        """Hex digest of all other fields."""
        return digest("kvshelf.certificate", canonical_json(self.model_dump(mode="json", exclude={"digest"})))

    def bound(self, label: str, num_tokens: int, fingerprint: str) -> Bound:
        """The bound of a document. Raises `ModelMismatch` for another model, and `InvalidRequest` for a document that
        the certificate does not speak of: of another label, or shorter or longer than any it was made from."""
        if fingerprint != self.fingerprint:
            raise ModelMismatch(
                f"certificate {self.name!r} was made with {self.model!r} (fingerprint {self.fingerprint[:16]}), and "
                f"this model has the fingerprint {fingerprint[:16]}; certify the questions with this one",
                cache_fingerprint=self.fingerprint,
                model_fingerprint=fingerprint,
                field="weights",
            )
        if (bound := self.bounds.get(label)) is None:
            raise InvalidRequest(
                f"certificate {self.name!r} has no documents of the label {label!r}; it has "
                f"{', '.join(map(repr, sorted(self.bounds)))}",
                param="certificate",
            )
        shortest, longest = bound.tokens
        if not shortest <= num_tokens <= longest:
            raise InvalidRequest(
                f"the document has {num_tokens} tokens, and certificate {self.name!r} was made from documents of "
                f"{shortest} to {longest}: it says nothing of others; certify questions about such documents",
                param="certificate",
            )
        return bound

    def write(self, home: Path) -> Path:
        """Keep it in a folder. Returns the file."""
        path = path_of(home, self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as file:
            file.write(self.model_dump_json(indent=1).encode())
        return path

    @classmethod
    def read(cls, home: Path, name: str) -> Self:
        """The certificate of this name. Raises `NotFound`, and `InvalidRequest` for a file that was changed."""
        path = path_of(home, name)
        try:
            with path.open("rb") as file:
                data = file.read(_LIMIT)
        except OSError as error:
            raise NotFound(f"there is no certificate {name!r} here; make it: kvshelf certify", param="name") from error
        try:
            found = cls.model_validate_json(data)
        except ValidationError as error:
            raise InvalidRequest(f"{path} is no certificate: {error.errors()[0]['msg']}", param="name") from error
        if found.digest != found.signature() or found.name != name:
            raise InvalidRequest(
                f"{path} was changed since it was written: its digest is another one; certify again", param="name"
            )
        return found


def path_of(home: Path, name: str) -> Path:
    """The file of a certificate. Raises `InvalidRequest` for what is no name."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r:.80} is no name of a certificate: letters, digits, and . _ - behind the first, at most 64",
            param="name",
        )
    return home / f"{name}.json"


def folder() -> Path:
    """Where a user's certificates are, beside the calibrations."""
    return data_folder().with_name("certificates")


def _bound(documents: Sequence[tuple[Graded, int, int]], alpha: float) -> Bound:
    graded = [document for document, _, _ in documents]
    limit = largest_limit(graded, alpha)
    kept = [document.at(limit) for document in graded]
    tokens = [count for _, count, _ in documents]
    return Bound(
        documents=len(graded),
        questions=sum(count for _, _, count in documents),
        limit=None if limit == math.inf else limit,
        tokens=(min(tokens), max(tokens)),
        share=sum(one.nbytes for one in kept) / sum(document.whole for document in graded),
        loss=sum(one.loss for one in kept) / len(kept),
    )
