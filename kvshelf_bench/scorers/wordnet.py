"""Synonyms of English words from the files of WordNet 3.0, which the user has: no package of kvshelf ships them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from kvshelf.errors import MissingExtra

FOLDER: Final = "WNSEARCHDIR"
"""The setting of WordNet's own programs: the folder of `index.noun`, `data.noun` and the like."""

_ENDINGS: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "noun": (
        *(("s", ""), ("ses", "s"), ("ves", "f"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh")),
        *(("men", "man"), ("ies", "y")),
    ),
    "verb": (*(("s", ""), ("ies", "y"), ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", "")),),
    "adj": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "adv": (),
}
"""Of inflected forms by part of speech, and those of base forms: WordNet's morphy(7)."""


class PartOfSpeech:
    """The words of one: where their synsets stand in `data.*`, and the bases of irregular forms."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises `OSError`, also for an index of another form, or of other data."""
        self._endings = _ENDINGS[name]
        self._synsets = (folder / f"data.{name}").read_bytes()
        try:
            self._offsets = dict(map(_indexed, _lines(folder / f"index.{name}")))
            self._irregular = {form: bases for form, *bases in map(str.split, _lines(folder / f"{name}.exc"))}
            if not all(self._synsets.startswith(b"%08d " % at, at) for of in self._offsets.values() for at in of):
                raise ValueError(f"its synsets stand elsewhere in data.{name}")
        except ValueError as error:
            raise OSError(f"{folder / f'index.{name}'} is no index of WordNet: {error}") from error

    def synonyms(self, word: str) -> Iterator[str]:
        """The single words of all synsets of all bases of a word."""
        for base in self._bases(word):
            for offset in self._offsets[base]:
                fields = self._synsets[offset : self._synsets.index(b"\n", offset)].decode().split(" ")
                names = (name.partition("(")[0] for name in fields[4 : 4 + 2 * int(fields[3], 16) : 2])
                yield from (name for name in names if "_" not in name)

    def _bases(self, word: str) -> list[str]:
        if word in self._irregular:
            return self._listed([word, *self._irregular[word]])
        forms = self._shorter([word])
        bases = self._listed([word, *forms])
        while forms and not bases:
            forms = self._shorter(forms)
            bases = self._listed(forms)
        return bases

    def _listed(self, forms: Iterable[str]) -> list[str]:
        return [form for form in dict.fromkeys(forms) if form in self._offsets]

    def _shorter(self, forms: Iterable[str]) -> list[str]:
        ends = [(form, ending, other) for form in forms for ending, other in self._endings if form.endswith(ending)]
        return [form.removesuffix(ending) + other for form, ending, other in ends]


def synonyms(word: str) -> set[str]:
    """A word in small letters, and its synonyms. Raises `MissingExtra` without WordNet."""
    return {word}.union(*(part.synonyms(word) for part in _wordnet(os.environ.get(FOLDER, ""))))


@cache
def _wordnet(folder: str) -> list[PartOfSpeech]:
    try:
        if not folder:
            raise FileNotFoundError(f"{FOLDER} is not set")
        return [PartOfSpeech(Path(folder), name) for name in _ENDINGS]
    except OSError as error:
        raise MissingExtra(
            f"METEOR needs WordNet 3.0: set {FOLDER} to its folder, as /usr/share/wordnet of Debian's package "
            f"wordnet-base, or give another scorer, as --scorer meteor_stems: {error}"
        ) from error


def _lines(path: Path) -> Iterator[str]:
    """Without the licence, whose lines are indented."""
    return (line for line in path.read_text().splitlines() if line.strip() and not line.startswith(" "))


def _indexed(line: str) -> tuple[str, tuple[int, ...]]:
    """A word, and where its synsets begin."""
    word, _, count, *rest = line.split()
    return word, tuple(map(int, rest[-int(count) :]))
