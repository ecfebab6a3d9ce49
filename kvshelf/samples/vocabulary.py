"""Word lists and sentence patterns of the generated documents; `kvshelf.samples.tasks` puts them together.

Names of things are pairs of words drawn from two lists, so that there are far more of them (about 15,000) than a
training run can show: a model cannot memorise them and has to read. The lists stand in `vocabulary.toml`.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, Final

_LISTS: Final[dict[str, Any]] = tomllib.loads(files(__package__).joinpath("vocabulary.toml").read_text("utf-8"))


def _list(listed: str | list[str]) -> tuple[str, ...]:
    """Words of a text, or phrases of an array."""
    return tuple(listed.split() if isinstance(listed, str) else listed)


def _lists(name: str) -> dict[str, tuple[str, ...]]:
    return {key: _list(listed) for key, listed in _LISTS[name].items()}


ADJECTIVES: Final = _list(_LISTS["adjectives"])
CREATURES: Final = _list(_LISTS["creatures"])
FIRST_NAMES: Final = _list(_LISTS["first_names"])
LAST_NAMES: Final = _list(_LISTS["last_names"])
PLACE_NAMES: Final = _list(_LISTS["place_names"])
PLACE_KINDS: Final = _list(_LISTS["place_kinds"])
UNIT_LETTERS: Final = _list(_LISTS["unit_letters"])
UNIT_NUMBERS: Final = _list(_LISTS["unit_numbers"])
PAPERS: Final = _list(_LISTS["papers"])
ATTRIBUTES: Final = _list(_LISTS["attributes"])
WORD_ATTRIBUTES: Final = _list(_LISTS["word_attributes"])
FACT_PATTERNS: Final = _list(_LISTS["fact_patterns"])
QUESTION_PATTERNS: Final = _list(_LISTS["question_patterns"])
ALL_VALUES_PATTERNS: Final = _list(_LISTS["all_values_patterns"])
SEVERAL_THINGS_PATTERNS: Final = _list(_LISTS["several_things_patterns"])
VARIABLES_QUESTION: Final[str] = _LISTS["variables_question"]
COMMON_WORDS_QUESTION: Final[str] = _LISTS["common_words_question"]
FILLER: Final = _list(_LISTS["filler"])
SLOTS: Final = _lists("slots")
PROSE: Final = _lists("prose")
MENTIONS: Final = _list(_LISTS["mentions"])
HEADINGS: Final = _list(_LISTS["headings"])
