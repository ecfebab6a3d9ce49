"""Instructions of one document that a policy keeps, with and without `fair`: docs/internals/protect.md has the numbers.

    python -m scripts.measure_fair

An instruction states a value that a question asks for, and is obeyed where the answer is the value. `parts`: eight
parts of unlike length under headings, prose around one instruction each. `list`: sixteen numbered instructions, and
prose behind a heading. `conversation`: a system message around one, and a page of the user's prose. Of each policy:
instructions that are obeyed without and with `fair`; those that only one of the two obeys, by `fair` first; and the
share of the entries that stay of the instruction of each document that has fewest, over all layers and heads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from kvshelf import CompressedCache, Engine
from kvshelf.samples.tasks import Fact, Question, haystack_pieces, make_document, make_facts
from kvshelf_bench.quality.retrieval import counter

DOCUMENTS: Final = 16
PARTS: Final = 8
LISTED: Final = 16
SENTENCES: Final = (2, 12)
"""Of the prose of a part, at least and at most."""
PROSE: Final = 30
"""Sentences behind a list."""
REMOVED: Final = (0.5, 0.75)
POLICIES: Final = ("snapkv", "keydiff", "kvzip", "h2o")
SYSTEM_TOKENS: Final = 100
PAGE_TOKENS: Final = 800


@dataclass(frozen=True)
class Made:
    """A document, the instructions in it as they stand, and the question about each. by: its sections."""

    document: Any
    sentences: Sequence[str]
    questions: Sequence[Question]
    by: str = "section"


def facts(rng: random.Random, count: int) -> list[Fact]:
    return make_facts(rng, [rng.randint(3, 7) for _ in range(count)])


def parts(seed: int) -> Made:
    rng = random.Random(f"fair/{seed}")
    text, sentences, questions = [], [], []
    for number, fact in enumerate(facts(rng, PARTS), 1):
        prose = list(islice(haystack_pieces(rng, "prose"), rng.randint(*SENTENCES)))
        sentences.append(fact.sentence(rng))
        prose.insert(rng.randint(0, len(prose)), " " + sentences[-1])
        text.append(f"## Part {number}\n" + "".join(prose).strip())
        questions.append(fact.question(rng))
    return Made("\n\n".join(text), sentences, questions)


def listed(seed: int) -> Made:
    rng = random.Random(f"fair/list/{seed}")
    listed_facts = facts(rng, LISTED)
    sentences = [fact.sentence(rng) for fact in listed_facts]
    lines = [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
    prose = "".join(islice(haystack_pieces(rng, "prose"), PROSE)).strip()
    return Made("\n".join([*lines, "", "## Text", prose]), sentences, [fact.question(rng) for fact in listed_facts])


def conversation(engine: Engine, seed: int) -> Made:
    """That of the table of `protect`: the system message is one section, and the rest the other."""
    count = counter(engine)
    document = make_document("needle", "prose", SYSTEM_TOKENS, 90_000 + seed, count)
    prose = make_document("needle", "prose", PAGE_TOKENS, 91_000 + seed, count).text
    turns = [{"role": "system", "content": document.text}, {"role": "user", "content": prose}]
    end = engine.encode_document(turns, protect=["system"]).protect[0][1]
    return Made(turns, [document.text], document.questions, f"tokens:0-{end}")


def obeyed(engine: Engine, document: Made, cache: CompressedCache) -> list[bool]:
    asks = [(cache, question.text) for question in document.questions]
    longest = max(len(question.answer) for question in document.questions) + 8
    answers = engine.answer_all(asks, max_new_tokens=longest)
    return [answer.text.strip() == one.answer for answer, one in zip(answers, document.questions, strict=True)]


def least(engine: Engine, document: Made, cache: CompressedCache) -> float:
    """The share of the entries that stay of the instruction that has fewest."""
    shares = []
    heads = [set(head.tolist()) for layer in cache.reduced for head in layer.positions]
    for sentence in document.sentences:
        spans = engine.encode_document(document.document, protect=[f"text:{sentence}"]).protect
        places = {at for first, end in spans for at in range(first, end)}
        shares.append(sum(len(places & head) for head in heads) / (len(places) * len(heads)))
    return min(shares)


def row(engine: Engine, documents: Sequence[Made], policy: str, removed: float) -> str:
    hits: list[tuple[bool, bool]] = []
    fewest = [0.0, 0.0]
    for document in documents:
        ways: list[dict[str, Any]] = [{"policy": policy}, {"policy": "fair", "base": policy, "by": document.by}]
        caches = [engine.compress(document.document, compression_ratio=removed, **way) for way in ways]
        hits += zip(*(obeyed(engine, document, cache) for cache in caches), strict=True)
        fewest = [
            sum_ + least(engine, document, cache) / len(documents) for sum_, cache in zip(fewest, caches, strict=True)
        ]
    alone, fair = (sum(column) / len(hits) for column in zip(*hits, strict=True))
    only = [sum(hit == one for hit in hits) for one in ((False, True), (True, False))]
    return f"{alone:.0%} | {fair:.0%} | {only[0]}, {only[1]} | {fewest[0]:.0%} | {fewest[1]:.0%}"


def table(engine: Engine, name: str, documents: Sequence[Made]) -> None:
    full = [
        hit
        for document in documents
        for hit in obeyed(engine, document, engine.compress(document.document, policy="full"))
    ]
    tokens = [engine.prepare(document.document, policy="full").num_tokens for document in documents]
    print(f"\n{name}: {len(documents)} of {min(tokens)} to {max(tokens)} tokens; full obeys {sum(full)} of {len(full)}")
    print("| removed | policy | obeyed | with fair | only one | fewest kept | with fair |\n" + "|---" * 7 + "|")
    for removed in REMOVED:
        for policy in POLICIES:
            print(f"| {removed:.0%} | `{policy}` | {row(engine, documents, policy, removed)} |", flush=True)


def main() -> None:
    engine = Engine.load("kvshelf-tiny")
    table(engine, "parts", [parts(seed) for seed in range(DOCUMENTS)])
    table(engine, "list", [listed(seed) for seed in range(DOCUMENTS)])
    table(engine, "conversation", [conversation(engine, seed) for seed in range(DOCUMENTS)])


if __name__ == "__main__":
    main()
