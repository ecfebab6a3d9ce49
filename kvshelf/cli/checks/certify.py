"""certify: a bound, from graded questions, of how many answers compressed caches lose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from kvshelf._extras import needs_extra
from kvshelf.api.strict import RequestBody
from kvshelf.cli import _options
from kvshelf.cli.output import common, say
from kvshelf.errors import InvalidRequest


class Row(RequestBody):
    """A line of the file: a question on a document, and what answers it rightly, if that is known."""

    document: Annotated[str, Field(min_length=1)]
    question: Annotated[str, Field(min_length=1)]
    answer: str | None = None
    answers: Annotated[list[str], Field(min_length=1)] | None = None
    label: str = ""

    @model_validator(mode="after")
    def _one_form(self) -> Row:
        if self.answer is not None and self.answers is not None:
            raise ValueError("give answer or answers, not both")
        return self

    @property
    def right(self) -> tuple[str, ...] | None:
        """The right answers."""
        return tuple(self.answers) if self.answers is not None else None if self.answer is None else (self.answer,)


@dataclass(frozen=True)
class _Bound:
    """What is certified, and where it is written."""

    alpha: Annotated[float, typer.Option(help="Largest share of answers that may be lost.")] = 0.05
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 48
    output: Annotated[Path | None, typer.Option(help="Folder for certificates.  [default: your data folder]")] = None


def certify(
    file: Annotated[
        Path,
        typer.Argument(help="JSON lines: document, question, and if you know it answer or answers; label for groups."),
    ],
    model: Annotated[str, typer.Option(help="A bundled name, a folder, a GGUF file or a hub id.")],
    name: Annotated[str, typer.Option(help="Name of the certificate.")],
    bound: _Bound,
    device: _options.Device = "auto",
    dtype: _options.Dtype = "auto",
    as_json: _options.AsJson = False,
) -> None:
    """Certify how far documents may be compressed: so that of questions like yours at most ALPHA of the answers differ
    from those of the full cache, or are wrong where you say what is right.

    The size is chosen for each document, by the divergence that its own cache was measured to have.
    """
    with common.named_errors(as_json=as_json), needs_extra("serve", purpose="kvshelf certify"):
        from kvshelf.artifact.identity import digest
        from kvshelf.engine.certify.certificate import Certificate, folder, path_of
        from kvshelf.engine.certify.grading import DEFAULT_WAYS, grade, grouped, require_enough
        from kvshelf.engine.engine import Engine

        home, alpha = bound.output or folder(), bound.alpha
        path_of(home, name)
        documents = grouped([(row.document, row.label, row.question, row.right) for row in _rows(file)])
        require_enough(documents, alpha)
        engine = Engine.load(model, device=device, dtype=dtype)
        graded: dict[str, list[Any]] = {}
        for document in documents:
            of_label = graded.setdefault(document.label, [])
            of_label.append(grade(engine, document, DEFAULT_WAYS, max_new_tokens=bound.max_new_tokens))
        made = Certificate.of(
            graded,
            alpha,
            name=name,
            reference="full" if documents[0].answers is None else "answers",
            model=engine.name,
            fingerprint=engine.identity.fingerprint(),
            ways=list(DEFAULT_WAYS),
            data=digest("kvshelf.questions", file.read_bytes()),
        )
        path = made.write(home)
        if as_json:
            common.print_object(made)
            return
        for label, own in made.bounds.items():
            where = f"{label}: " if label else ""
            limit = "at the smallest level" if own.limit is None else f"below a divergence of {own.limit:.3g}"
            size = f"{own.share:.1%} of the bytes in 16 bits"
            say(f"{where}{own.documents} documents, {own.questions} questions: kept {limit}, {size}")
        say(f"at most {alpha:g} of the answers are lost; written to {path}")


def _rows(file: Path) -> Iterator[Row]:
    adapter = TypeAdapter(Row)
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(adapter, line, f"{file} line {number}")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="file") from error


def _row(adapter: TypeAdapter[Row], line: bytes, where: str) -> Row:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}", param="file") from error
