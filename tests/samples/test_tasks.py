"""The generated documents of training and evaluation."""

from __future__ import annotations

import pytest

from kvshelf.samples.tasks import HAYSTACKS, TASKS, make_document


@pytest.fixture(scope="module")
def count(tiny):
    return tiny.encoder.require_text("document").count_tokens


@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [600, 1024])
def test_a_document_holds_its_answers_and_fills_its_length(count, task, haystack, tokens):
    for seed in range(3):
        made = make_document(task, haystack, tokens, seed, count)
        assert tokens - 60 < count(made.text) <= tokens
        assert len(made.questions) == (16 if task == "multikey" else 1)
        answers = [question.answer for question in made.questions]
        assert len(set(answers)) == len(answers)
        for question in made.questions:
            assert made.text.count(question.answer) >= 1
            assert question.answer not in question.text
        assert all(len(answer) == 32 for answer in answers) or task != "digits32"


def test_equal_seeds_give_equal_documents_and_others_do_not(count):
    first, again, other = (make_document("multikey", "prose", 700, seed, count) for seed in (5, 5, 6))
    assert first == again
    assert {q.answer for q in first.questions} != {q.answer for q in other.questions}


def test_facts_that_do_not_fit_are_refused(count):
    with pytest.raises(ValueError, match="16 facts do not fit"):
        make_document("multikey", "filler", 40, 0, count)
