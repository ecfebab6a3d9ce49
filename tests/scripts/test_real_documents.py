"""The set of real documents: its questions, and how texts are fetched and cut. Packages are made here; nothing is asked
of a registry."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.real_documents import Refused, Source, cut, faults, faults_of_row, fetched, main, read_sources, row

TEXT = "# Title\n\nFirst line \nof the cut\n\nSecond part\x08t\nEnd here\nrest\n"
SOURCE = Source(
    id="one", kind="manual", licence="MIT", registry="pypi", package="package-of-ours", file="folder/text.md",
    sha256=(), questions=[["Which line?", "first"]], version="1.0", begin="First line", end="End here",
)  # fmt: skip


def test_the_set_has_what_it_promises():
    sources = read_sources()
    assert len(sources) >= 24
    assert sum(len(source.questions) for source in sources) >= 240
    assert all(len(source.questions) >= 10 for source in sources)
    assert len({source.id for source in sources}) == len(sources)
    assert {source.registry for source in sources} == {"pypi", "debian"}
    assert all(source.version for source in sources if source.registry == "pypi")
    assert all(source.sha256 and {len(digest) for digest in source.sha256} == {64} for source in sources)
    assert len({source.kind for source in sources}) >= 8
    assert list(faults(sources)) == []


def test_questions_that_answer_themselves_are_faults():
    bad = [["Which line?", "first"], ["Is it 5 or 6?", "6"], ["Which sign?", "*"], ["What?"]]
    found = " ".join(faults([SOURCE, replace(SOURCE, id="two", questions=bad)]))
    assert "asked twice: Which line?" in found
    assert "Is it 5 or 6?: the answer stands in the question" in found
    assert "Which sign?: no answer" in found
    assert "What?: no answer" in found


def test_answers_that_do_not_stand_all_over_the_document_are_faults():
    context = "alpha " + "word " * 100 + "middle " + "word " * 100 + "omega"
    made = {"id": "one", "context": context, "question": ["1", "2", "3"], "answers": [["alpha"], ["Middle"], ["omega"]]}
    assert list(faults_of_row(made)) == []
    (fault,) = faults_of_row(made | {"answers": [["alpha"], ["omega"], ["nothing", "omega"]]})
    assert "thirds [0, 2]" in fault
    fault, _ = faults_of_row(made | {"answers": [["alpha"], ["midd"], ["omega"]]})
    assert "2: no answer stands in the document" in fault


def test_a_text_is_cut_between_its_lines():
    assert cut(SOURCE, TEXT.encode()) == "First line\nof the cut\n\nSecond part\n"
    assert cut(replace(SOURCE, file="text.gz", begin="", end=""), gzip.compress(b"a\xc2\xa0b \r\nc\n")) == "a b\nc\n"
    with pytest.raises(Refused, match=r"text\.md has no line that begins with 'Third'"):
        cut(replace(SOURCE, begin="Third"), TEXT.encode())
    with pytest.raises(Refused, match="no line that begins with 'First line'"):
        cut(replace(SOURCE, begin="End", end="First line"), TEXT.encode())


def test_another_text_than_the_one_that_was_asked_about_is_refused():
    context = cut(SOURCE, TEXT.encode())
    read = replace(SOURCE, sha256=["0" * 64, hashlib.sha256(context.encode()).hexdigest()])
    made = row(read, context)
    assert made["context"] == context
    assert (made["question"], made["answers"]) == (["Which line?"], [["first"]])
    assert made["source"] == "package-of-ours 1.0 of pypi, folder/text.md"
    assert made["sha256"] == read.sha256[1]
    with pytest.raises(Refused, match="another text than the one that was asked about"):
        row(read, context + " ")


def make_wheel(folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(folder / "package_of_ours-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("folder/text.md", TEXT)
        about = "package_of_ours-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: package-of-ours\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip sees the wheel of this test and no index."""
    make_wheel(tmp_path / "index")
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path / "index")), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)


@pytest.mark.usefixtures("index")
def test_a_document_that_cannot_be_had_is_left_out_by_name(tmp_path, monkeypatch, capsys):
    context = cut(SOURCE, TEXT.encode())
    read = replace(SOURCE, sha256=["0" * 64, hashlib.sha256(context.encode()).hexdigest()])
    others = [replace(read, id="changed", end=""), replace(read, id="missing", file="folder/none.md")]
    others.append(replace(read, id="unknown", version="2.0"))
    monkeypatch.setattr("scripts.real_documents.read_sources", lambda: [others[0], read, *others[1:]])
    monkeypatch.setattr(sys, "argv", ["real_documents", str(tmp_path / "set.jsonl")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (made,) = map(json.loads, (tmp_path / "set.jsonl").read_text().splitlines())
    assert (made["id"], made["context"]) == ("one", context)
    told = capsys.readouterr().err
    assert "changed is left out: package-of-ours 1.0 of pypi, folder/text.md is another text" in told
    assert "missing is left out: package-of-ours 1.0 of pypi, folder/none.md is not in" in told
    assert "unknown is left out: package-of-ours==2.0 cannot be fetched" in told
    assert "1 documents, 1 questions" in told


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_a_file_of_a_debian_package_is_read(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    control = "Package: ours\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n"
    (tree / "DEBIAN" / "control").write_text(control)
    (tree / "usr").mkdir()
    (tree / "usr" / "text.gz").write_bytes(gzip.compress(TEXT.encode()))
    subprocess.run(["dpkg-deb", "--build", tree, tmp_path / "ours.deb"], check=True, capture_output=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apt-get").write_text(f'#!/bin/sh\ntest "$*" = "--quiet download ours" && cp {tmp_path}/ours.deb .\n')
    (tools / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    source = replace(SOURCE, registry="debian", package="ours", version="", file="*/text.gz")
    (tmp_path / "fetched").mkdir()
    absent = replace(source, file="usr/none")
    (_, data), (_, none) = fetched([source, absent], tmp_path / "fetched")
    assert isinstance(data, bytes)
    assert gzip.GzipFile(fileobj=io.BytesIO(data)).read().decode() == TEXT
    assert isinstance(none, Refused)
    assert "ours of debian, usr/none is not in" in str(none)
