"""Caches of episodes beside one cache of as many bytes, on generated conversations: docs/internals/answers.md has the
numbers.

    python -m scripts.measure_episodes

Right answers of all questions, and how often the router finds the episode whose windows hold the fact: by words, as
kvshelf does, by weighed sums of the model's input embeddings, and by means of its last hidden states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from conversations import Conversation, make_conversation
from numpy.typing import NDArray

from kvshelf import CompressedCache, Engine
from kvshelf.engine.episodes import UTTERANCES, kmeans, windows_of
from kvshelf_bench.measure import wilson
from kvshelf_bench.quality.retrieval import counter

TOKENS = 2048
TOPICS = 4
CONVERSATIONS = 8
CHUNK = 512
REMOVED = (0.75, 0.5)
ALONE: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "kvzip": {"policy": "kvzip"},
    "kvzip in chunks": {"policy": "kvzip", "prefill": "chunked", "chunk": CHUNK},
    "snapkv": {"policy": "snapkv"},
    "keydiff": {"policy": "keydiff"},
}

Vector = NDArray[np.float64]


def right(engine: Engine, conversation: Conversation, caches: Sequence[CompressedCache]) -> list[bool]:
    """Whether each question of a conversation is answered by its cache."""
    questions = [question for _, question in conversation.questions]
    pairs = [(cache, question.text) for cache, question in zip(caches, questions, strict=True)]
    longest = max(len(question.answer) for question in questions) + 8
    answers = engine.answer_all(pairs, max_new_tokens=longest)
    return [answer.text.strip() == question.answer for answer, question in zip(answers, questions, strict=True)]


def print_row(name: str, hits: Sequence[Sequence[bool]], nbytes: Sequence[int]) -> None:
    every = [hit for of_conversation in hits for hit in of_conversation]
    low, high = wilson(sum(every), len(every))
    mean = sum(nbytes) / len(nbytes) / 1e6
    print(f"  {name}: {sum(every)} of {len(every)} ({low:.0%} to {high:.0%}), {mean:.2f} MB", flush=True)


def quality(engine: Engine, conversations: Sequence[Conversation], removed: float) -> None:
    """One cache, then episodes that take as many bytes together."""
    print(f"{removed:.0%} removed by one cache:", flush=True)
    for name, options in ALONE.items():
        ratio = None if name == "full" else removed
        caches = [
            engine.compress(conversation.text, compression_ratio=ratio, **options) for conversation in conversations
        ]
        hits = [
            right(engine, conversation, [cache] * len(conversation.questions))
            for conversation, cache in zip(conversations, caches, strict=True)
        ]
        print_row(name, hits, [cache.nbytes for cache in caches])
    for count in (1, TOPICS):
        share = 1 - (1 - removed) / count
        sets = [
            engine.episodes(conversation.text, count, compression_ratio=share, chunk=CHUNK)
            for conversation in conversations
        ]
        nbytes = [sum(cache.nbytes for cache in caches) for caches in sets]
        routed, known = [], []
        for conversation, caches in zip(conversations, sets, strict=True):
            params = [cache.identity.policy_params for cache in caches]
            places = [
                engine.asker.nearest(params, question.text) if count > 1 else 0
                for _, question in conversation.questions
            ]
            routed.append(right(engine, conversation, [caches[place] for place in places]))
            known.append(
                right(
                    engine,
                    conversation,
                    [caches[episode_of(engine, conversation, at, count)] for at, _ in conversation.questions],
                )
            )
        print_row(f"{count} episodes, routed", routed, nbytes)
        if count > 1:
            print_row(f"{count} episodes, always the one that has the fact", known, nbytes)


def episode_of(engine: Engine, conversation: Conversation, at: int, count: int) -> int:
    """The episode whose windows hold utterance `at`."""
    episodes = engine.compressor.episodes(conversation.text, count)
    return next(number for number, one in enumerate(episodes) if at // UTTERANCES in one.windows)


def routes(engine: Engine, topics: int, tokens: int, conversations: int) -> None:
    words, embedded, hidden, questions = 0, 0, 0, 0
    for seed in range(conversations):
        conversation = make_conversation(topics, tokens, seed, counter(engine))
        params = [{"centroid": one.centroid} for one in engine.compressor.episodes(conversation.text, topics)]
        for at, question in conversation.questions:
            words += engine.asker.nearest(params, question.text) == episode_of(engine, conversation, at, topics)
        embedded += by_vectors(conversation, topics, embeddings(engine, conversation))
        hidden += by_vectors(conversation, topics, lambda text: mean_hidden(engine, text))
        questions += len(conversation.questions)
    print(
        f"router, {topics} topics, {tokens} tokens: {words / questions:.0%} of {questions} by words, "
        f"{embedded / questions:.0%} by input embeddings, {hidden / questions:.0%} by last hidden states",
        flush=True,
    )


def by_vectors(conversation: Conversation, topics: int, vector: Callable[[str], Vector]) -> int:
    """Questions whose episode is found by these vectors, those of windows less their mean."""
    points = np.stack([vector(window) for window in windows_of(conversation.utterances)])
    points = points - points.mean(axis=0)
    clusters = kmeans(points / np.linalg.norm(points, axis=1, keepdims=True), topics)
    scores = [clusters.centroids @ vector(question.text) for _, question in conversation.questions]
    places = [at // UTTERANCES for at, _ in conversation.questions]
    return sum(place in clusters.members[int(of.argmax())] for place, of in zip(places, scores, strict=True))


def embeddings(engine: Engine, conversation: Conversation) -> Callable[[str], Vector]:
    """Sums of the input embeddings of distinct tokens, weighed as `episodes` weighs them; of tokens that no window has,
    by nothing."""
    encode, windows = engine.encoder.require_text("text").encode, windows_of(conversation.utterances)
    having = Counter(token for window in windows for token in set(encode(window)))
    with torch.no_grad():
        table = engine.model.get_input_embeddings()(torch.arange(engine.model.config.vocab_size)).double().numpy()
    table = table - table.mean(axis=0)

    def vector(text: str) -> Vector:
        ids = sorted(having.keys() & set(encode(text)))
        weights = np.log([len(windows) / having[token] for token in ids])
        return weights @ table[ids]

    return vector


def mean_hidden(engine: Engine, text: str) -> Vector:
    ids = torch.tensor([engine.encoder.require_text("text").encode(text)])
    with torch.no_grad():
        return engine.model.base_model(input_ids=ids).last_hidden_state[0].double().mean(dim=0).numpy()


def main() -> None:
    engine = Engine.load("kvshelf-tiny")
    made = [make_conversation(TOPICS, TOKENS, seed, counter(engine)) for seed in range(CONVERSATIONS)]
    for topics, tokens, conversations in ((4, 2048, 12), (8, 4096, 6), (4, 8192, 6)):
        routes(engine, topics, tokens, conversations)
    for removed in REMOVED:
        quality(engine, made, removed)


if __name__ == "__main__":
    main()
