"""Splitting a text: every part fits, nothing is lost, and what is planted at a seam is whole in one part."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvshelf.errors import InvalidRequest
from kvshelf.model import split
from kvshelf.model.source import bundled_folder
from kvshelf.model.split import TextParts, TextSpan, spans
from kvshelf.model.text import TextFormat

FORMAT = TextFormat(AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny")))
WORDS = ["quay", "ledger", "boat", "grain", "rope", "tar", "lamp", "weather", "month", "office", "keeper", "tide"]


def parts(text: str, size: int, overlap: int) -> list[str]:
    """The parts, after a check of what holds for any text."""
    text_spans = spans(text, FORMAT.token_starts, size=size, overlap=overlap)
    assert text_spans[0].start == 0
    assert text_spans[-1].end == len(text)
    for one, following in pairwise(text_spans):
        assert one.start < following.start <= one.end < following.end
        # Cut anywhere, the tokens beside the cuts may be others than in the part: hence the two.
        assert overlap - 2 <= FORMAT.count_tokens(text[following.start : one.end])
    # Parts without what they repeat are the text.
    ends = [0, *(span.end for span in text_spans)]
    assert "".join(text[before : span.end] for before, span in zip(ends, text_spans, strict=False)) == text
    made = [text[span.start : span.end] for span in text_spans]
    assert all(FORMAT.count_tokens(part) <= size for part in made)
    return made


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(["one ", "Two. ", "\n", "\n\n", "\r\n\r\n", "字", "。", "😀", "x" * 90, "  ", "é"]),
        max_size=400,
    ),
    st.integers(64, 200),
    st.integers(0, 16),
)
def test_any_text_is_split_without_loss(pieces: list[str], size: int, overlap: int) -> None:
    parts("".join(pieces), size, overlap)


def test_a_text_that_fits_is_one_part() -> None:
    assert parts("One. Two.", 64, 16) == ["One. Two."]
    assert parts("", 64, 16) == [""]


def sentences(count: int, chance: random.Random) -> list[str]:
    return [" ".join(chance.choices(WORDS, k=8)).capitalize() + "." for _ in range(count)]


@pytest.mark.parametrize(
    ("between", "ends"),
    [("\n\n", "\n\n"), ("\r\n \r\n", "\r\n \r\n"), ("\n", "\n"), (" ", ". ")],
    ids=["paragraphs", "paragraphs with returns", "lines", "sentences"],
)
def test_parts_end_where_a_paragraph_a_line_or_a_sentence_ends(between: str, ends: str) -> None:
    made = parts(between.join(sentences(80, random.Random(1))), 200, 30)
    assert len(made) > 4
    assert all(part.endswith(ends) for part in made[:-1])


def test_a_paragraph_is_preferred_to_a_later_line_and_a_line_to_a_later_sentence() -> None:
    line = " ".join(sentences(3, random.Random(2)))
    paragraph = f"{line}\n{line}\n\n"
    made = parts(paragraph * 12, 300, 0)
    assert all(part.endswith("\n\n") for part in made)
    made = parts(f"{line}\n" * 20, 200, 0)
    assert all(part.endswith("\n") for part in made)


@pytest.mark.parametrize("between", ["\n\n", " ", ""], ids=["paragraphs", "words", "one line without an end"])
def test_a_fact_at_any_seam_is_whole_in_one_part(between: str) -> None:
    """The fact is moved over a seam, character by character. Without sentences to end at only the overlap keeps it."""
    chance = random.Random(3)
    filler = [text.rstrip(".") for text in sentences(60, chance)]
    text = (between or "-").join(filler)
    fact = "The access code of the amber falcon is 482913"
    overlap = FORMAT.count_tokens(fact) + 4
    seam = spans(text, FORMAT.token_starts, size=200, overlap=overlap)[0].end
    planted = [text[:at] + fact + text[at:] for at in range(seam - len(fact) - 3, seam + 4)]
    for copy in planted:
        assert any(fact in part for part in parts(copy, 200, overlap)), copy
    if between != "\n\n":
        lost = [copy for copy in planted if not any(fact in part for part in parts(copy, 200, 0))]
        assert lost, "without the overlap a fact is cut"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["a ", "\n\n", "字", "。", "😀", "👩‍👩‍👧", "x" * 30, "  ", "\u0301"]), min_size=1, max_size=60
    ),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_parts_of_few_tokens_go_forward_or_are_refused(pieces: list[str], size: int, overlap: int) -> None:
    """Many tokens of one character begin in one place: a part that began there again would have no end."""
    text, steps = "".join(pieces), 0

    def step() -> None:
        nonlocal steps
        steps += 1
        assert steps <= 3 * len(text) + 3, "a step moves by a character at least"

    def split_all() -> list[TextSpan]:
        return spans(text, FORMAT.token_starts, size=size, overlap=min(overlap, size // 4), checkpoint=step)

    if any(FORMAT.count_tokens(character) > size for character in text):
        with contextlib.suppress(InvalidRequest):  # unless it stands with others that it makes tokens with
            split_all()
        return
    text_spans = split_all()
    assert (text_spans[0].start, text_spans[-1].end) == (0, len(text))
    for one, following in pairwise(text_spans):
        assert one.start < following.start <= one.end < following.end
    assert all(FORMAT.count_tokens(text[span.start : span.end]) <= size for span in text_spans)


def test_more_parts_than_anybody_compresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three four five " * 9
    made = spans(text, FORMAT.token_starts, size=8, overlap=0)
    monkeypatch.setattr(split, "MOST_PARTS", len(made))
    assert spans(text, FORMAT.token_starts, size=8, overlap=0) == made
    monkeypatch.setattr(split, "MOST_PARTS", len(made) - 1)
    with pytest.raises(InvalidRequest, match=f"more than {len(made) - 1} parts") as refusal:
        spans(text, FORMAT.token_starts, size=8, overlap=0)
    assert refusal.value.param == "split"


def test_parts_are_cut_out_one_at_a_time() -> None:
    """As a list they took as much as the text once more, and more with what they repeat."""
    text = "The quay keeper writes. " * 100_000
    cuts = TextParts(text, [TextSpan(start, min(start + 10_000, len(text))) for start in range(0, len(text), 9_000)])
    tracemalloc.start()
    try:
        lengths = [len(part) for part in cuts]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 < sum(lengths)
    assert (len(cuts), cuts[1][:9], cuts[-1]) == (
        len(lengths),
        text[9_000:9_009],
        list(cuts)[-1],
    )
    assert list(cuts[1:3]) == [text[9_000:19_000], text[18_000:28_000]]
