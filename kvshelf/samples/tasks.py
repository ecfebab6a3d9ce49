"""Documents with facts to find, and questions about them: the tasks that training and evaluation share.

The tasks follow RULER (Hsieh et al., 2024) and the passkey test (Mohtashami and Jaggi, 2023): facts of the form "the
access code of the amber falcon is 482913" stand somewhere in a long text that has nothing to do with them, and a
question asks for one value. An answer counts when it is exactly the value.

- ``needle``: one fact (RULER's single needle).
- ``multikey``: sixteen facts about sixteen things; any of them may be asked for (RULER's multi-key needles).
- ``digits32``: one fact whose value has 32 digits, so that eleven or more tokens in a row must be right.

The text around the facts, the haystack, is either ``filler`` (the five sentences of the passkey test, over and over)
or ``prose`` (sentences of a small grammar: contracts, manuals, logs and chronicles, with names, dates and numbers of
their own).

Everything is drawn from one seeded generator: equal arguments give equal documents.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from kvshelf.samples import vocabulary as words

if TYPE_CHECKING:
    from kvshelf.training.head_search import Needle

Task = Literal["needle", "multikey", "digits32"]
Haystack = Literal["filler", "prose"]
CountTokens = Callable[[str], int]

TASKS: Final[tuple[Task, ...]] = get_args(Task)
HAYSTACKS: Final[tuple[Haystack, ...]] = get_args(Haystack)
MULTIKEY_FACTS: Final = 16
LONG_VALUE_DIGITS: Final = 32
SHORT_VALUE_DIGITS: Final = (3, 9)
CALIBRATION_SEED: Final = "calibration"
"""Evaluation seeds are numbers, so this is none: heads are not evaluated on the documents that selected them."""

SAMPLE_SEED: Final = "sample/11"
SAMPLE_WORDS: Final = 3480

_SLOT: Final = re.compile(r"\{(\w+)\}")
_BREAK: Final = re.compile(r"\n\n\s+")
_SENTENCES_PER_PARAGRAPH: Final = (3, 8)
_HEADING_SHARE: Final = 0.25
_MENTION_SHARE: Final = 0.04
_FACT_AT_EDGE_SHARE: Final = 0.1


@dataclass(frozen=True)
class Question:
    """A question about a document, and the one answer that is right."""

    text: str
    answer: str


@dataclass(frozen=True)
class Fact:
    """One thing's attribute and its value: "the access code" of "the amber falcon" is "482913"."""

    attribute: str
    thing: str
    value: str

    def sentence(self, rng: random.Random) -> str:
        """State the fact in one of several wordings; the value always follows the thing."""
        return _capitalised(_filled(rng.choice(words.FACT_PATTERNS), self))

    def question(self, rng: random.Random) -> Question:
        """Ask for the value in one of several wordings, chosen without looking at the sentence's."""
        return Question(_filled(rng.choice(words.QUESTION_PATTERNS), self), self.value)


@dataclass(frozen=True)
class TaskDocument:
    """A document and its questions, one per fact, in random order."""

    text: str
    questions: list[Question]


def make_document(
    task: Task, haystack: Haystack, num_tokens: int, seed: int, count_tokens: CountTokens
) -> TaskDocument:
    """Make the document of a task: as many sentences as fit into `num_tokens`, never more.

    `count_tokens` counts the tokens of a text without special tokens; only its sums matter, so any tokenizer will do.
    Raises ValueError when the facts alone are longer than `num_tokens`.
    """
    rng = random.Random(f"{task}/{haystack}/{num_tokens}/{seed}")
    num_facts = MULTIKEY_FACTS if task == "multikey" else 1
    long = task == "digits32"
    facts = make_facts(rng, [LONG_VALUE_DIGITS if long else rng.randint(*SHORT_VALUE_DIGITS) for _ in range(num_facts)])
    return write_document(rng, facts, haystack, num_tokens, count_tokens)


def make_facts(rng: random.Random, digits: Sequence[int]) -> list[Fact]:
    """Draw a fact per entry of `digits`: that many digits, or two words for 0. No thing and no value occurs twice."""
    return list(distinct_facts(rng, digits))


def distinct_facts(rng: random.Random, digits: Iterable[int]) -> Iterator[Fact]:
    """The facts of `make_facts`, drawn lazily: `digits` may be endless."""
    things: set[str] = set()
    values: set[str] = set()
    for length in digits:
        value, thing = _value(rng, length), _thing(rng)
        while thing in things or value in values:
            value, thing = _value(rng, length), _thing(rng)
        values.add(value)
        things.add(thing)
        yield Fact(rng.choice(words.ATTRIBUTES if length else words.WORD_ATTRIBUTES), thing, value)


def write_document(
    rng: random.Random, facts: Sequence[Fact], haystack: Haystack, num_tokens: int, count_tokens: CountTokens
) -> TaskDocument:
    """Spread `facts` through a haystack of at most `num_tokens` tokens and ask one question about each.

    In one document of ten, the first or the last sentence is a fact.
    """
    sentences = [fact.sentence(rng) for fact in facts]
    hay = haystack_pieces(rng, haystack, [fact.thing for fact in facts])
    text = spread(rng, sentences, hay, num_tokens, count_tokens)
    questions = [fact.question(rng) for fact in facts]
    rng.shuffle(questions)
    return TaskDocument(text, questions)


def haystack_pieces(rng: random.Random, haystack: Haystack, things: Sequence[str] = ()) -> Iterator[str]:
    """Sentences of a haystack without end, each with the space or line break before it; prose mentions `things`."""
    return _filler(rng) if haystack == "filler" else _prose(rng, things)


def spread(
    rng: random.Random,
    sentences: Sequence[str],
    pieces: Iterable[str],
    num_tokens: int,
    count_tokens: CountTokens,
    *,
    in_order: bool = False,
) -> str:
    """Put `sentences` at random places among as many `pieces` as fit into `num_tokens`; `in_order` keeps their order.

    Raises ValueError when the sentences alone are longer than `num_tokens`.
    """
    placed = [" " + sentence for sentence in sentences]
    room = num_tokens - sum(map(count_tokens, placed))
    hay: list[str] = []
    for piece in pieces:
        room -= count_tokens(piece)
        if room < 0:
            break
        hay.append(piece)
    gaps = _gaps(rng, len(placed), len(hay))
    if in_order:
        gaps.sort()
    text = _joined(hay, placed, gaps)
    while count_tokens(text) > num_tokens:  # the tokens of the pieces need not add up exactly
        if not hay:
            raise ValueError(f"{len(placed)} facts do not fit into {num_tokens} tokens")
        hay.pop()
        text = _joined(hay, placed, gaps)
    return text


def _gaps(rng: random.Random, num_facts: int, num_pieces: int) -> list[int]:
    """Choose how many pieces of the haystack stand before each fact: any number, and now and then none or all."""
    gaps = [rng.randint(0, num_pieces) for _ in range(num_facts)]
    if gaps and rng.random() < _FACT_AT_EDGE_SHARE:
        gaps[0] = rng.choice((0, num_pieces))
    return gaps


def _joined(hay: Sequence[str], facts: Sequence[str], gaps: Sequence[int]) -> str:
    """Put the facts into their gaps; every piece brings the space or line break before it."""
    at: dict[int, list[str]] = {}
    for fact, gap in zip(facts, gaps, strict=True):
        at.setdefault(min(gap, len(hay)), []).append(fact)
    pieces = [piece for i in range(len(hay) + 1) for piece in (*at.get(i, ()), *hay[i : i + 1])]
    return _BREAK.sub("\n\n", "".join(pieces)).strip()


def _filler(rng: random.Random) -> Iterator[str]:
    """The five sentences of the passkey test in order, without end, starting at a random one."""
    start = rng.randrange(len(words.FILLER))
    while True:
        yield " " + words.FILLER[start % len(words.FILLER)]
        start += 1


def _prose(rng: random.Random, things: Sequence[str]) -> Iterator[str]:
    """Paragraphs of one or two kinds of text without end, with headings, and with `things` mentioned now and then."""
    patterns = [p for kind in rng.sample(sorted(words.PROSE), rng.randint(1, 2)) for p in words.PROSE[kind]]
    while True:
        if rng.random() < _HEADING_SHARE:
            yield f"\n\n{written(rng, rng.choice(words.HEADINGS))}\n\n"
        for i in range(rng.randint(*_SENTENCES_PER_PARAGRAPH)):
            if things and rng.random() < _MENTION_SHARE:
                sentence = written(rng, rng.choice(words.MENTIONS), rng.choice(things))
            else:
                sentence = written(rng, rng.choice(patterns))
            yield (" " if i else "\n\n") + sentence


def written(rng: random.Random, pattern: str, thing: str = "", slots: Mapping[str, Sequence[str]] = words.SLOTS) -> str:
    """Fill every slot of a prose pattern on its own, so that two uses of a slot differ. slots: what to draw from."""

    def fill(slot: re.Match[str]) -> str:
        match slot[1]:
            case "e":
                return thing
            case "n":
                return str(rng.randint(1, rng.choice((12, 60, 999))))
            case "year":
                return str(rng.randint(1780, 2049))
            case "name":
                return rng.choice(words.FIRST_NAMES) + rng.choice(("", " " + rng.choice(words.LAST_NAMES)))
            case "place":
                return rng.choice(words.PLACE_NAMES) + rng.choice(("", " " + rng.choice(words.PLACE_KINDS)))
            case "thing":
                return _thing(rng)
            case name:
                return rng.choice(slots[name])

    return _capitalised(_SLOT.sub(fill, pattern))


def _thing(rng: random.Random) -> str:
    """Name something that a fact can be about: an emblem, a person, a place, a project, a unit or a paper."""
    forms = (
        ("the {} {}", words.ADJECTIVES, words.CREATURES),
        ("{} {}", words.FIRST_NAMES, words.LAST_NAMES),
        ("{} {}", words.PLACE_NAMES, words.PLACE_KINDS),
        ("project {} {}", words.ADJECTIVES, words.CREATURES),
        ("unit {} {}", words.UNIT_LETTERS, words.UNIT_NUMBERS),
        ("the {} {}", words.LAST_NAMES, words.PAPERS),
    )
    form, first, second = rng.choice(forms)
    return form.format(rng.choice(first), rng.choice(second))


def _value(rng: random.Random, digits: int) -> str:
    """Draw a number of exactly that many digits, the first of which is not 0; for no digits, two words."""
    if not digits:
        return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.CREATURES)}"
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def _filled(pattern: str, fact: Fact) -> str:
    return pattern.format(a=fact.attribute, e=fact.thing, v=fact.value)


def _capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def sample() -> TaskDocument:
    """The document of `kvshelf sample` and `kvshelf demo`: prose of 4,068 tokens of kvshelf-tiny with six facts.

    README and docs ask for the first one.
    """
    rng = random.Random(SAMPLE_SEED)
    facts = [Fact("access code", "the amber falcon", "482913"), *make_facts(rng, (4, 9, 3, 6, 5))]
    return write_document(rng, facts, "prose", SAMPLE_WORDS, lambda text: len(text.split()))


def haystacks(documents: int, num_tokens: int, count_tokens: CountTokens) -> Iterator[str]:
    """Prose without facts for `kvshelf calibrate`, at most `num_tokens` tokens each."""
    for index in range(documents):
        rng = random.Random(f"{CALIBRATION_SEED}/prose/{num_tokens}/{index}")
        yield spread(rng, [], haystack_pieces(rng, "prose"), num_tokens, count_tokens)


def needles(documents: int, num_tokens: int, count_tokens: CountTokens) -> Iterator[Needle]:
    """Needles for `kvshelf calibrate`: one sentence per document of at most `num_tokens` tokens, in both haystacks."""
    from kvshelf.training.head_search import Needle  # needs torch, which documents do not

    for index in range(documents):
        haystack = HAYSTACKS[index % len(HAYSTACKS)]
        rng = random.Random(f"{CALIBRATION_SEED}/{haystack}/{num_tokens}/{index}")
        [fact] = make_facts(rng, [rng.randint(*SHORT_VALUE_DIGITS)])
        sentence = fact.sentence(rng)
        text = spread(rng, [sentence], haystack_pieces(rng, haystack, [fact.thing]), num_tokens, count_tokens)
        start = text.index(sentence)
        yield Needle(haystack, text, start, start + len(sentence), fact.question(rng).text)
