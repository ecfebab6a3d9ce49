"""Whether an answer says what is right, by its words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

_WORD: Final = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
"""A run of letters and digits; in Chinese and Japanese, which put no space between words, one character."""


def contains(answer: str, references: Sequence[str]) -> float:
    """1 if one of the references stands in the answer as whole words, else 0.

    Case, punctuation, spaces and the form of a character (NFKC) do not matter. Words are compared and not characters:
    "5" does not stand in "15 days", nor "no" in "not". A reference without a word stands in no answer.
    """
    spoken = _joined(answer)
    return float(any(words(reference) and _joined(reference) in spoken for reference in references))


def words(text: str) -> list[str]:
    """The words of a text, in the form in which they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _joined(text: str) -> str:
    return f" {' '.join(words(text))} "
