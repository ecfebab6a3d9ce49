"""Scores of answers that name one thing: a class, a number, a letter, or words and texts that must stand in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_NUMBER: Final = re.compile(r"\d+\.\d+|\d+")
_CHOICE_MARKS: Final = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
_CHOICE_PREFIXES: Final = ("answer is:", "answer:", "answer is", "option is")


def exact(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references, without the space around both."""
    return float(answer.strip() in {one.strip() for one in references})


def all_contained(answer: str, references: Sequence[str]) -> float:
    """RULER's string_match_all: the share of the references that stand in the answer, without case. Control characters
    are dropped first, as kvpress does; RULER itself puts line ends in their place."""
    text = _printable(answer)
    return sum(one.lower() in text for one in references) / len(references)


def any_contained(answer: str, references: Sequence[str]) -> float:
    """RULER's string_match_part: whether one of the references stands in the answer, without case."""
    text = _printable(answer)
    return float(any(one.lower() in text for one in references))


def classified(answer: str, reference: str, classes: Sequence[str]) -> float:
    """LongBench's for tasks with classes: 1 over the number of classes that the answer names, if the right one is among
    them. A class whose name is a part of the right one's does not count, but one that follows such a class does: the
    published code skips it, and so does this one."""
    named, at = [one for one in classes if one in answer], 0
    while at < len(named):
        if named[at] in reference and named[at] != reference:
            named.remove(named[at])
        at += 1
    return 1 / len(named) if reference in named else 0.0


def counted(answer: str, reference: str) -> float:
    """LongBench's: the share of the answer's whole numbers that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def letter(answer: str, reference: str) -> float:
    """LongBench v2's: the letter behind "The correct answer is", with brackets if one has them."""
    text = answer.replace("*", "")
    bracketed = re.search(r"The correct answer is \(([A-D])\)", text)
    match = bracketed or re.search(r"The correct answer is ([A-D])", text)
    return float(match is not None and match.group(1) == reference)


def stands_in(answer: str, references: Sequence[str]) -> float:
    """SCBench's for keys and values: a reference stands in the answer, letter by letter."""
    return float(any(one in answer for one in references))


def said_aloud(answer: str, references: Sequence[str]) -> float:
    """SCBench's for qa_eng and many_shot: a reference stands in the answer, without case."""
    text = answer.strip().upper()
    return float(any(one.upper() in text for one in references))


def all_contained_rounded(answer: str, references: Sequence[str]) -> float:
    """SCBench's for vt: RULER's share in hundredths, control characters as they are."""
    text = answer.lower()
    return round(sum(one.lower() in text for one in references) / len(references), 2)


def first_whole_number(answer: str, reference: str) -> float:
    """SCBench's for passkey: the answer's first run of the digits 0 to 9 is the reference."""
    match = re.search(r"[0-9]+", answer)
    return float((match.group() if match else "") == reference)


def first_number(answer: str, reference: str) -> float:
    """SCBench's for mf: the answer's first number is the reference, cut to a whole one where the reference is whole."""
    match = _NUMBER.search(answer)
    if match is None:
        return 0.0
    number = float(match.group())
    return float(number == float(reference) if "." in reference else int(number) == int(reference))


def option(answer: str, references: Sequence[str]) -> float:
    """SCBench's for choice_eng, of references that have the right option's letter beside its text: by the first letter,
    by the whole answer, behind "answer is" and the like, or by the first word that is a letter from A to D."""
    text = answer.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in references)
    if text in references:
        return 1.0
    text = re.sub(" {2,}", " ", text.translate(_CHOICE_MARKS))
    for prefix in _CHOICE_PREFIXES:
        if (at := text.find(prefix)) >= 0:
            rest = text[at + len(prefix) + 1 :]
            return float(len(text) > at + len(prefix) and rest.startswith(tuple(references)))
    word = next((word for word in text.split() if word in "ABCD"), None)
    return float(word in references)


def _printable(answer: str) -> str:
    return _CONTROL.sub("", answer.strip()).strip().lower()
