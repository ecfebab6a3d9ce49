"""`kvshelf bench quality --dataset`: ways over the documents of a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.samples.suite import make_case
from kvshelf_bench.cli import app
from kvshelf_bench.quality.dataset.documents import Document, Question, read_documents
from kvshelf_bench.quality.dataset.measuring import DatasetProtocol, make_units
from kvshelf_bench.quality.dataset.summary import PLAIN, Way
from kvshelf_bench.quality.grid import Row, Variant
from kvshelf_bench.quality.outcome import Outcome
from kvshelf_bench.quality.retrieval import counter

BLIND = Row(Variant("streaming_llm"), 0.95)


def bench(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["quality", *map(str, arguments)])
    if isinstance(result.exception, KvshelfError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def dataset(tiny, tmp_path_factory) -> Path:
    """Two documents that the bundled model answers well, of four questions each."""
    path, rows = tmp_path_factory.mktemp("dataset") / "two.jsonl", []
    for number in range(2):
        case = make_case("multikey", "prose", 500, number, counter(tiny), questions=4)
        answers = [list(ask.references) for ask in case.asks]
        question = [ask.text for ask in case.asks]
        rows.append({"id": f"number {number}", "context": case.text, "question": question, "answers": answers})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def protocol(engine, *, cues: int = 0, max_new_tokens: int = 16) -> DatasetProtocol:
    return DatasetProtocol.of(engine, max_new_tokens, cues)


def test_all_questions_are_asked_at_once_as_one_by_one(tiny, dataset):
    """One prefill for all codecs of a policy; each question is a user's turn behind the document."""
    document = read_documents(dataset)[0]
    rows = [PLAIN, Row(PLAIN.variant, 0.0, "int4"), BLIND]
    both, blind = make_units([document], rows)
    plain, encoded = protocol(tiny, cues=30).measure(tiny, both)
    assert plain.prefill_s == encoded.prefill_s
    assert encoded.stored_bytes < plain.stored_bytes
    cache = tiny.compress(document.context, policy="full")
    alone = [tiny.answer(cache, question.text, max_new_tokens=16).text for question in document.questions]
    assert list(plain.answers) == alone
    assert sum(plain.exact) >= 3
    assert plain.quality["agreement"] == 1
    assert plain.quality["asked"] == 30
    (lost,) = protocol(tiny).measure(tiny, blind)
    assert sum(lost.exact) <= 1
    assert lost.quality is None


def test_the_key_changes_with_whatever_the_result_depends_on(tiny):
    asked = (Question("Which?", ("a",)),)
    document = Document("one", "A text.", asked)
    others = [Document("one", "A text!", asked), Document("one", "A text.", (Question("Which?", ("b",)),))]
    (unit,) = make_units([document], [PLAIN])
    keys = [protocol(tiny).key(unit, PLAIN), protocol(tiny).key(unit, Row(PLAIN.variant, 0.0, "int4"))]
    keys += [protocol(tiny).key(other, PLAIN) for other in make_units(others, [PLAIN])]
    keys += [protocol(tiny, cues=1).key(unit, PLAIN), protocol(tiny, max_new_tokens=1).key(unit, PLAIN)]
    assert len(set(keys)) == len(keys)
    (renamed,) = make_units([Document("two", "A text.", asked)], [PLAIN])
    assert protocol(tiny).key(renamed, PLAIN) == keys[0], "the name of a document changes nothing"
    own = DatasetProtocol.of(tiny, 16, 0)
    calibrated = replace(own, transforms="0f" * 32)
    assert own.transforms == tiny.coder.transforms.digest
    for codec, measured_anew in (("none", False), ("int4", False), ("klt", True), ("klt:step=1", True)):
        row = Row(PLAIN.variant, 0.0, codec)
        assert (own.key(unit, row) != calibrated.key(unit, row)) == measured_anew, codec


def outcome(*exact: int, agreement: float | None = None, refused: str | None = None) -> Outcome:
    quality = None if agreement is None else {"agreement": agreement, "low": agreement - 0.1, "probe_s": 2.0}
    return Outcome("key", refused, exact, document_tokens=10, stored_bytes=50, answer_s=1.0, quality=quality)


def test_lost_and_won_are_counted_question_by_question():
    documents = [Document(name, name, ()) for name in "abc"]
    full = [outcome(1, 1, 0), outcome(0, 1), outcome(refused="too long")]
    way = Way.of(BLIND, documents, [outcome(0, 1, 1, agreement=0.5), outcome(0, 0, agreement=0.7), outcome(1)], full)
    assert (way.documents, way.questions, way.right) == (3, 6, 3)
    assert (way.lost, way.won) == (2, 1), "of documents that both took"
    assert (way.agreement, way.agreement_low) == (None, None), "not all were measured"
    way = Way.of(BLIND, documents[:2], [outcome(1, 1, 0, agreement=0.5), outcome(0, 1, agreement=0.7)], full[:2])
    assert (way.agreement, way.agreement_low) == pytest.approx((0.6, 0.5))
    assert (way.lost, way.won, way.quality_s, way.bytes_per_token) == (0, 0, 2.0, 5.0)
    way = Way.of(BLIND, documents, [outcome(refused="no")] * 3, full)
    assert (way.documents, way.right, dict(way.refused)) == (0, 0, {"a": "no", "b": "no", "c": "no"})


def test_the_command_shows_what_each_way_lost_and_goes_on_where_it_stopped(tmp_path, dataset):
    """A policy that refuses the documents is named, and the others are measured."""
    journal, report = tmp_path / "journal.jsonl", tmp_path / "report.json"
    options = ["--dataset", dataset, "--policies", "streaming_llm,lagkv:lag=512", "--ratios", "0.95"]
    options += ["--cues", "20", "--max-new-tokens", "16", "--resume", journal, "--processes", "1"]
    text = bench(*options, "--limit", "1")
    assert len(journal.read_text().splitlines()) == 3
    assert max(map(len, text.splitlines())) <= 120
    ways = "full,streaming_llm@0.95,lagkv:lag=512@0.95"
    assert bench(*options[:2], "--ways", ways, *options[6:], "--output", report), "the same ways, named one by one"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) == 6, "something was measured twice"
    found = json.loads(report.read_text())
    assert [document["id"] for document in found["documents"]] == ["number 0", "number 1"]
    full, blind, refused = found["ways"]
    assert (full["policy"], blind["policy"], refused["policy"]) == ("full", "streaming_llm", "lagkv")
    assert full["questions"] == 8
    assert full["right"] >= 6
    assert (full["lost"], full["won"]) == (0, 0)
    assert blind["lost"] >= 4
    assert blind["agreement"] < full["agreement"] == 1
    assert full["agreement_low"] < 1
    assert set(refused["refused"]) == {"number 0", "number 1"}
    assert "lag 512" in refused["refused"]["number 0"]
    answered = full["outcomes"][1]
    assert (answered["id"], len(answered["answers"]), len(answered["exact"])) == ("number 1", 4, 4)


def test_options_of_the_other_kind_of_documents_are_refused(tmp_path, dataset):
    resume = ["--resume", tmp_path / "journal.jsonl"]
    for option in (["--tasks", "needle"], ["--size", "core"], ["--documents", "3"], ["--export"]):
        with pytest.raises(InvalidRequest, match=f"{option[0]} is for made documents alone"):
            bench("--dataset", dataset, *option, *resume)
    with pytest.raises(InvalidRequest, match="--ways says all that --codecs does"):
        bench("--dataset", dataset, "--ways", "full/int4", "--codecs", "int8", *resume)
    datasets = (["--ways", "full"], ["--limit", "3"], ["--fraction", "0.5"], ["--cues", "3"], ["--max-new-tokens", "3"])
    for option in datasets:
        with pytest.raises(InvalidRequest, match=f"{option[0]} is for a --dataset alone"):
            bench(*option, *resume)
    assert not list(tmp_path.iterdir())


def test_a_dataset_that_is_none_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"context": "a"}\n')
    arguments = ["--dataset", tmp_path / "rows.jsonl", "--resume", tmp_path / "journal.jsonl"]
    with pytest.raises(InvalidRequest, match="line 1 has the fields 'context'"):
        bench(*arguments, "--model", tmp_path / "none")
    assert not (tmp_path / "journal.jsonl").exists()
