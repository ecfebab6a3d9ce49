"""Generated conversations about several topics."""

from __future__ import annotations

import pytest

from scripts.conversations import make_conversation


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(("topics", "tokens"), [(1, 400), (4, 1500), (8, 3000)])
def test_a_conversation_fits_and_holds_each_answer_where_it_says(topics: int, tokens: int) -> None:
    for seed in range(5):
        made = make_conversation(topics, tokens, seed, words)
        assert made == make_conversation(topics, tokens, seed, words)
        assert 0.8 * tokens < words(made.text) <= tokens
        assert len(made.questions) == 4 * topics
        places = [at for at, _ in made.questions]
        assert len(set(places)) == len(places)  # no two facts in one utterance
        for at, question in made.questions:
            assert question.answer in made.utterances[at]
    assert make_conversation(topics, tokens, 0, words) != make_conversation(topics, tokens, 1, words)
