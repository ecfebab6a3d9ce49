"""certify, certificates: a bound, from graded questions, of how many answers compressed caches lose."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from rich.table import Table

from kvshelf._extras import needs_extra
from kvshelf.api import Certificate
from kvshelf.api.certificates import CertificateName
from kvshelf.cli import _options
from kvshelf.cli.calibrate import served_model
from kvshelf.cli.output import common, say
from kvshelf.cli.output.common import connected
from kvshelf.cli.output.progress import searching
from kvshelf.errors import InvalidRequest, SourceNotKept

if TYPE_CHECKING:
    from kvshelf.api import Way
    from kvshelf.client import Client
    from kvshelf.engine.certify.certificate import CertificateTerms
    from kvshelf.engine.certify.grading import GradedDocument, QuestionedDocument
    from kvshelf.engine.engine import Engine

ModelT = TypeVar("ModelT", bound=BaseModel)
_Text = Annotated[str, Field(min_length=1)]

_NOT_KEPT: Final = "the text of its document was not kept"
_APPENDED: Final = "it was appended to another"


class QuestionRow(BaseModel):
    """A line of the file: questions on a document, and what answers each rightly, if that is known. The document is a
    text, or that of a cache at the service. Other fields do not matter: so a row of `kvshelf bench quality --dataset`
    with lists is one."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    context: _Text | None = None
    cache_id: _Text | None = None
    question: _Text | Annotated[list[_Text], Field(min_length=1)]
    answers: list[_Text | Annotated[list[_Text], Field(min_length=1)]] | None = None
    labels: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_document(self) -> Self:
        if (self.context is None) == (self.cache_id is None):
            raise ValueError("a row needs one of context and cache_id: the text, or a cache whose text was kept")
        return self

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        if self.answers is not None and len(self.answers) != len(self.questions):
            raise ValueError(f"{len(self.questions)} questions have {len(self.answers)} answers; give one for each")
        return self

    @property
    def questions(self) -> list[str]:
        return [self.question] if isinstance(self.question, str) else self.question

    def labelled(self, client: Client) -> Self:
        """The row with its cache's labels beside its own. Raises as `read_back`, before the cache's bytes are
        fetched."""
        if self.cache_id is None:
            return self
        cache = client.caches.retrieve(self.cache_id)
        self._require_none({_NOT_KEPT: not cache.has_source, _APPENDED: cache.parent_id is not None})
        return self.model_copy(update={"labels": cache.labels | self.labels})

    def read_back(self, client: Client) -> Self:
        """The row with the kept text of its cache's document. Raises `SourceNotKept`, and `CacheNotFound`, ..."""
        if self.cache_id is None:
            return self
        from kvshelf.artifact.blob import inspect
        from kvshelf.artifact.exported import split

        exported = split(client.caches.download(self.cache_id, about=True))
        identity = inspect(exported.blob).header.to_identity()
        reasons = {
            _NOT_KEPT: not exported.source,
            _APPENDED: bool(identity.parent),
            "it is of messages": identity.boundary not in ("text", "document"),
            "it is of images, too": bool(identity.images),
        }
        self._require_none(reasons)
        return self.model_copy(update={"context": exported.source.decode()})

    def _require_none(self, reasons: Mapping[str, bool]) -> None:
        if faults := [reason for reason, holds in reasons.items() if holds]:
            raise SourceNotKept(
                f"cache {self.cache_id} has no text to certify: {faults[0]}; give the row the text as its context, or "
                "put the text again with --keep-source",
                param="cache_id",
            )

    def group(self, by: str) -> str:
        return self.labels.get(by, "") if by else ""

    def questioned(self, by: str) -> QuestionedDocument:
        """The row, once it has its text, in the group of a label."""
        from kvshelf.engine.certify.grading import QuestionedDocument

        answers = None if self.answers is None else [[one] if isinstance(one, str) else one for one in self.answers]
        right = None if answers is None else tuple(map(tuple, answers))
        return QuestionedDocument(self.context or "", self.group(by), tuple(self.questions), right)


@dataclass(frozen=True)
class _Bound:
    alpha: Annotated[float, typer.Option(help="Largest share of answers that may be lost.")] = 0.05
    by: Annotated[str, typer.Option(metavar="LABEL", help="A label: documents of each value have their own bound.")] = (
        ""
    )
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32
    output: Annotated[
        Path | None, typer.Option(help="Write the certificate to this file, and keep it at no service.")
    ] = None
    url: _options.Url = None


def certify(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON lines: context or cache_id, question and, if you know them, answers, as lists; labels for --by.",
        ),
    ],
    model: Annotated[str, typer.Option(help="A bundled name, a folder, a GGUF file, a hub id, or a name served here.")],
    name: Annotated[str, typer.Option(help="Name of the certificate, for put --certificate.")],
    bound: _Bound,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    weights: _options.Weights = "plain",
    as_json: _options.AsJson = False,
) -> None:
    """Certify how far documents may be compressed so that, of questions like yours, at most ALPHA of the answers differ
    from the full cache's, or are wrong where you say what is right. `put --certificate` then chooses the size of each
    document, by the divergence that its caches are measured to have.

    A command that was interrupted goes on where it was when it is given again.
    """
    with common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf certify"), ExitStack() as stack:
        from kvshelf.engine.certify.certificate import certify as certified_by
        from kvshelf.engine.certify.certificate import require_enough, require_mixed
        from kvshelf.engine.certify.grading import default_ways
        from kvshelf.engine.engine import Engine
        from kvshelf.model.calibration import require_writable

        if bound.output is not None:
            require_writable(bound.output)
        rows = list(_rows(file))
        about = _about(file, name, bound, rows)
        of_service = bound.output is None or any(row.cache_id is not None for row in rows)
        client = stack.enter_context(connected(bound.url)) if of_service else None
        if client is not None:
            client.certificates.list()  # before hours of work: that it is there, and the key is good
            rows = [row.labelled(client) for row in rows]
        if bound.by and any(bound.by not in row.labels for row in rows):
            raise InvalidRequest(f"a row has no label {bound.by!r}; --by needs it in each", param="--by")
        require_enough([row.group(bound.by) for row in rows], about)
        if client is not None:  # the last, as it takes all bytes of each cache
            rows = [row.read_back(client) for row in rows]
            _require_apart(rows)
            about = replace(about, data=_digest(file, rows))
        documents = [row.questioned(bound.by) for row in rows]
        require_mixed([len(document.text) for document in documents], "length")
        engine = Engine.load(served_model(model), device=device, dtype=dtype, weights=weights, shown=model)
        engine.encoder.require_text("model")
        ways = default_ways(engine.coders.writes_klt)
        graded = list(_graded(engine, documents, ways, about, bound.max_new_tokens))
        certificate, warnings = certified_by(engine, about, graded, ways)
        for warning in warnings:
            common.notes.print(f"warning: {warning}", style="yellow", soft_wrap=True)
        if bound.output is not None:
            with common.written(bound.output) as target:
                target.write(certificate.model_dump_json(indent=1).encode())
        elif client is not None:
            client.certificates.keep(certificate)
        common.print_objects([certificate], lambda: _table([certificate]), as_json=as_json)


def certificates(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this one.")] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep one that `certify --output` has written.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete NAME. Its caches stay.")] = False,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """List the certificates of the service, newest first."""
    with common.named_errors(as_json=as_json), connected(url) as client:
        if keep is not None:
            client.certificates.keep(read_certificate(keep))
        if remove:
            if name is None:
                raise InvalidRequest("--remove deletes one certificate; give its name", param="--remove")
            say(client.certificates.delete(name).name)
            return
        known = client.certificates.list() if name is None else [client.certificates.retrieve(name)]
        common.print_objects(known, lambda: _table(known), as_json=as_json)


def _about(file: Path, name: str, bound: _Bound, rows: list[QuestionRow]) -> CertificateTerms:
    """Raises `InvalidRequest` for what can be told of the name and of the rows as they stand in the file."""
    from kvshelf.engine.certify.certificate import CertificateTerms

    try:
        TypeAdapter(CertificateName).validate_python(name)
    except ValidationError as error:
        raise InvalidRequest(
            f"{name!r:.80} is no name of a certificate: letters, digits, and . _ - behind the first, at most 64",
            param="--name",
        ) from error
    if len({row.answers is None for row in rows}) > 1:
        raise InvalidRequest("some rows have answers, and others none; give all of them, or none", param="file")
    _require_apart(rows)
    reference = "answers" if rows and rows[0].answers is not None else "full"
    return CertificateTerms(name, bound.alpha, reference, _digest(file, rows), bound.by)  # type: ignore[arg-type]


def _require_apart(rows: list[QuestionRow]) -> None:
    texts: set[str] = set()
    for row in rows:
        if (text := row.context or row.cache_id or "") in texts:
            raise InvalidRequest(
                f"two rows have the context {text[:60]!r}: put the questions on a document into one row",
                param="file",
            )
        texts.add(text)


def _digest(file: Path, rows: list[QuestionRow]) -> str:
    """Of the questions, with the texts and labels that caches have of them: the file alone does not tell those."""
    from kvshelf.artifact.identity import digest

    read_back = (row.model_dump_json() for row in rows if row.cache_id is not None)
    return digest("kvshelf.questions", file.read_bytes(), *read_back)


def _graded(
    engine: Engine, documents: list[QuestionedDocument], ways: list[Way], about: CertificateTerms, tokens: int
) -> Iterator[GradedDocument]:
    """The documents graded, those of an interrupted run as it left them, if it was about the same, in these groups."""
    from kvshelf.engine.certify.grading import GradedDocument, grade
    from kvshelf.model.calibration import data_folder
    from kvshelf.training.journal import SearchJournal

    origin = json.dumps(
        [about.data, about.by, engine.identity.fingerprint(), tokens, [way.model_dump() for way in ways]]
    )
    folder = data_folder()
    folder.mkdir(parents=True, exist_ok=True)
    journal = SearchJournal(folder / f"certify-{about.data[:16]}.unfinished", origin)
    with searching(f"questions on {engine.name}") as report:
        for number, document in enumerate(documents):

            def graded(document: QuestionedDocument = document) -> Any:
                return grade(engine, document, ways, max_new_tokens=tokens).model_dump(mode="json")

            yield GradedDocument.model_validate(journal.step(graded))
            report(number + 1, len(documents))
    journal.remove()


def _rows(file: Path) -> Iterator[QuestionRow]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parsed(QuestionRow, line, f"{file} line {number}")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="file") from error


def read_certificate(file: Path) -> Certificate:
    """One that `certify --output` has written. Raises `InvalidRequest`."""
    try:
        return _parsed(Certificate, file.read_bytes(), str(file))
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="file") from error


def _parsed(model: type[ModelT], text: bytes, where: str) -> ModelT:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{where}: {f'{place}: ' if place else ''}{first['msg']}", param="file") from error


def _table(known: list[Certificate]) -> Table:
    headings = ("NAME", "ALPHA", "MODEL", "GROUP", "DOCUMENTS", "TOKENS", "SIZE", "LOST", "DATE", "DIGEST")
    rows = (
        (
            *(one.name, f"{one.alpha:g}", one.model, value or "all", str(group.documents)),
            *("-".join(map(str, group.tokens)), f"{group.share:.1%}", f"{group.loss:.2%}", one.date, one.digest[:16]),
        )
        for one in known
        for value, group in one.groups.items()
    )
    return common.table(headings, rows, numbers=(1, 4, 5, 6, 7))
