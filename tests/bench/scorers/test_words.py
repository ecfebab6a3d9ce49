"""Scores of answers."""

from __future__ import annotations

import pytest

from kvshelf.engine.certify.scoring import contains


@pytest.mark.parametrize(
    ("answer", "references"),
    [
        ("The file is `.hgsub`.", [".hgsub"]),
        ("It was released on\nDecember 12th,  2008.", ["2007", "december 12th 2008"]),
        ("GIT and Subversion", ["git and subversion"]),
        ("a 3:1 majority", ["3:1"]),
        ("Use smtp_connection_cache!", ["smtp_connection_cache"]),
        ("\uff15 days", ["5 days"]),  # a full-width digit
        ("stra\u00dfe", ["STRASSE"]),
        ("\u9996\u90fd\u662f\u5317\u4eac\u5e02\u3002", ["\u5317\u4eac"]),  # no spaces between words
        ("\u5e741999\u5e74", ["1999"]),
    ],
)
def test_an_answer_contains_one_of_its_references(answer, references):
    assert contains(answer, references) == 1


@pytest.mark.parametrize(
    ("answer", "references"),
    [
        ("within 15 days", ["5"]),
        ("not at all", ["no"]),
        ("a week and one day", ["one week"]),
        ("", ["a"]),
        ("anything", []),
        ("anything ... at all", ["...", "*"]),  # no words
    ],
)
def test_words_are_compared_and_not_characters(answer, references):
    assert contains(answer, references) == 0
