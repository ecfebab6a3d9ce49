"""Thoughts are told apart from the answer, however its pieces are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.api.answers import Piece
from kvshelf.api.shapes import Logprob
from kvshelf.engine.tools.pieces import ThoughtStream, behind, told_apart
from kvshelf.model.templates.thoughts import Thoughts

THINK = Thoughts.of("{{ '<think>' }} {{ '</think>' }}")
HARMONY = Thoughts.of("<|channel|>analysis<|message|> <|end|> <|channel|>final<|message|>")
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("thoughts", "opened", "text", "thought", "said"),
    [
        (None, False, "<think>x</think>y", None, "<think>x</think>y"),
        (THINK, False, "It is.", None, "It is."),
        (THINK, False, " <b> is.", None, " <b> is."),
        (THINK, False, "<think>\nHm.\n</think>\n\nIt is.", "Hm.", "It is."),
        (THINK, True, "\nHm.\n</think>\n\nIt is.", "Hm.", "It is."),
        (THINK, True, "<think>\nHm.\n</think>\n\nIt is.", "Hm.", "It is."),
        (THINK, True, "Hm. It never ends </thi", "Hm. It never ends </thi", ""),
        (THINK, False, "<think>\n\n</think>\n\nIt is.", None, "It is."),
        (THINK, False, "It is <think>x</think>.", None, "It is <think>x</think>."),
        (THINK, False, "<thin", None, "<thin"),
        (HARMONY, False, f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}It is.", "Hm.", "It is."),
        (HARMONY, False, "<|channel|>final<|message|>It is.", None, "It is."),
    ],
)
def test_an_answer(thoughts, opened, text, thought, said):
    assert told_apart(thoughts, text, opened=opened) == (thought, said)


PARTS = st.sampled_from(["<think>", "</think>", "<", "thi", "</th", " ", "\n", "Hm", "It is", FINAL, "<|end|>",
                         "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"])  # fmt: skip


@given(
    text=st.lists(PARTS, max_size=8).map("".join),
    cuts=st.sets(st.integers(0, 200), max_size=12),
    opened=st.booleans(),
    thoughts=st.sampled_from([THINK, HARMONY]),
)
def test_a_stream_is_the_answer_however_it_is_cut(text, cuts, opened, thoughts):
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    stream = ThoughtStream(thoughts, opened=opened)
    pieces = [told for first, end in itertools.pairwise(places) for told in stream.push(Piece(text[first:end]))]
    pieces += stream.rest()
    thought = "".join(piece for piece in pieces if piece.is_thought) or None
    said = "".join(piece for piece in pieces if not piece.is_thought)
    assert (thought, said) == told_apart(thoughts, text, opened=opened)


@pytest.mark.parametrize(
    ("parts", "opened", "said"),
    [
        (["<think>", "Hm", ".", "</think>", "\n\n", "It", " is", "."], False, ["It", " is", "."]),
        (["Hm", ".</", "think>", "It", " is"], True, ["It", " is"]),
        (["<", "think", "></", "think", ">", "It", " is"], False, ["It", " is"]),
        (["<", "It", " is"], False, ["<", "It", " is"]),
        (["\n", "It", " is"], False, ["\n", "It", " is"]),
        (["<think>", "Hm"], False, []),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_each_token_of_the_text_is_told_once(parts, opened, said, size):
    """The first one's went missing in a stream, and the last one's came twice."""
    tokens = [Logprob(token=part, logprob=-1.0, bytes=list(part.encode())) for part in parts]
    stream = ThoughtStream(THINK, opened=opened)
    pieces = []
    for first in range(0, len(parts), size):
        piece = Piece("".join(parts[first : first + size]), tokens[first : first + size])
        pieces += stream.push(piece)
    pieces += stream.rest()
    told = [token for piece in pieces if not piece.is_thought for token in piece.logprobs]
    assert [token.token for token in told] == said
    text = "".join(parts)
    _, rest = told_apart(THINK, text, opened=opened)
    assert behind(tokens, len(text) - len(rest)) == told


def test_templates_without_thoughts_have_none():
    assert Thoughts.of("{{ messages[0].content }}<|end|>") is None
