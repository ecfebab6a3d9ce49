"""Lines of a text: which of them are headings, and which match a pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pydantic_core import SchemaError, SchemaValidator, core_schema

MAX_PATTERN: Final = 512
"""Characters of a pattern."""


def is_heading(line: str, following: str) -> bool:
    """Whether a line of Markdown is a heading: behind one to six number signs, or over a line of = or -."""
    text = line.strip()
    level = len(text) - len(text.lstrip("#"))
    if 1 <= level <= 6:
        return text[level : level + 1] in (" ", "")
    under = following.strip()
    return len(under) > 2 and under.strip(under[0]) == "" and under[0] in "=-"


def is_numbered(line: str) -> bool:
    """Whether a line begins with a number of an outline or of a list: 1. or 2) or 3.1."""
    word = line.split(maxsplit=1)[0] if line.strip() else ""
    digits = word.rstrip(".)")
    parts = digits.split(".")
    return all(part.isdecimal() for part in parts) and (digits != word or len(parts) > 1)


def matching(pattern: str) -> Callable[[str], bool]:
    """A function that tells whether a line matches a regular expression, in time in proportion to the line. Raises
    `ValueError` for a pattern that cannot be read."""
    if not 0 < len(pattern) <= MAX_PATTERN:
        raise ValueError(f"a pattern has from 1 to {MAX_PATTERN} characters")
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        why = " ".join(str(error).split())
        raise ValueError(f"the pattern cannot be read, or is too large: {why:.300}") from error
    return lambda line: bool(validator.isinstance_python(line))
