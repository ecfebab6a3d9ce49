"""`kvshelf bench quality --dataset`: ways over the documents of a file."""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.samples.suite import make_case
from kvshelf_bench.cli import app
from kvshelf_bench.quality.dataset.command import truncated
from kvshelf_bench.quality.dataset.documents import Document, read_documents
from kvshelf_bench.quality.dataset.measuring import NOTHING, Asking, DatasetProtocol, joined, make_units
from kvshelf_bench.quality.dataset.picture import draw
from kvshelf_bench.quality.dataset.rows import Question
from kvshelf_bench.quality.dataset.summary import PLAIN, DatasetSummary, WayScore
from kvshelf_bench.quality.grid import Reading, Row, Variant
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


def protocol(engine, *, max_new_tokens: int = 16, **asking) -> DatasetProtocol:
    return DatasetProtocol.of(engine, Asking(max_new_tokens, **asking))


def test_all_questions_are_asked_at_once_as_one_by_one(tiny, dataset):
    """One prefill for all codecs of a policy; each question is a user's turn behind the document."""
    document = read_documents(dataset)[0]
    rows = [PLAIN, Row(PLAIN.variant, 0.0, "int4"), BLIND]
    both, blind = make_units([document], rows, Asking())
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
    (unit,) = make_units([document], [PLAIN], Asking())
    keys = [protocol(tiny).key(unit, PLAIN), protocol(tiny).key(unit, Row(PLAIN.variant, 0.0, "int4"))]
    keys += [protocol(tiny).key(other, PLAIN) for other in make_units(others, [PLAIN], Asking())]
    keys += [protocol(tiny, cues=1).key(unit, PLAIN), protocol(tiny, max_new_tokens=1).key(unit, PLAIN)]
    assert len(set(keys)) == len(keys)
    (renamed,) = make_units([Document("two", "A text.", asked)], [PLAIN], Asking())
    assert protocol(tiny).key(renamed, PLAIN) == keys[0], "the name of a document changes nothing"
    own = protocol(tiny)
    calibrated = replace(own, transforms="0f" * 32)
    assert own.transforms == tiny.coders.own.transforms.digest
    for codec, measured_anew in (("none", False), ("int4", False), ("klt", True), ("klt:step=1", True)):
        row = Row(PLAIN.variant, 0.0, codec)
        assert (own.key(unit, row) != calibrated.key(unit, row)) == measured_anew, codec


def outcome(*scores: float, agreement: float | None = None, refused: str | None = None, first=()) -> Outcome:
    quality = None if agreement is None else {"agreement": agreement, "low": agreement - 0.1, "probe_s": 2.0}
    right = tuple(int(score == 1) for score in scores)
    sizes = {"document_tokens": 10, "stored_bytes": 50, "answer_s": 1.0}
    return Outcome("key", refused, right, scores, **sizes, first_tokens=first, quality=quality)


def documents_of(**sizes: int) -> list[Document]:
    return [
        Document(name, name, tuple(Question(f"{name}{number}", ("a",), task=name) for number in range(size)))
        for name, size in sizes.items()
    ]


def test_ways_are_compared_with_the_full_cache_question_by_question():
    documents = documents_of(a=3, b=2, c=1)
    full = [outcome(1, 1, 0, first=(5, 6, 7)), outcome(0, 1, first=(5, 6)), outcome(refused="too long")]
    several = [
        outcome(0, 1, 1, agreement=0.5, first=(5, 6, 8)),
        outcome(0, 0.5, agreement=0.7, first=(1, 6)),
        outcome(1),
    ]
    way = WayScore.of("blind", documents, several, full)
    assert (way.documents, way.questions, way.right) == (3, 6, 3)
    assert (way.lost, way.won) == (2, 1), "of documents that both took"
    assert way.score == pytest.approx(3.5 / 6)
    assert way.tasks == pytest.approx({"a": 2 / 3, "b": 0.25, "c": 1})
    assert way.change == pytest.approx((-1 + 0 + 1 + 0 - 0.5) / 5)
    assert way.first_tokens == 3 / 5
    assert (way.agreement, way.agreement_low) == (None, None), "not all were measured"
    way = WayScore.of("blind", documents[:2], [outcome(1, 1, 0, agreement=0.5), outcome(0, 1, agreement=0.7)], full[:2])
    assert (way.agreement, way.agreement_low) == pytest.approx((0.6, 0.5))
    assert (way.lost, way.won, way.quality_s, way.bytes_per_token, way.change) == (0, 0, 2.0, 5.0, 0)
    way = WayScore.of("blind", documents, [outcome(refused="no")] * 3, full)
    assert (way.documents, way.right, dict(way.refused)) == (0, 0, {"a": "no", "b": "no", "c": "no"})
    assert WayScore.of("full", documents, full, full).change is None


def test_a_way_that_answers_nothing_or_everything_is_drawn(tmp_path):
    """The bounds of a share of 0 or 1 are off by a rounding."""
    documents = documents_of(one=11)
    found = {PLAIN: [outcome(*[1.0] * 11)], BLIND: [outcome(*[0.0] * 11)]}
    draw(DatasetSummary.of(documents, found, 100), tmp_path / "score.svg", "title")
    assert b"</svg>" in (tmp_path / "score.svg").read_bytes()


def test_an_answer_begins_with_its_prefix_and_has_the_tokens_of_its_row(tiny, dataset):
    """kvpress's `answer_prefix` and `max_new_tokens`."""
    document = read_documents(dataset)[0]
    question = document.questions[0]
    several = (replace(question, max_new_tokens=3), replace(question, prefix=" 12", max_new_tokens=8), question)
    (unit,) = make_units([replace(document, questions=several)], [PLAIN], Asking())
    (told,) = protocol(tiny, max_new_tokens=0).measure(tiny, unit)
    cache = tiny.compress(document.context, policy="full")
    begun = tiny.encode_query(cache, question.text) + tiny.text.encode(" 12")
    assert told.answers[1] == tiny.answer(cache, begun, max_new_tokens=8).text
    lengths = [tiny.answer(cache, question.text, max_new_tokens=count) for count in (3, 48)]
    assert (told.answers[0], told.answers[2]) == tuple(answer.text for answer in lengths)
    assert told.first_tokens[0] == lengths[0].token_ids[0]


def test_a_known_question_is_compressed_for_alone(tiny, dataset):
    """SnapKV and EMS keep what the question looks at, after one prefill; keydiff looks at no question, and has one
    result for both."""
    document = read_documents(dataset)[0]
    snapkv, ems, keydiff = (Row(Variant(name), 0.0, budget=64) for name in ("snapkv", "ems", "keydiff"))
    refused = replace(ems, select=Reading("quest", 0.5))
    known, unknown = protocol(tiny, known=True), protocol(tiny)
    by_question, alike = make_units([document], [snapkv, keydiff, ems, refused], known.asking)
    assert known.key(alike, keydiff) == unknown.key(alike, keydiff)
    assert known.key(by_question, snapkv) != unknown.key(by_question, snapkv)
    told = dict(zip(by_question.rows, known.measure(tiny, by_question), strict=True))
    assert told[snapkv].prefill_s == told[ems].prefill_s
    for row in (snapkv, ems):
        for question, text in zip(document.questions, told[row].answers, strict=True):
            own = tiny.run(tiny.prepare(document.context, expected_questions=[question.text], **row.sizes)).cache
            assert tiny.answer(own, question.text, max_new_tokens=16).text == text
    assert "merge" in told[refused].refused, "alone, of those that are asked together"
    (blind,) = unknown.measure(tiny, replace(by_question, rows=(snapkv,)))
    assert told[snapkv].answers != blind.answers
    assert joined([replace(blind, prefill_s=seconds) for seconds in (1.0, 2.0)]).prefill_s == 3.0


def test_turns_stand_behind_the_earlier_ones_and_their_right_answers(tiny, dataset):
    document = read_documents(dataset)[0]
    first, second = document.questions[:2]
    (unit,) = make_units([replace(document, questions=(first, second))], [PLAIN], Asking())
    (told,) = protocol(tiny, turns=True).measure(tiny, unit)
    cache = tiny.compress(document.context, policy="full")
    assert told.answers[0] == tiny.answer(cache, first.text, max_new_tokens=16).text
    said = [{"role": "user", "content": first.text}, {"role": "assistant", "content": first.answers[0]}]
    grown = tiny.extend(cache, said, policy="full")
    assert told.answers[1] == tiny.answer(grown, second.text, max_new_tokens=16).text
    assert protocol(tiny, turns=True).key(unit, PLAIN) != protocol(tiny).key(unit, PLAIN)


@pytest.mark.parametrize("scorer", ["rules", "string_match_all"])
def test_a_turn_has_its_own_answer_where_only_rules_are_known_and_all_references_where_all_must_stand(tiny, scorer):
    rules = ("no_comma", "mentions:harbour")
    asked = [Question("Where?", rules, scorer), Question("And when?", ("7",))]
    (unit,) = make_units([Document("a", "The boat is in the harbour at 7. " * 8, tuple(asked))], [PLAIN], Asking())
    (told,) = protocol(tiny, turns=True).measure(tiny, unit)
    reply = told.answers[0] if scorer == "rules" else "\n".join(rules)
    said = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": reply}]
    grown = tiny.extend(tiny.compress(unit.document.context, policy="full"), said, policy="full")
    assert told.answers[1] == tiny.answer(grown, "And when?", max_new_tokens=16).text


def test_an_empty_answer_is_kept_as_a_turn_that_says_so(tiny, monkeypatch):
    asked = Question("Where?", ("no_comma",), "rules"), Question("And when?", ("7",))
    (unit,) = make_units([Document("a", "The boat is in the harbour at 7. " * 8, asked)], [PLAIN], Asking())
    cache = tiny.compress(unit.document.context, policy="full")
    begun = tiny.answer(cache, "Where?", max_new_tokens=1).token_ids
    monkeypatch.setattr(tiny.model.generation_config, "eos_token_id", list(begun))
    (told,) = protocol(tiny, turns=True).measure(tiny, unit)
    said = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": NOTHING}]
    grown = tiny.extend(cache, said, policy="full")
    assert told.answers == ("", tiny.answer(grown, "And when?", max_new_tokens=16).text)


@pytest.mark.slow
def test_the_middle_of_a_long_context_is_cut_out(tiny):
    text = " ".join(f"word{number}" for number in range(400))
    document = Document("long", text, (Question("Which?", ("a",)),))
    assert truncated(tiny, document, Asking(), 0) is document
    cut = truncated(tiny, document, Asking(), 100).context
    ids = tiny.text.encode(text)
    assert cut == tiny.text.decode(ids[:50]) + tiny.text.decode(ids[-50:])
    longer = replace(document, context=text * 40)
    fitting = truncated(tiny, longer, Asking(max_new_tokens=8), 0)
    assert len(tiny.text.encode(fitting.context)) <= tiny.max_tokens
    assert tiny.answer(tiny.compress(fitting.context, policy="full"), "Which?", max_new_tokens=8).token_ids
    turns = (Question("Which?", (text,)),) * 3
    cut = truncated(tiny, replace(longer, questions=turns), Asking(turns=True), 0).context
    assert len(tiny.text.encode(cut)) + 3 * len(tiny.text.encode("Which?" + text)) <= tiny.max_tokens
    with pytest.raises(InvalidRequest, match="leave no room"):
        truncated(tiny, longer, Asking(max_new_tokens=tiny.max_tokens), 0)


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
    assert [way["way"] for way in found["ways"]] == ["full", "streaming_llm@0.95", "lagkv:lag=512@0.95"]
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
    datasets += (["--turns"], ["--questions", "known"], ["--truncate", "middle"], ["--results", tmp_path / "made"])
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


def test_the_folder_has_a_folder_of_kvpress_for_each_way_and_is_set_beside_the_next_run(tmp_path, dataset):
    made, journal = tmp_path / "made", tmp_path / "journal.jsonl"
    options = ["--dataset", dataset, "--cues", "0", "--max-new-tokens", "16", "--resume", journal, "--processes", "1"]
    bench(*options, "--ways", "full,streaming_llm@32", "--results", made)
    names = ["two__kvshelf-tiny__full", "two__kvshelf-tiny__streaming_llm@32"]
    assert sorted(path.name for path in made.iterdir()) == sorted(["results.json", "score.svg", "table.txt", *names])
    report = json.loads((made / "results.json").read_text())
    for name, way in zip(names, report["ways"], strict=True):
        with (made / name / "predictions.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        assert [line["predicted_answer"] for line in lines] == [
            text for one in way["outcomes"] for text in one["answers"]
        ]
        assert lines[0].keys() >= {"question", "answer", "answer_prefix", "task", "max_new_tokens", "compression_ratio"}
        metrics = json.loads((made / name / "metrics.json").read_text())
        assert metrics == {"all": {"contains": pytest.approx(100 * way["score"], abs=0.01)}}
        config = yaml.safe_load((made / name / "config.yaml").read_text())
        assert (config["model"], config["query_aware"], config["seed"]) == ("kvshelf-tiny", False, 0)
        assert config["bytes_per_document"] == way["bytes"]
    assert config["budget_tokens"] == 32
    with pytest.raises(InvalidRequest, match="made exists; give a folder that does not"):
        bench(*options, "--results", made)
    text = bench(*options, "--ways", "full,streaming_llm@64", "--limit", "1", "--compare", made)
    beside = text[text.index("this run beside made") :].splitlines()
    assert [line.split()[0] for line in beside[2:5]] == ["full", "streaming_llm@64", "streaming_llm@32"]
    assert beside[2].split()[1:5] == [
        "4",
        *[f"{100 * sum(report['ways'][0]['outcomes'][0]['scores']) / 4:.1f}"] * 2,
        "+0.0",
    ]
    assert "not in both" in beside[3]
    with pytest.raises(InvalidRequest, match=r"--compare .* is no folder that --results made"):
        bench(*options, "--compare", tmp_path)


def test_what_does_not_fit_together_is_refused_before_the_model_is_loaded(tmp_path, dataset):
    options = ["--dataset", dataset, "--model", tmp_path / "none", "--resume", tmp_path / "journal.jsonl"]
    refused = {
        "--questions is 'maybe'": ["--questions", "maybe"],
        "--turns asks questions that are unknown": ["--turns", "--questions", "known"],
        "--cues measures caches for unknown": ["--cues", "3", "--questions", "known"],
        "--truncate is 'left'": ["--truncate", "left"],
        "--truncate is 'middle:1'": ["--truncate", "middle:1"],
        "--scorer is 'best'": ["--scorer", "best"],
        "--baseline is 'h2o'": ["--baseline", "h2o"],
        "needs --kvpress-python": ["--baseline", "kvpress"],
        "cannot import kvpress": ["--baseline", "kvpress", "--kvpress-python", "/bin/false"],
        "cannot be run": ["--baseline", "kvpress", "--kvpress-python", tmp_path / "python"],
        "the scorer letter does not fit": ["--scorer", "letter"],
        "cannot be made there": ["--results", tmp_path / "none" / "made"],
    }
    for reason, given in refused.items():
        with pytest.raises(InvalidRequest, match=re.escape(reason)):
            bench(*options, *given)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    "TESTS_KVPRESS_PYTHON" not in os.environ, reason="TESTS_KVPRESS_PYTHON names no Python with kvpress"
)
def test_kvpress_answers_as_we_do_where_nothing_is_removed(tmp_path, dataset):
    report = tmp_path / "report.json"
    options = ["--dataset", dataset, "--cues", "0", "--max-new-tokens", "16", "--resume", tmp_path / "journal.jsonl"]
    given = ["--baseline", "kvpress", "--kvpress-python", os.environ["TESTS_KVPRESS_PYTHON"], "--output", report]
    bench(*options, *given, "--ways", "full,streaming_llm@0.5,streaming_llm@0.5/int4", "--processes", "1")
    ways = {way["way"]: way for way in json.loads(report.read_text())["ways"]}
    assert list(ways)[3:] == ["kvpress full", "kvpress streaming_llm@0.5"]
    assert ways["kvpress full"]["score"] >= ways["full"]["score"] - 0.25
    assert ways["kvpress streaming_llm@0.5"]["bytes"] < 0.6 * ways["kvpress full"]["bytes"]
