"""Instructions that a program can check of an answer, after IFEval (Zhou et al., 2023); the rules are our own.

A reference is a rule: its name, and behind a colon what it needs, as `words_at_most:12` or `mentions:harbour`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Final

from kvshelf.engine.certify.scoring import contains, words

Check = Callable[[str, str], bool]
"""Of an answer and what the rule needs."""


def kept(answer: str, rules: Sequence[str]) -> float:
    return sum(_keeps(answer, rule) for rule in rules) / len(rules)


def unfit(rules: Sequence[str], _: Sequence[str]) -> str | None:
    """Why these are no rules; None if they are."""
    for rule in rules:
        name, _colon, needs = rule.partition(":")
        if name not in RULES:
            return f"there is no rule {name!r}; one of {', '.join(RULES)}"
        if name.endswith(("_most", "_least")) and not needs.isdecimal():
            return f"the rule {rule!r} needs a whole number behind its colon"
        if name in _OF_TEXT and not needs:
            return f"the rule {rule!r} needs a text behind its colon"
    return None


def _keeps(answer: str, rule: str) -> bool:
    name, _, needs = rule.partition(":")
    text = answer.strip()
    return bool(text) and RULES[name](text, needs)


def _is_json(answer: str, _: str) -> bool:
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return True


RULES: Final[dict[str, Check]] = {
    "words_at_most": lambda text, needs: len(words(text)) <= int(needs),
    "words_at_least": lambda text, needs: len(words(text)) >= int(needs),
    "lines_at_least": lambda text, needs: sum(bool(line.strip()) for line in text.split("\n")) >= int(needs),
    "mentions": lambda text, needs: contains(text, [needs]) == 1,
    "avoids": lambda text, needs: contains(text, [needs]) == 0,
    "begins_with": lambda text, needs: text.startswith(needs),
    "ends_with": lambda text, needs: text.endswith(needs),
    "upper_case": lambda text, _: text == text.upper() != text.lower(),
    "lower_case": lambda text, _: text == text.lower() != text.upper(),
    "bullets": lambda text, _: all(re.match(r"\s*[-*]\s", line) for line in text.split("\n") if line.strip()),
    "json": _is_json,
    "no_comma": lambda text, _: "," not in text,
}
_OF_TEXT: Final = ("mentions", "avoids", "begins_with", "ends_with")
