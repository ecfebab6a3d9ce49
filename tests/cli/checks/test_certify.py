"""certify on the command line: what it writes, and what it refuses before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvshelf.cli import app
from kvshelf.engine.certify.certificate import Certificate
from kvshelf.samples.tasks import make_document


def run(file: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["certify", str(file), "--model", "kvshelf-tiny", "--name", "own", *options])
    return result.exit_code, result.output


def test_a_certificate_is_written_and_printed(tmp_path: Path) -> None:
    documents = [make_document("needle", "prose", 90, seed, lambda text: len(text.split())) for seed in range(3)]
    rows = [{"document": made.text, "question": made.questions[0].text} for made in documents]
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    code, told = run(file, "--alpha", "0.3", "--max-new-tokens", "4", "--output", str(tmp_path / "made"), "--json")
    assert code == 0, told
    written = Certificate.read(tmp_path / "made", "own")
    assert json.loads(told)["digest"] == written.digest
    assert (written.reference, written.bounds[""].documents) == ("full", 3)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "no questions"),
        ('{"document": "a", "question": "b"}', "19 documents"),
        ('{"document": "a"}', "line 1: question"),
        ('{"document": "a", "question": "b", "answer": "c", "answers": ["d"]}', "not both"),
        ("{", "line 1"),
    ],
)
def test_bad_files_are_refused_before_any_work(line: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(line)
    code, said = run(file, "--output", str(tmp_path))
    assert code != 0
    assert told in " ".join(said.split())
    assert not (tmp_path / "own.json").exists()
