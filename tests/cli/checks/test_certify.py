"""certify on the command line: what it writes, and what it refuses before a model is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.api import Certificate
from kvshelf.cli import app
from kvshelf.engine.certify import grading
from kvshelf.engine.certify.grading import GradedDocument, QuestionedDocument, grade
from kvshelf.engine.engine import Engine
from kvshelf.samples.tasks import make_document


def run(file: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["certify", str(file), "--model", "kvshelf-tiny", "--name", "own", *options])
    return result.exit_code, result.output


def rows(count: int) -> list[dict[str, Any]]:
    documents = [make_document("needle", "prose", 90, seed, lambda text: len(text.split())) for seed in range(count)]
    return [
        {"context": made.text, "question": [one.text for one in made.questions], "id": "extra"} for made in documents
    ]


@pytest.mark.slow
def test_a_certificate_is_written_and_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    file, target = tmp_path / "asked.jsonl", tmp_path / "own.json"
    file.write_text("\n".join(map(json.dumps, rows(3))) + "\n")
    options = ("--alpha", "0.3", "--max-new-tokens", "4", "--output", str(target), "--json")
    graded: list[str] = []

    def counted(engine: Engine, document: QuestionedDocument, *args: Any, **options: Any) -> GradedDocument:
        if len(graded) == 2:
            graded.append("interrupted")
            raise KeyboardInterrupt
        graded.append(document.text)
        return grade(engine, document, *args, **options)

    monkeypatch.setattr(grading, "grade", counted)
    code, _ = run(file, *options)
    assert code != 0
    assert not target.exists()
    code, told = run(file, *options)
    assert code == 0, told
    assert [graded.count(row["context"]) for row in rows(3)] == [1, 1, 1]
    written = Certificate.model_validate_json(target.read_bytes())
    assert json.loads(told.splitlines()[-1])["digest"] == written.digest
    assert (written.reference, written.groups[""].documents) == ("full", 3)
    assert list(tmp_path.rglob("*.unfinished")) == []


@pytest.mark.slow
def test_an_interrupted_run_goes_on_in_its_own_groups_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    file, target = tmp_path / "asked.jsonl", tmp_path / "own.json"
    file.write_text("\n".join(json.dumps(row | {"labels": {"kind": "port"}}) for row in rows(3)))
    options = ("--alpha", "0.3", "--max-new-tokens", "4", "--output", str(target))
    tries: list[str] = []

    def interrupted(engine: Engine, document: QuestionedDocument, *args: Any, **options: Any) -> GradedDocument:
        if len(tries) == 2:
            raise KeyboardInterrupt
        tries.append(document.text)
        return grade(engine, document, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(grading, "grade", interrupted)
        assert run(file, *options)[0] != 0
    code, told = run(file, *options, "--by", "kind")
    assert code == 0, told
    made = Certificate.model_validate_json(target.read_bytes())
    assert {group: bound.documents for group, bound in made.groups.items()} == {"port": 3}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "no questions"),
        ('{"context": "a", "question": "b"}', "19 documents"),
        ('{"context": "a"}', "line 1: question"),
        ('{"question": "b"}', "one of context and cache_id"),
        ('{"context": "a", "cache_id": "kvs_1", "question": "b"}', "one of context and cache_id"),
        ('{"context": "a", "question": ["b", "c"], "answers": ["d"]}', "2 questions have 1 answers"),
        ('{"context": "a", "question": "b"}\n{"context": "a", "question": "c"}', "two rows have the context"),
        ('{"context": "a", "question": "b"}\n{"context": "c", "question": "c", "answers": ["d"]}', "others none"),
        ("{", "line 1"),
    ],
)
def test_bad_files_are_refused_before_any_work(line: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(line)
    code, said = run(file, "--output", str(tmp_path / "own.json"))
    assert code != 0
    assert told in " ".join(said.split())
    assert not (tmp_path / "own.json").exists()


def test_a_certificate_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    code, told = run(tmp_path / "not read", "--output", str(tmp_path))
    assert code == 2
    assert f"{tmp_path} is a folder" in told
    os.mkfifo(tmp_path / "pipe")
    code, told = run(tmp_path / "not read", "--output", str(tmp_path / "pipe"))
    assert code == 2
    assert "it is a device or a pipe" in told


def test_sorted_rows_and_rows_without_their_label_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    lines = [json.dumps({"context": "word " * (at + 1) + str(at), "question": "q"}) for at in range(30)]
    file.write_text("\n".join(lines))
    for options, told in (((), "length of the documents shifts"), (("--by", "team"), "no label 'team'")):
        code, said = run(file, "--output", str(tmp_path / "own.json"), *options)
        assert code != 0
        assert told in " ".join(said.split())
