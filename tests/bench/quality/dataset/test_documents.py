"""Documents and questions of a file."""

from __future__ import annotations

import json
import sys

import pytest

from kvshelf.errors import InvalidRequest, MissingExtra
from kvshelf_bench.quality.dataset.documents import Document, draw_documents, read_documents, read_prompts
from kvshelf_bench.quality.dataset.measuring import score_of
from kvshelf_bench.quality.dataset.rows import Question, RowRules

ROW = {"context": "The door is green.", "question": ["Which colour?"], "answers": [["green", "Green"]]}

KVPRESS = {
    "context": "A box holds 7 coins.",
    "question": "How many coins?",
    "answer_prefix": "There are",
    "answer": ["7"],
    "max_new_tokens": 5,
    "task": "niah_single_1",
}
LONGBENCH = {
    "context": "One. Two.",
    "input": "Which class?",
    "answers": ["Date"],
    "all_classes": ["Date", "City"],
    "length": 2,
    "dataset": "trec",
    "_id": "x1",
}
SCBENCH = {
    "id": 4,
    "context": "A long book.",
    "multi_turns": [
        {"input": "Who?", "answer": "the keeper", "options": ["the sailor", "the keeper", "a", "b"]},
        {"input": "Where?", "answer": "here", "options": ["here", "there", "c", "d"]},
    ],
}


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
        ("[1]", "has list; a row is an object"),
        ({"context": "a", "input": "b"}, "has the fields 'context', 'input'; a row needs .*context, multi_turns"),
        ("{}", "has the fields none"),
        (ROW | {"context": " "}, "context must be a text"),
        (ROW | {"context": 7}, "context must be a text"),
        (ROW | {"question": "Which colour?"}, "a row needs"),
        (ROW | {"question": []}, "question must be a list"),
        (ROW | {"question": ["a", ""], "answers": ["b", "c"]}, "question must be a list"),
        (ROW | {"answers": []}, "one entry for each of 1 questions, not 0"),
        (ROW | {"answers": {"a": 1}}, "one entry for each of 1 questions, not dict"),
        (ROW | {"answers": [[]]}, "at least one"),
        (ROW | {"answers": [[None]]}, "must be texts"),
        (ROW | {"answers": [["green", "*"]]}, "does not fit 'Which colour\\?': the answer '\\*' has no word"),
        (ROW | {"scorer": "best"}, "there is no scorer 'best'; one of contains"),
        (ROW | {"scorer": ["exact", "f1"]}, "one for each of 1 questions"),
        (ROW | {"scorer": "letter"}, "the scorer letter does not fit .*'green' is no letter"),
        (ROW | {"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1"),
        (ROW | {"id": 3.5}, "id must be a text"),
        (KVPRESS, "has the shape kvpress, and .*line 1 lists; give files of one shape"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_line(tmp_path, row, reason):
    other = {"context": "The gate is red.", "question": ["Which?"], "answers": ["red"]}
    with pytest.raises(InvalidRequest, match=rf"rows.jsonl, line 2.*{reason}"):
        read_documents(written(tmp_path / "rows.jsonl", other, row))


def test_a_file_without_documents_is_refused(tmp_path):
    (tmp_path / "latin").write_bytes("n\xf6te".encode("latin-1"))
    with pytest.raises(InvalidRequest, match="latin, line 1 is no JSON: 'utf-8' codec"):
        read_documents(tmp_path / "latin")
    with pytest.raises(InvalidRequest, match="nothing cannot be read: no such file or folder"):
        read_documents(tmp_path / "nothing")
    with pytest.raises(InvalidRequest, match="has no row"):
        read_documents(written(tmp_path / "empty", ""))
    same = ROW | {"id": "door"}
    with pytest.raises(InvalidRequest, match=r"twice, line 2 has another context than .*line 1, and its id 'door'"):
        read_documents(written(tmp_path / "twice", same, same | {"context": "Another door."}))


def test_a_dataset_that_the_hub_does_not_give_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidRequest, match="--dataset nobody/none/4096 is no file here, and the hub did not give it"):
        read_documents("nobody/none/4096")


def test_a_fraction_is_drawn_by_the_seed_and_keeps_the_order():
    documents = [Document(str(number), "a", ()) for number in range(40)]
    drawn = draw_documents(documents, fraction=0.25, limit=None, seed=3)
    assert len(drawn) == 10
    assert drawn == sorted(drawn, key=lambda document: int(document.id))
    assert drawn == draw_documents(documents, fraction=0.25, limit=None, seed=3)
    assert drawn != draw_documents(documents, fraction=0.25, limit=None, seed=4)
    assert draw_documents(documents, fraction=0.25, limit=3, seed=3) == drawn[:3]
    assert draw_documents(documents, fraction=1, limit=None, seed=3) == documents
    assert len(draw_documents(documents, fraction=0, limit=None, seed=3)) == 1


def test_a_row_of_kvpress(tmp_path):
    other = KVPRESS | {"question": "What holds them?", "answer": "box", "task": "mine"}
    (document,) = read_documents(written(tmp_path / "rows.jsonl", KVPRESS, other))
    asked, own = document.questions
    assert document.context == KVPRESS["context"]
    assert (asked.text, asked.prefix, asked.answers) == ("How many coins?", "There are", ("7",))
    assert (asked.scorer, asked.max_new_tokens, asked.task) == ("string_match_all", 5, "niah_single_1")
    assert (own.scorer, own.answers, own.task) == ("contains", ("box",), "mine")
    letters = KVPRESS | {"task": None, "choice_A": "x", "difficulty": "easy", "answer": "B"}
    (document,) = read_documents(written(tmp_path / "v2.jsonl", letters))
    assert (document.questions[0].scorer, document.questions[0].task) == ("letter", "v2")


def test_a_row_of_longbench_and_its_prompt(tmp_path):
    path = written(tmp_path / "trec.jsonl", LONGBENCH)
    (document,) = read_documents(path)
    (asked,) = document.questions
    assert (document.id, document.context, asked.text) == ("x1", "One. Two.", "Which class?")
    assert (asked.scorer, asked.classes, asked.max_new_tokens) == ("classification", ("Date", "City"), 64)
    assert asked.first_line
    prompted = RowRules(prompts={"trec": "Examples:\n{context}\n{input} It is a"})
    (document,) = read_documents(path, prompted)
    assert document.context == "Examples:\nOne. Two."
    assert document.questions[0].text == "\nWhich class? It is a"
    (document,) = read_documents(path, RowRules(scorer="exact"))
    assert document.questions[0].scorer == "exact"
    with pytest.raises(InvalidRequest, match=r"line 1: input is empty, .* give --prompts"):
        read_documents(written(tmp_path / "report.jsonl", LONGBENCH | {"input": ""}))
    with pytest.raises(InvalidRequest, match="line 1: the prompt of trec asks nothing"):
        read_documents(path, RowRules(prompts={"trec": "Read {context}\n"}))
    with pytest.raises(InvalidRequest, match="line 1: the prompt of trec does not fit: 'inputs'"):
        read_documents(path, RowRules(prompts={"trec": "{context}{inputs}"}))


def test_a_row_of_scbench_is_of_the_task_that_its_file_is_named_after(tmp_path):
    path = written(tmp_path / "scbench_choice_eng.jsonl", SCBENCH)
    (document,) = read_documents(path)
    assert (document.id, document.context) == ("4", "A long book.")
    first, second = document.questions
    assert (first.text, first.answers, first.scorer) == ("Who?", ("the keeper", "B"), "option")
    assert (second.answers, second.max_new_tokens) == (("here", "A"), 40)
    prompt = "Read.\n{context}\n\nQuestion: {question}\nA. {OPTION_A}\nB. {OPTION_B}"
    (document,) = read_documents(path, RowRules(prompts={"scbench_choice_eng": prompt}))
    assert document.context == "Read.\nA long book."
    assert document.questions[1].text == "\n\nQuestion: Where?\nA. here\nB. there"
    numbers = {"context": "a", "multi_turns": [{"input": "sum?", "answer": 12}]}
    (document,) = read_documents(written(tmp_path / "scbench_mf.jsonl", numbers))
    assert (document.questions[0].answers, document.questions[0].scorer) == (("12",), "first_number")
    for turns, reason in (([], "must be a list"), ([{"input": "a"}], "a turn has no answer"), ("a", "must be a list")):
        with pytest.raises(InvalidRequest, match=f"line 1: .*{reason}"):
            read_documents(written(tmp_path / "bad.jsonl", SCBENCH | {"multi_turns": turns}))


def test_parquet_and_the_folders_of_datasets_have_the_same_rows(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [ROW | {"id": "a"}, {"id": "b", "context": "The gate is red.", "question": ["Which?"], "answers": [["red"]]}]
    expected = read_documents(written(tmp_path / "rows.jsonl", *rows))
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert read_documents(tmp_path / "rows.parquet") == expected
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    with (
        pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    assert read_documents(saved) == expected
    written(saved / "more.jsonl", {**ROW, "id": "a", "context": "Another door."})
    assert [document.id for document in read_documents(saved)] == [
        "data-00000-of-00001/a",
        "data-00000-of-00001/b",
        "more/a",
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"a folder without \.jsonl"):
        read_documents(tmp_path / "empty")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidRequest, match=r"torn.parquet cannot be read"):
        read_documents(tmp_path / "torn.parquet")


def test_a_task_whose_scorer_lacks_its_package_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bert_score", None)
    with pytest.raises(
        MissingExtra, match=r"rows.jsonl, line 1, task longdep_qa: LooGLE's BERT score needs .*pip inst"
    ):
        read_documents(written(tmp_path / "rows.jsonl", KVPRESS | {"task": "longdep_qa"}))


def test_a_function_is_compared_with_all_functions_of_its_repository(tmp_path):
    """SCBench's repoqa: the functions of a repository stand in several rows."""
    pytest.importorskip("tree_sitter", reason="pip install 'kvshelf[bench]'")

    def row(context: str, repo: str, *names: str) -> dict:
        turns = [{"input": f"It adds {name}.", "answer": f"def {name}(): return 1 + 2", "name": name} for name in names]
        return {"context": context, "lang": "python", "repo": repo, "multi_turns": turns}

    rows = row("One.", "a", "f", "g"), row("Two.", "b", "f"), row("Three.", "a", "h")
    one, two, three = read_documents(written(tmp_path / "scbench_repoqa.jsonl", *rows))
    all_of_a = ("python", "def f(): return 1 + 2", "def g(): return 1 + 2", "def h(): return 1 + 2")
    assert [question.classes for question in (*one.questions, *three.questions)] == [all_of_a] * 3
    assert two.questions[0].classes == ("python", "def f(): return 1 + 2")
    assert one.questions[1].answers == ("def g(): return 1 + 2",)
    assert (one.questions[0].scorer, one.questions[0].max_new_tokens) == ("function", 1024)
    assert score_of(one.questions[1], "```\ndef g(): return 1 + 2\n```") == 1
    assert score_of(one.questions[1], "```\ndef h(): return 1 + 2\n```") == 0
    del rows[2]["lang"]
    with pytest.raises(
        InvalidRequest, match=r"line 3: the scorer function does not fit 'It adds h\.': the row needs lang"
    ):
        read_documents(written(tmp_path / "scbench_repoqa.jsonl", *rows))


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', '{"a": "no place"}', "{", None])
def test_prompts_that_are_none_are_refused(tmp_path, text):
    path = tmp_path / "prompts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"--prompts .*prompts.json"):
        read_prompts(path)
