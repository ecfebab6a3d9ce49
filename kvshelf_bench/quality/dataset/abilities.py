"""Documents that ask for more than retrieval, after SCBench, IFEval and "The Pitfalls of KV Cache Compression"."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Final

from kvshelf.samples.tasks import haystacks
from kvshelf_bench.quality.dataset.documents import Document
from kvshelf_bench.quality.dataset.rows import Question

NAME: Final = "abilities"
"""Of the set, in place of a file."""

DOCUMENTS: Final = 4
"""Of each ability."""

_WORDS: Final = 120
"""Of the prose around."""

_THINGS: Final = ("harbour", "orchard", "library", "station", "mill", "bakery", "chapel", "quarry")
_RULES: Final[tuple[tuple[str, str], ...]] = (
    ("Answer in at most twelve words.", "words_at_most:12"),
    ("Begin every answer with the word Notice.", "begins_with:Notice"),
    ("Never use a comma.", "no_comma"),
    ("Write every answer in capital letters.", "upper_case"),
    ("End every answer with the word over.", "ends_with:over"),
    ("Never use the word the.", "avoids:the"),
)


def documents(seed: int, *, turns: bool) -> list[Document]:
    """`DOCUMENTS` documents of each ability. turns: with those whose later questions refer to earlier ones."""
    makers = {
        "instructions": instructions,
        "key-values": _key_values,
        "copying": _copying,
        "exception": _exception,
    }
    if turns:
        makers["reference"] = _reference
    return [_document(name, number, seed, maker) for number in range(DOCUMENTS) for name, maker in makers.items()]


def _document(
    name: str, number: int, seed: int, maker: Callable[[random.Random, list[str]], tuple[str, list[Question]]]
) -> Document:
    rng = random.Random(f"{name}/{seed}/{number}")
    *_, prose = haystacks(seed * DOCUMENTS + number + 1, _WORDS, lambda text: len(text.split()))
    text, questions = maker(rng, prose.split(". "))
    return Document(f"{name} {number}", text, tuple(questions))


def instructions(rng: random.Random, prose: list[str]) -> tuple[str, list[Question]]:
    """Three rules among the prose; each answer is to keep all of them."""
    first = rng.sample(_RULES[:4], 2)
    chosen = [*first, rng.choice([one for one in _RULES if one not in first and one[1] != "ends_with:over"])]
    if {"begins_with:Notice", "upper_case"} <= {rule for _, rule in chosen}:  # NOTICE begins no answer with Notice
        chosen = [(text, "begins_with:NOTICE" if rule.startswith("begins") else rule) for text, rule in chosen]
    text = _spread(rng, prose, [f"Rule: {text}" for text, _ in chosen])
    rules = tuple(rule for _, rule in chosen)
    texts = [f"Follow all rules of the text. Say something about the {thing}." for thing in rng.sample(_THINGS, 2)]
    return text, [Question(one, rules, "rules", max_new_tokens=32, task="instructions") for one in texts]


def _key_values(rng: random.Random, _: list[str]) -> tuple[str, list[Question]]:
    pairs = {f"{rng.choice(_THINGS)}-{rng.randrange(1000, 9999)}": f"{rng.randrange(10**7, 10**8)}" for _ in range(10)}
    keys = rng.sample(sorted(pairs), 4)
    text = "Below is a JSON object.\n" + json.dumps(pairs, indent=0)
    return text, [
        Question(f'What is the value of "{key}"?', (pairs[key],), "stands_in", max_new_tokens=24, task="key-values")
        for key in keys
    ]


def _copying(rng: random.Random, prose: list[str]) -> tuple[str, list[Question]]:
    """Two functions; each is to be repeated, line by line."""
    blocks = {}
    for thing in rng.sample(_THINGS, 2):
        a, b, c = (rng.randrange(2, 99) for _ in range(3))
        lines = [f"def {thing}_total(count):", f"    base = count * {a} + {b}", f"    return base - {c}"]
        blocks[thing] = lines
    text = _spread(rng, prose, ["\n```python\n" + "\n".join(lines) + "\n```\n" for lines in blocks.values()])
    return text, [
        Question(
            f"Write the Python function {thing}_total exactly as the text has it.",
            tuple(line.strip() for line in lines),
            "string_match_all",
            max_new_tokens=64,
            task="copying",
        )
        for thing, lines in blocks.items()
    ]


def _exception(rng: random.Random, prose: list[str]) -> tuple[str, list[Question]]:
    """A rule, and far from it one thing that it does not hold for."""
    thing, other = rng.sample(_THINGS, 2)
    hour, late = rng.sample(range(6, 12), 2)
    rule, but = (
        f"Every building opens at {hour} o'clock",
        f"The {thing} is the only exception and opens at {late} o'clock",
    )
    text = ". ".join([*prose[:2], rule, *prose[2:-2], but, *prose[-2:]])
    return text, [
        Question(
            f"At what hour does the {name} open, by the rule of the text?",
            (f"{answer}",),
            max_new_tokens=24,
            task="exception",
        )
        for name, answer in ((thing, late), (other, hour))
    ]


def _reference(rng: random.Random, prose: list[str]) -> tuple[str, list[Question]]:
    """A second question whose "it" is the answer to the first."""
    thing, other = rng.sample(_THINGS, 2)
    code, wrong = rng.sample(range(1000, 9999), 2)
    facts = [
        f"The oldest building is the {thing}.",
        f"The key number of the {thing} is {code}.",
        f"The key number of the {other} is {wrong}.",
    ]
    return _spread(rng, prose, facts), [
        Question("Which is the oldest building?", (thing,), max_new_tokens=24, task="reference"),
        Question("And what is its key number?", (f"{code}",), max_new_tokens=24, task="reference"),
    ]


def _spread(rng: random.Random, prose: list[str], pieces: list[str]) -> str:
    """Pieces between sentences of prose, in their order."""
    places = sorted(rng.sample(range(1, len(prose)), len(pieces)))
    sentences = list(prose)
    for place, piece in reversed(list(zip(places, pieces, strict=True))):
        sentences.insert(place, piece.rstrip("."))
    return ". ".join(sentences)
