"""The set of questions that are not retrieval alone."""

from __future__ import annotations

import random

from kvshelf_bench.quality.dataset import abilities
from kvshelf_bench.quality.dataset.measuring import score_of
from kvshelf_bench.scorers.scorers import SCORERS


def test_every_question_can_be_answered_right_and_its_scorer_takes_it():
    documents = abilities.documents(3, turns=True)
    tasks = {question.task for document in documents for question in document.questions}
    assert tasks == {"instructions", "key-values", "copying", "exception", "reference"}
    assert len(documents) == len(tasks) * abilities.DOCUMENTS
    for document in documents:
        for question in document.questions:
            assert SCORERS[question.scorer].unfit(question.answers, ()) is None
            if question.scorer != "rules":
                assert all(answer in document.context for answer in question.answers), document.id
                assert score_of(question, "\n".join(question.answers)) == 1
                assert score_of(question, "I do not know.") == 0


def test_three_rules_are_kept_by_an_answer_that_keeps_them():
    for seed in range(20):
        text, questions = abilities.instructions(random.Random(seed), [f"One {n}" for n in range(9)])
        rules = questions[0].answers
        assert len(rules) == 3
        assert text.count("Rule: ") == 3
        said = "Notice water and boats" if "begins_with:Notice" in rules else "NOTICE WATER AND BOATS"
        assert score_of(questions[0], said) == 1, rules


def test_a_seed_makes_other_documents_and_references_need_turns():
    one, other = abilities.documents(0, turns=False), abilities.documents(1, turns=False)
    assert one == abilities.documents(0, turns=False)
    assert {document.context for document in one}.isdisjoint(document.context for document in other)
    assert not any(document.id.startswith("reference") for document in one)
