"""The documents and questions of the quality bench: RULER's retrieval, tracing and counting tasks.

After RULER (Hsieh et al., 2024, arXiv 2404.06654) and the passkey test (Mohtashami and Jaggi, 2023):

- ``needle``: one fact; its value is asked for.
- ``multikey``: sixteen facts about sixteen things; each question asks for one of them.
- ``words``: as ``multikey``, but the values are two words. The bundled model gives numbers only.
- ``digits32``, ``digits64``: one fact whose value has 32 or 64 digits.
- ``multivalue``: four facts that give one thing four values, in sentences far apart; all four are asked for at once.
- ``multiquery``: sixteen facts; each question asks for four of them at once.
- ``vt``: variable tracking. Four chains ("VAR A = 123", "VAR B = VAR A", ...) of five names; each question asks for all
  names that have a chain's value.
- ``cwe``: common words. The document is a numbered list of words; the ten most frequent ones are asked for.

The text around the facts is ``filler`` (five sentences over and over), ``prose`` (a small grammar), or ``dense``: more
sentences of the same kind as the facts (RULER's hardest multi-key needles), which exposes a policy that merely keeps
tokens unlike their surroundings. The list of ``cwe`` has no text around it and counts as dense.

The first three tasks in filler and prose are those of `kvshelf.samples.tasks`, from which the bundled model
learned. Equal arguments give equal documents; every document has a generator of its own.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, repeat
from typing import Final, Literal, get_args

from kvshelf.errors import InvalidRequest
from kvshelf.samples import tasks
from kvshelf.samples import vocabulary as words
from kvshelf.samples.tasks import CountTokens, Fact, haystack_pieces, spread

TaskName = Literal["needle", "multikey", "words", "digits32", "digits64", "multivalue", "multiquery", "vt", "cwe"]
HaystackName = Literal["filler", "prose", "dense"]

TASK_NAMES: Final[tuple[TaskName, ...]] = get_args(TaskName)
HAYSTACK_NAMES: Final[tuple[HaystackName, ...]] = get_args(HaystackName)

VALUES_AT_ONCE: Final = 4
CHAINS: Final = 4
CHAIN_NAMES: Final = 5
COMMON_WORDS: Final = 10
COMMON_TO_UNCOMMON: Final = 6
"""How many times as often a common word of ``cwe`` stands in its list as an uncommon word."""


@dataclass(frozen=True)
class CaseAsk:
    """A question, and the texts that its answer must hold. `by_place`: one number, scored digit by digit."""

    text: str
    references: tuple[str, ...]
    by_place: bool = False


@dataclass(frozen=True)
class Case:
    """A document, and the questions about it in random order, which must stay unknown to its compression."""

    text: str
    asks: tuple[CaseAsk, ...]


@dataclass(frozen=True)
class _Draft:
    """The sentences and questions of a task. `more`: endless sentences of the same kind about other things."""

    sentences: list[str]
    asks: list[CaseAsk]
    more: Iterator[str]
    things: list[str] = field(default_factory=list)
    in_order: bool = False


LESSON_SEED: Final = 1_000_000_000
"""Evaluation seeds are far below: gates are not measured on documents that they learned from."""

LESSONS: Final[tuple[tuple[TaskName, HaystackName], ...]] = (
    ("multikey", "prose"), ("needle", "filler"), ("words", "prose"), ("multikey", "filler"), ("needle", "prose"),
)  # fmt: skip
HELD_OUT: Final[tuple[tuple[TaskName, HaystackName], ...]] = (
    ("multikey", "dense"), ("digits64", "prose"), ("multivalue", "dense"), ("vt", "filler"),
)  # fmt: skip
"""Kinds of documents that gates learn from, and others on which `kvshelf train-gates` judges them."""


def lesson_case(number: int, seed: int, num_tokens: int, count_tokens: CountTokens, *, questions: int) -> Case:
    """A document for `kvshelf train-gates`, by its number; those below 0 are of the held-out kinds."""
    kinds = LESSONS if number >= 0 else HELD_OUT
    task, haystack = kinds[number % len(kinds)]
    return make_case(task, haystack, num_tokens, LESSON_SEED * (1 + seed) + number, count_tokens, questions=questions)


def fits(task: TaskName, haystack: HaystackName) -> bool:
    """Whether the task exists in that haystack: the list of words has no text around it."""
    return task != "cwe" or haystack == "dense"


def make_case(
    task: TaskName, haystack: HaystackName, num_tokens: int, seed: int, count_tokens: CountTokens, *, questions: int = 4
) -> Case:
    """Make one document of at most `num_tokens` tokens and at most `questions` questions about it.

    `count_tokens` counts the tokens of a text without special tokens. Raises `InvalidRequest` where the facts alone are
    longer than `num_tokens`.
    """
    try:
        if task == "cwe":
            case = _common_words(random.Random(f"cwe/{num_tokens}/{seed}"), num_tokens, count_tokens)
        elif haystack != "dense" and task in tasks.TASKS:
            document = tasks.make_document(task, haystack, num_tokens, seed, count_tokens)
            asks = (CaseAsk(question.text, (question.answer,), task == "digits32") for question in document.questions)
            case = Case(document.text, tuple(asks))
        else:
            case = _drafted(task, haystack, num_tokens, seed, count_tokens)
    except ValueError as error:
        raise InvalidRequest(
            f"task {task!r} at {num_tokens} tokens: {error}; ask for more tokens", param="lengths"
        ) from error
    return Case(case.text, case.asks[:questions])


def _drafted(task: TaskName, haystack: HaystackName, num_tokens: int, seed: int, count_tokens: CountTokens) -> Case:
    rng = random.Random(f"{task}/{haystack}/{num_tokens}/{seed}")
    draft = _DRAFTS[task](rng)
    if haystack == "dense":
        pieces: Iterator[str] = (" " + sentence for sentence in draft.more)
    else:
        pieces = haystack_pieces(rng, haystack, draft.things)
    text = spread(rng, draft.sentences, pieces, num_tokens, count_tokens, in_order=draft.in_order)
    rng.shuffle(draft.asks)
    return Case(text, tuple(draft.asks))


def _single_values(num_facts: int, digits: int | None = None) -> Callable[[random.Random], _Draft]:
    """Facts with one value each, of `digits` digits or of three to nine, or two words for 0; a question about each."""

    def draft(rng: random.Random) -> _Draft:
        drawn = tasks.distinct_facts(rng, _lengths(rng, digits))
        facts = list(islice(drawn, num_facts))
        asks = []
        for fact in facts:
            question = fact.question(rng)
            asks.append(CaseAsk(question.text, (question.answer,), by_place=bool(digits)))
        return _Draft(list(_stated(rng, facts)), asks, _stated(rng, drawn), [fact.thing for fact in facts])

    return draft


def _multivalue(rng: random.Random) -> _Draft:
    groups = _groups(tasks.distinct_facts(rng, _lengths(rng)))
    group = next(groups)
    question = rng.choice(words.ALL_VALUES_PATTERNS).format(a=group[0].attribute, e=group[0].thing)
    ask = CaseAsk(question, tuple(fact.value for fact in group))
    return _Draft(list(_stated(rng, group)), [ask], _stated(rng, chain.from_iterable(groups)), [group[0].thing])


def _multiquery(rng: random.Random) -> _Draft:
    drawn = tasks.distinct_facts(rng, _lengths(rng))
    facts = list(islice(drawn, tasks.MULTIKEY_FACTS))
    asks = []
    for first in range(0, len(facts), VALUES_AT_ONCE):
        group = facts[first : first + VALUES_AT_ONCE]
        *most, last = (f"the {fact.attribute} of {fact.thing}" for fact in group)
        question = rng.choice(words.SEVERAL_THINGS_PATTERNS).format(list=f"{', '.join(most)} and {last}")
        asks.append(CaseAsk(question, tuple(fact.value for fact in group)))
    return _Draft(list(_stated(rng, facts)), asks, _stated(rng, drawn), [fact.thing for fact in facts])


def _variable_tracking(rng: random.Random) -> _Draft:
    """Each question asks for a chain's names. Assignments keep their order, as each builds on an earlier one."""
    chains = _chains(rng)
    asked_chains = list(islice(chains, CHAINS))
    asks = [CaseAsk(words.VARIABLES_QUESTION.format(v=value), tuple(names)) for value, names in asked_chains]
    more = chain.from_iterable(_woven(rng, list(islice(chains, CHAINS))) for _ in count())
    return _Draft(_woven(rng, asked_chains), asks, more, in_order=True)


_DRAFTS: Final[dict[TaskName, Callable[[random.Random], _Draft]]] = {
    "needle": _single_values(1),
    "multikey": _single_values(tasks.MULTIKEY_FACTS),
    "words": _single_values(tasks.MULTIKEY_FACTS, digits=0),
    "digits32": _single_values(1, digits=32),
    "digits64": _single_values(1, digits=64),
    "multivalue": _multivalue,
    "multiquery": _multiquery,
    "vt": _variable_tracking,
}


def _common_words(rng: random.Random, num_tokens: int, count_tokens: CountTokens) -> Case:
    """A numbered list in which ten words stand six times as often as all others."""
    pool = _plain_words()
    rng.shuffle(pool)
    common, uncommon = pool[:COMMON_WORDS], pool[COMMON_WORDS:]
    items = _items_that_fit(pool, num_tokens, count_tokens)
    # Words recur often enough for the uncommon words to fill the list.
    times = -(-items // (len(uncommon) + COMMON_WORDS * COMMON_TO_UNCOMMON))
    repeats = times * COMMON_TO_UNCOMMON
    others = (items - COMMON_WORDS * repeats) // times
    if others < COMMON_WORDS:
        raise ValueError(f"only {items} words fit")
    listed = [word for word in common for _ in range(repeats)]
    listed += [word for word in uncommon[:others] for _ in range(times)]
    rng.shuffle(listed)
    text = " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
    return Case(text, (CaseAsk(words.COMMON_WORDS_QUESTION.format(n=COMMON_WORDS), tuple(common)),))


def _items_that_fit(pool: Sequence[str], num_tokens: int, count_tokens: CountTokens) -> int:
    """A number of list items within `num_tokens`, whichever words of `pool` are listed."""
    widest = max(count_tokens(f" {word}") for word in pool)
    items = number = 0
    room = num_tokens
    while room >= 0:
        items, number = number, number + 1
        room -= count_tokens(f" {number}.") + widest
    return items


def _plain_words() -> list[str]:
    """Every single lower-case word of the vocabulary, in alphabetical order."""
    lists = [words.ADJECTIVES, words.CREATURES, words.PAPERS, *words.SLOTS.values()]
    return sorted({word for entries in lists for word in entries if word.isalpha() and word.islower()})


def _lengths(rng: random.Random, digits: int | None = None) -> Iterator[int]:
    return repeat(digits) if digits is not None else iter(lambda: rng.randint(*tasks.SHORT_VALUE_DIGITS), None)


def _stated(rng: random.Random, facts: Iterable[Fact]) -> Iterator[str]:
    return (fact.sentence(rng) for fact in facts)


def _groups(facts: Iterator[Fact]) -> Iterator[list[Fact]]:
    """Four facts at a time, all with the thing and the attribute of the first."""
    while True:
        first, *rest = islice(facts, VALUES_AT_ONCE)
        yield [first, *(Fact(first.attribute, first.thing, fact.value) for fact in rest)]


def _chains(rng: random.Random) -> Iterator[tuple[str, list[str]]]:
    """A value, and the names that get it in turn; no value and no name recurs."""
    drawn_before: set[str] = set()

    def fresh(draw: Callable[[], str]) -> str:
        drawn = draw()
        while drawn in drawn_before:
            drawn = draw()
        drawn_before.add(drawn)
        return drawn

    while True:
        value = fresh(lambda: str(rng.randint(10_000, 99_999)))
        yield value, [fresh(lambda: "".join(rng.choices(string.ascii_uppercase, k=5))) for _ in range(CHAIN_NAMES)]


def _woven(rng: random.Random, chains: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The assignments of several chains as sentences in one random order that keeps each chain's own."""
    turns = [index for index, (_, names) in enumerate(chains) for _ in names]
    rng.shuffle(turns)
    assigned = [0] * len(chains)
    sentences = []
    for turn in turns:
        value, names = chains[turn]
        at = assigned[turn]
        assigned[turn] += 1
        sentences.append(f"VAR {names[at]} = {f'VAR {names[at - 1]}' if at else value}.")
    return sentences


@dataclass(frozen=True)
class AnswerScore:
    """`partial` lies between 0 and 1; `exact` says that every reference was found."""

    exact: bool
    partial: float


def score(ask: CaseAsk, answer: str) -> AnswerScore:
    """Count the references that stand in `answer`, ignoring its other text and upper or lower case (after RULER).

    Unlike RULER's, a reference counts only as a word of its own: values here have three to nine digits, and a short one
    would too easily be found inside a longer, wrong one. A single long number is scored in part by its digits.
    """
    words_of_their_own = (rf"(?<!\w){re.escape(reference)}(?!\w)" for reference in ask.references)
    hits = sum(re.search(pattern, answer, re.IGNORECASE) is not None for pattern in words_of_their_own)
    share = hits / len(ask.references)
    if ask.by_place:
        share = max(share, digits_at_place(ask.references[0], answer))
    return AnswerScore(hits == len(ask.references), share)


def digits_at_place(reference: str, answer: str) -> float:
    """Share of the digits of `reference` that the longest number in `answer` has at the same place."""
    longest: str = max(re.findall(r"\d+", answer), key=len, default="")
    right: int = sum(a == b for a, b in zip(reference, longest, strict=False))
    return right / len(reference)
