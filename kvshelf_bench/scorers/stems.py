"""Stems of English words by Porter's rules (1980), with the changes that `nltk` makes to them by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Rules = Sequence[tuple[str, str]]
"""Endings, and what comes in their place."""

_IRREGULAR: Final = {
    **{word: word for word in ("sky", "news", "inning", "outing", "canning", "howe", "proceed", "exceed", "succeed")},
    **{f"{word}s": word for word in ("inning", "outing", "canning")},
    "skies": "sky",
    **{f"{start}ying": f"{start}ie" for start in "dlt"},
}
_PLURALS: Final[Rules] = (("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", ""))
_DOUBLE: Final[Rules] = (
    *(("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble")),
    *(("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate")),
    *(("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al")),
    *(("iviti", "ive"), ("biliti", "ble"), ("fulli", "ful")),
)
_SINGLE: Final[Rules] = (
    *(("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", "")),
)
_LAST: Final[Rules] = tuple(
    (ending, "")
    for ending in (
        *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion"),
        *("ou", "ism", "ate", "iti", "ous", "ive", "ize"),
    )
)


def stem(word: str) -> str:
    """Of a word in small letters."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    word = word[:-1] if word.endswith("ies") and len(word) == 4 else _changed(word, _PLURALS, least=-1)
    word = _without_tense(word)
    if word.endswith("y") and len(word) > 2 and _sounds(word[:-1]).endswith("c"):
        word = f"{word[:-1]}i"
    word = _without_last(_changed(_without_double(word), _SINGLE, least=0))
    before = word[:-1]
    if word.endswith("e") and (_syllables(before) > 1 or (_syllables(before) == 1 and not _is_short(before))):
        word = before
    return word[:-1] if word.endswith("ll") and _syllables(word[:-1]) > 1 else word


def _without_tense(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return _changed(word, (("eed", "ee"),), least=0)
    ending = next((one for one in ("ed", "ing") if word.endswith(one)), "")
    before = word.removesuffix(ending)
    sounds = _sounds(before)
    if not ending or "v" not in sounds:
        return word
    if before.endswith(("at", "bl", "iz")):
        return f"{before}e"
    if before[-2:] == before[-1:] * 2 and sounds.endswith("c"):
        return before if before.endswith(("l", "s", "z")) else before[:-1]
    return f"{before}e" if _syllables(before) == 1 and _is_short(before) else before


def _without_double(word: str) -> str:
    if word.endswith("alli") and _syllables(word[:-4]):
        return _without_double(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if _syllables(word[:-3]) else word
    return _changed(word, _DOUBLE, least=0)


def _without_last(word: str) -> str:
    if word.endswith("ion") and not word.endswith(("sion", "tion")):
        return word
    return _changed(word, _LAST, least=1)


def _changed(word: str, rules: Rules, *, least: int) -> str:
    """The first ending that the word has decides: what stands before it needs more syllables than `least`."""
    for ending, other in rules:
        if word.endswith(ending):
            before = word.removesuffix(ending)
            return before + other if _syllables(before) > least else word
    return word


def _sounds(word: str) -> str:
    """v for each vowel, c for any other character; y is a vowel behind a consonant."""
    sounds = ""
    for letter in word:
        sounds += "v" if letter in "aeiou" or (letter == "y" and sounds.endswith("c")) else "c"
    return sounds


def _syllables(word: str) -> int:
    """Porter's measure: how often a consonant follows a vowel."""
    return _sounds(word).count("vc")


def _is_short(word: str) -> bool:
    sounds = _sounds(word)
    return (sounds.endswith("cvc") and not word.endswith(("w", "x", "y"))) or sounds == "vc"
