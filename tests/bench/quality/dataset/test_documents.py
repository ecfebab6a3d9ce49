"""Documents and questions of a file."""

from __future__ import annotations

import json

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf_bench.quality.dataset.documents import Document, Question, chosen, read_documents

ROW = {"context": "The door is green.", "question": ["Which colour?"], "answers": [["green", "Green"]]}


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rows_of_one_context_are_one_document(tmp_path):
    more = ROW | {"question": ["What is green?"], "answers": ["door"], "kind": "fact"}
    other = {"id": "gate", "context": "The gate is red.", "question": ["Which?"], "answers": ["red"]}
    first, second = read_documents(written(tmp_path / "rows.jsonl", ROW, "", other, more))
    assert first.id == "line 1"
    assert first.questions == (
        Question("Which colour?", ("green", "Green")),
        Question("What is green?", ("door",)),
    )
    assert second == Document("gate", "The gate is red.", (Question("Which?", ("red",)),))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "is no JSON"),
        ('{"context": "half a \\ud800"}', "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "has list; a row needs context, question, answers"),
        ({"context": "a", "input": "b"}, "has the fields 'context', 'input'; a row needs context, question, answers"),
        ("{}", "has the fields none"),
        (ROW | {"context": " "}, "context must be a text"),
        (ROW | {"context": 7}, "context must be a text"),
        (ROW | {"question": "Which colour?"}, "question must be a list"),
        (ROW | {"question": []}, "question must be a list"),
        (ROW | {"question": ["a", ""], "answers": ["b", "c"]}, "question must be a list"),
        (ROW | {"answers": []}, "one entry for each of 1 questions, not 0"),
        (ROW | {"answers": {"a": 1}}, "one entry for each of 1 questions, not dict"),
        (ROW | {"answers": [[]]}, "at least one"),
        (ROW | {"answers": [[3]]}, "must be texts"),
        (ROW | {"answers": [["green", "*"]]}, "'\\*' of 'Which colour\\?' has no word"),
        (ROW | {"id": 3}, "id must be a text"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_line(tmp_path, row, reason):
    other = {"context": "The gate is red.", "question": ["Which?"], "answers": ["red"]}
    with pytest.raises(InvalidRequest, match=rf"rows.jsonl, line 2.*{reason}"):
        read_documents(written(tmp_path / "rows.jsonl", other, row))


def test_a_file_without_documents_is_refused(tmp_path):
    (tmp_path / "latin").write_bytes("n\xf6te".encode("latin-1"))
    with pytest.raises(InvalidRequest, match="latin cannot be read"):
        read_documents(tmp_path / "latin")
    with pytest.raises(InvalidRequest, match="nothing cannot be read"):
        read_documents(tmp_path / "nothing")
    with pytest.raises(InvalidRequest, match="has no row"):
        read_documents(written(tmp_path / "empty", ""))
    same = ROW | {"id": "door"}
    with pytest.raises(InvalidRequest, match="two contexts have the id 'door'"):
        read_documents(written(tmp_path / "twice", same, same | {"context": "Another door."}))


def test_a_fraction_is_drawn_by_the_seed_and_keeps_the_order():
    documents = [Document(str(number), "a", ()) for number in range(40)]
    drawn = chosen(documents, fraction=0.25, limit=None, seed=3)
    assert len(drawn) == 10
    assert drawn == sorted(drawn, key=lambda document: int(document.id))
    assert drawn == chosen(documents, fraction=0.25, limit=None, seed=3)
    assert drawn != chosen(documents, fraction=0.25, limit=None, seed=4)
    assert chosen(documents, fraction=0.25, limit=3, seed=3) == drawn[:3]
    assert chosen(documents, fraction=1, limit=None, seed=3) == documents
    assert len(chosen(documents, fraction=0, limit=None, seed=3)) == 1
