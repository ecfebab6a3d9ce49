"""Long conversations about several topics, with facts to find: tasks for caches of episodes.

Each topic has a kind of prose and a few things of its own, which its utterances mention. The conversation turns from
topic to topic in stretches and comes back to each, as one over weeks does. A fact about a thing stands in an utterance
of its topic, and a question asks for its value, as in `tasks`. Equal arguments give equal conversations.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final

from kvshelf.samples import vocabulary as words
from kvshelf.samples.tasks import SHORT_VALUE_DIGITS, CountTokens, Fact, Question, make_facts, written

_THINGS: Final = 4
"""Of a topic, one fact each."""

_WORDS: Final = 3
"""Of a topic, for each slot of its prose."""

_STRETCH: Final = (4, 8)
_SENTENCES: Final = (1, 3)
_MENTION_SHARE: Final = 0.75
"""Of utterances that mention a thing of their topic."""


@dataclass(frozen=True)
class Conversation:
    """utterances: in time order. questions: each with the number of the utterance that answers it."""

    utterances: Sequence[str]
    questions: Sequence[tuple[int, Question]]

    @property
    def text(self) -> str:
        """A paragraph for each utterance."""
        return "\n\n".join(self.utterances)


@dataclass(frozen=True)
class _Topic:
    facts: Sequence[Fact]
    patterns: Sequence[str]
    slots: Mapping[str, Sequence[str]]

    def utterance(self, rng: random.Random) -> str:
        patterns = rng.choices(self.patterns, k=rng.randint(*_SENTENCES))
        sentences = [written(rng, pattern, slots=self.slots) for pattern in patterns]
        if rng.random() < _MENTION_SHARE:
            thing = rng.choice(self.facts).thing
            sentences.append(written(rng, rng.choice(words.MENTIONS), thing, self.slots))
        return " ".join(sentences)


def make_conversation(topics: int, num_tokens: int, seed: int, count_tokens: CountTokens) -> Conversation:
    """As many utterances as fit into `num_tokens`, about so many topics."""
    rng = random.Random(f"conversation/{topics}/{num_tokens}/{seed}")
    facts = make_facts(rng, [rng.randint(*SHORT_VALUE_DIGITS) for _ in range(topics * _THINGS)])
    kinds = rng.sample(sorted(words.PROSE), len(words.PROSE))
    about = [
        _Topic(facts[topic::topics], words.PROSE[kinds[topic % len(kinds)]], _own_words(rng)) for topic in range(topics)
    ]
    sentences = [(fact, fact.sentence(rng)) for fact in facts]
    left = num_tokens - sum(count_tokens(" " + sentence) for _, sentence in sentences)
    utterances: list[tuple[_Topic, str]] = []
    for topic in cycle(about):
        for _ in range(rng.randint(*_STRETCH)):
            utterances.append((topic, topic.utterance(rng)))
            left -= count_tokens("\n\n" + utterances[-1][1])
            if left < 0:
                return _conversation(rng, utterances[:-1], sentences)
    raise AssertionError("topics never end")


def _own_words(rng: random.Random) -> dict[str, Sequence[str]]:
    """What a topic fills the slots of its prose with."""
    return {name: rng.sample(choices, min(_WORDS, len(choices))) for name, choices in words.SLOTS.items()}


def _conversation(
    rng: random.Random, said: Sequence[tuple[_Topic, str]], sentences: Sequence[tuple[Fact, str]]
) -> Conversation:
    """Each fact at the end of an utterance of its topic, no two at one."""
    utterances = [utterance for _, utterance in said]
    free = set(range(len(said)))
    questions = []
    for fact, sentence in sentences:
        place = rng.choice([place for place in sorted(free) if fact in said[place][0].facts])
        free.remove(place)
        utterances[place] += " " + sentence
        questions.append((place, fact.question(rng)))
    return Conversation(utterances, questions)
