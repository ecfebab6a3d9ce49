"""LooGLE's scores beside ROUGE and BERT: BLEU, METEOR, and what is right of a text with gaps."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from math import exp
from typing import Any

from kvshelf_bench.scorers.overlap import runs
from kvshelf_bench.scorers.stems import stem
from kvshelf_bench.scorers.wordnet import synonyms

Places = list[tuple[int, str]]
"""Words, each with its place in its text."""


def bleu(length: int) -> Callable[[str, str], float]:
    """BLEU of runs of so many words alone, as `nltk` has it with one weight and no smoothing: the share of the answer's
    runs that stand in the reference, less where the answer is the shorter."""

    def score(answer: str, reference: str) -> float:
        answer_words, reference_words = answer.split(), reference.split()
        common = (runs(answer_words, length) & runs(reference_words, length)).total()
        if not common:
            return 0.0
        brevity = exp(min(0.0, 1 - len(reference_words) / len(answer_words)))
        return brevity * common / (len(answer_words) - length + 1)

    return score


def meteor(answer: str, reference: str) -> float:
    """METEOR (Lavie and Agarwal, 2007) as `nltk` has it: words, then stems, then WordNet's synonyms of stems. Raises
    `MissingExtra` without WordNet.

    LooGLE gives `nltk` the sets of words, whose order Python draws anew in each process, and with it the score. Here
    each word counts once, too, at its first place.
    """
    return _meteor(answer, reference, synonyms)


def meteor_stems(answer: str, reference: str) -> float:
    """`meteor` without synonyms."""
    return _meteor(answer, reference)


def gaps_exact(answer: str, reference: str) -> float:
    """The share of the gaps that are filled with the right text. Answer and reference: an object of gaps and texts, as
    JSON or Python writes it; kvpress reads it as a literal, where LooGLE lets Python run it."""
    right, filled = _gaps(reference), _gaps(answer)
    return sum(bool(filled.get(gap) == text) for gap, text in right.items()) / len(right)


def gaps_partial(answer: str, reference: str) -> float:
    """The share of the gaps whose text shares a word with the right one; none where an answer's text is no text."""
    right, filled = _gaps(reference), _gaps(answer)
    pairs = [(text, filled[gap]) for gap, text in right.items() if gap in filled]
    if not all(isinstance(filling, str) for _, filling in pairs):
        return 0.0
    return sum(bool({*text.split()} & {*filling.split()}) for text, filling in pairs) / len(right)


def no_gaps(references: Sequence[str], _: Sequence[str]) -> str | None:
    """Why a reference cannot be compared; None if all can."""
    for one in references:
        gaps = _gaps(one)
        if not gaps or not all(isinstance(text, str) for text in gaps.values()):
            return f"the answer {one!r} is no object of gaps and texts"
    return None


def _meteor(answer: str, reference: str, alike: Callable[[str], Collection[str]] | None = None) -> float:
    words, right = (list(enumerate(map(str.lower, dict.fromkeys(text.split())))) for text in (answer, reference))
    counts = len(words), len(right)
    pairs = _pairs(words, right)
    words, right = ([(place, stem(word)) for place, word in places] for places in (words, right))
    pairs += _pairs(words, right)
    if alike is not None:
        pairs += _pairs(words, right, alike)
    if not pairs:
        return 0.0
    pairs.sort()
    chunks = 1 + sum(after != (one + 1, other + 1) for (one, other), after in pairwise(pairs))
    precision, recall = (len(pairs) / count for count in counts)
    return (1 - 0.5 * (chunks / len(pairs)) ** 3) * precision * recall / (0.9 * precision + 0.1 * recall)


def _pairs(
    answer_words: Places, reference_words: Places, alike: Callable[[str], Collection[str]] = lambda word: (word,)
) -> list[tuple[int, int]]:
    """The places of words that are alike, from the last of both texts on; these words leave both lists."""
    pairs = []
    for place, word in reversed([*answer_words]):
        fitting = alike(word)
        match = next((one for one in reversed(reference_words) if one[1] in fitting), None)
        if match is not None:
            answer_words.remove((place, word))
            reference_words.remove(match)
            pairs.append((place, match[0]))
    return pairs


def _gaps(text: str) -> dict[Any, Any]:
    """Empty for a text that is no object."""
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
