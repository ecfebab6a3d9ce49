"""The documents, questions and scores of the quality bench."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.samples.suite import (
    HAYSTACK_NAMES,
    TASK_NAMES,
    AnswerScore,
    CaseAsk,
    digits_at_place,
    fits,
    make_case,
    score,
)
from kvshelf.samples.tasks import make_document
from tests.amounts import in_turn

CASES = [(task, haystack) for task in TASK_NAMES for haystack in HAYSTACK_NAMES if fits(task, haystack)]
QUESTIONS = {"multikey": 4, "words": 4, "multiquery": 4, "vt": 4}
REFERENCES = {"multivalue": 4, "multiquery": 4, "vt": 5, "cwe": 10}


@pytest.fixture(scope="module")
def count(tiny):
    return tiny.encoder.require_text("document").count_tokens


@in_turn({"task, haystack": CASES, "tokens": [1024, 2500]})
def test_a_case_fills_its_length_and_holds_its_answers(count, task, haystack, tokens):
    for seed in range(3):
        case = make_case(task, haystack, tokens, seed, count)
        assert tokens - 0.15 * tokens < count(case.text) <= tokens
        assert len(case.asks) == QUESTIONS.get(task, 1)
        for ask in case.asks:
            assert len(set(ask.references)) == len(ask.references) == REFERENCES.get(task, 1)
            for reference in ask.references:
                assert re.search(rf"\b{reference}\b", case.text)
                assert reference not in ask.text


@pytest.mark.parametrize(("task", "haystack"), CASES)
def test_equal_seeds_give_equal_cases_and_others_do_not(count, task, haystack):
    first, again, other = (make_case(task, haystack, 1024, seed, count) for seed in (5, 5, 6))
    assert first == again
    assert first.text != other.text


def test_the_number_of_questions_is_a_limit(count):
    assert len(make_case("multikey", "prose", 1024, 0, count, questions=2).asks) == 2
    assert len(make_case("multikey", "dense", 1024, 0, count, questions=99).asks) == 16


@pytest.mark.parametrize("task", ["needle", "multikey", "digits32"])
def test_the_tasks_of_the_bundled_model_are_those_it_was_trained_and_measured_on(count, task):
    made = make_document(task, "prose", 900, 3, count)
    case = make_case(task, "prose", 900, 3, count)
    assert case.text == made.text
    assert [(ask.text, ask.references) for ask in case.asks] == [(q.text, (q.answer,)) for q in made.questions[:4]]


def test_words_are_asked_for_in_a_task_of_their_own(count):
    """Two words each; in a dense document all other facts have words, too."""
    case = make_case("words", "dense", 1024, 0, count)
    assert not re.search(r"\d{3}", case.text)
    for ask in case.asks:
        assert re.fullmatch(r"[a-z]+ [a-z]+", *ask.references)
        assert score(ask, ask.references[0]) == AnswerScore(True, 1.0)
        assert score(ask, ask.references[0].split()[0]) == AnswerScore(False, 0.0)


GOLDEN = {
    "needle/filler": "23d79a745527da85",
    "multikey/prose": "e7f60ea7dcd90232",
    "digits32/filler": "3ef6999bcf5f92b4",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_those_documents_are_what_they_were_when_the_model_was_measured(count, name):
    """Digests taken before the quality bench was written: a change would make its figures incomparable."""
    task, haystack = name.split("/")
    made = make_document(task, haystack, 2048, 1_000_000, count)
    content = json.dumps([made.text, [[q.text, q.answer] for q in made.questions]])
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == GOLDEN[name]


def test_in_a_dense_document_every_sentence_is_a_fact_of_the_same_kind(count):
    case = make_case("digits32", "dense", 1024, 0, count)
    assert len(re.findall(r"\b\d{32}\b", case.text)) == len(re.findall(r"\d+", case.text)) > 10
    case = make_case("vt", "dense", 1024, 0, count)
    sentences = case.text.rstrip(".").split(". ")
    assert all(re.fullmatch(r"VAR [A-Z]{5} = (VAR [A-Z]{5}|\d{5})", sentence) for sentence in sentences)


@pytest.mark.parametrize("haystack", HAYSTACK_NAMES)
def test_following_the_assignments_gives_the_names_that_are_asked_for(count, haystack):
    case = make_case("vt", haystack, 1024, 1, count)
    values: dict[str, str] = {}
    for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", case.text):
        values[name] = values.get(source, source)
    for ask in case.asks:
        (value,) = re.findall(r"\d+", ask.text)
        assert {name for name, given in values.items() if given == value} == set(ask.references)


def test_the_common_words_are_the_most_frequent_ones(count):
    case = make_case("cwe", "dense", 4096, 0, count)
    listed = re.findall(r"\d+\. (\w+)", case.text)
    frequency = {word: listed.count(word) for word in listed}
    ranked = sorted(frequency, key=lambda word: -frequency[word])
    assert set(ranked[:10]) == set(case.asks[0].references)
    assert frequency[ranked[9]] == 6 * frequency[ranked[10]]


def test_the_values_of_one_thing_stand_in_separate_sentences(count):
    case = make_case("multivalue", "prose", 1024, 2, count)
    places = [case.text.index(reference) for reference in case.asks[0].references]
    assert all("." in case.text[a:b] for a, b in zip(sorted(places), sorted(places)[1:], strict=False))


@pytest.mark.parametrize(("task", "haystack"), CASES)
def test_what_does_not_fit_is_refused_by_name(count, task, haystack):
    with pytest.raises(InvalidRequest, match=f"task '{task}' at 5 tokens.*ask for more"):
        make_case(task, haystack, 5, 0, count)


@pytest.mark.parametrize(
    ("references", "answer", "expected"),
    [
        (("482",), "482", AnswerScore(True, 1.0)),
        (("482",), "It is 482.", AnswerScore(True, 1.0)),
        (("482",), "4821", AnswerScore(False, 0.0)),
        (("482",), "", AnswerScore(False, 0.0)),
        (("17", "28", "39", "40"), "40, 17 and 39", AnswerScore(False, 0.75)),
        (("17", "28", "39", "40"), "39 40 17 28", AnswerScore(True, 1.0)),
        (("amber", "iron"), "Iron; AMBER", AnswerScore(True, 1.0)),
        (("amber", "iron"), "environment amber", AnswerScore(False, 0.5)),
    ],
)
def test_references_are_found_as_words_of_their_own(references, answer, expected):
    assert score(CaseAsk("?", references), answer) == expected


@pytest.mark.parametrize(
    ("reference", "answer", "share"),
    [("12345678", "12345678", 1.0), ("12345678", "1234", 0.5), ("12345678", "x 7, 12045670.", 0.75), ("1234", "no", 0)],
)
def test_a_long_number_is_scored_digit_by_digit(reference, answer, share):
    assert digits_at_place(reference, answer) == share
    assert score(CaseAsk("?", (reference,), by_place=True), answer) == AnswerScore(share == 1.0, share)
