"""Where text ends a segment, by the tokens of the bundled tokenizer, which splits rare characters into bytes."""

# ruff: noqa: RUF001  the full-width marks are meant

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvshelf.methods.policies.segments import Segments
from kvshelf.model.source import bundled_folder
from kvshelf.model.text import SENTENCE_ENDS, TextFormat


@pytest.fixture(scope="module")
def text():
    return TextFormat(AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny")))


def parts(text, written, *endings):
    """The text of each segment."""
    ids, segments = text.encode(written), []
    for token, last in zip(ids, text.segment_ends(ids, *endings), strict=True):
        if not segments or segments[-1][1]:
            segments.append([[], False])
        segments[-1][0].append(token)
        segments[-1][1] = last
    return [text.decode(ids) for ids, _ in segments]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("First, the sea; then: land!", ["First,", " the sea;", " then:", " land!"]),
        ("One.\nTwo?\n\nThree", ["One.", "\n", "Two?", "\n\n", "Three"]),
        ("No end at all", ["No end at all"]),
        ("It cost 3.14 in May. 7 were left.", ["It cost 3.14 in May.", " 7 were left."]),
        ("It was 5.", ["It was 5."]),
        ("Room 5.A is open", ["Room 5.", "A is open"]),
        (".5 or a.5", [".", "5 or a.", "5"]),
        ("你好，世界。再见！真的？", ["你好，", "世界。", "再见！", "真的？"]),
    ],
)
def test_segments_end_at_punctuation_but_not_within_a_number(text, written, expected):
    assert parts(text, written) == expected


def test_sentences_end_at_fewer_marks(text):
    assert parts(text, "First, the sea; then: land! Gone，是。", SENTENCE_ENDS) == [
        "First, the sea; then: land!",
        " Gone，是。",
    ]


def test_characters_of_several_tokens_are_what_is_tested(text):
    """Else the case above would not show that their last token ends a segment."""
    assert len(text.encode("，")) == 3


def test_nothing_has_no_ends(text):
    assert text.segment_ends([]) == []


@given(ends=st.lists(st.booleans(), min_size=1, max_size=200), longest=st.integers(1, 30))
def test_segments_are_cut_at_ends_and_at_their_greatest_length(ends, longest):
    segments = Segments.cut(torch.tensor(ends), longest, torch.device("cpu"))
    expected, current = [], []
    for token, last in enumerate(ends):
        current.append(token)
        if last or len(current) == longest or token == len(ends) - 1:
            expected.append(current)
            current = []
    rows = [index[inside].tolist() for index, inside in zip(segments.index, segments.inside, strict=True)]
    assert rows == expected
    values = torch.arange(1.0, len(ends) + 1)
    assert segments.lengths.tolist() == [len(tokens) for tokens in expected]
    assert torch.equal(segments.tokens(segments.rows(values)), values)
    assert float(segments.rows(values).sum()) == float(values.sum()), "padding is zero"
