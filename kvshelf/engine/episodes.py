"""Episodes of a long conversation, the clusters of its windows, and the router that sends a question to the nearest
(EpiCache, Kim et al., 2025, arXiv 2509.17396, section 3.2).

Departure: no embedding model is loaded. A window is the vector of its distinct tokens, weighed by inverse document
frequency, at length 1. It finds shared words, and no paraphrases. docs/internals/answers.md has the measurement that
rejected means of input embeddings and of last hidden states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from kvshelf.api.strict import MAX_EPISODES
from kvshelf.engine.inputs.encode import Document
from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies.base import MAX_PROBE_BYTES
from kvshelf.methods.policies.centroids import packed, unpacked
from kvshelf.model.templates.template import Message
from kvshelf.model.text import check_messages

Vectors = npt.NDArray[np.float64]

UTTERANCES: Final = 4
"""Of a window."""

WINDOWS: Final = 4
"""Of an episode's text."""

_SEED: Final = 42
_STARTS: Final = 10
_MOST_STEPS: Final = 300
_SENTENCE: Final = re.compile(r"(?<=[.?!])\s+|(?<=[。？！])|\n+")  # noqa: RUF001  the full-width ones are meant

_CHANNELS: Final = 1024
"""Of the vectors that are clustered. A token has one channel and one sign (feature hashing, Weinberger et al., 2009):
a channel for each token of a large vocabulary would take gigabytes for a long conversation."""


@dataclass(frozen=True)
class Episode:
    """text: of its nearest windows, in time order. centroid: as a parameter of policy `epicache`. windows: the numbers
    of all its windows, the nearest to the centroid first."""

    text: str
    centroid: str
    windows: tuple[int, ...]


def episodes_in(document: Document, count: int, encode: Callable[[str], Sequence[int]]) -> list[Episode]:
    """See `Compressor.episodes`. encode: gives the token ids of a text by itself."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_EPISODES:
        raise InvalidRequest(
            f"episodes.count is {count!r}; it must be from 1 to {MAX_EPISODES}", param="episodes.count"
        )
    windows = windows_of(_utterances(document, count))
    return _episodes(windows, [encode(window) for window in windows], count)


def windows_of(utterances: Sequence[str]) -> list[str]:
    """The texts of the windows. The last may have fewer utterances."""
    return ["\n\n".join(utterances[at : at + UTTERANCES]) for at in range(0, len(utterances), UTTERANCES)]


def nearest_episode(params: Sequence[Mapping[str, Any]], token_ids: Sequence[int]) -> int:
    """The number of the centroid that has the largest dot product with the question's tokens, each counted once; of
    equal ones the first. params: the policy parameters of each cache. Raises `InvalidRequest` for one cache alone, and
    for a cache that is of no episode."""
    require_several(len(params))
    for place, of_cache in enumerate(params):
        if not of_cache.get("centroid"):
            raise InvalidRequest(
                f"cache_ids[{place}] has no centroid: it was not made with `episodes`; leave route out to ask all "
                "together",
                param=f"cache_ids[{place}]",
            )
    distinct = sorted(set(token_ids))
    centroids = [unpacked(of_cache["centroid"]) for of_cache in params]
    scores = [sum(weights.get(token, 0.0) for token in distinct) for weights in centroids]
    return scores.index(max(scores))


def require_several(documents: int) -> None:
    if documents < 2:
        raise InvalidRequest("route chooses among several caches, and one was given; leave route out", param="route")


def _utterances(document: Document, count: int) -> list[str]:
    """The contents of messages. A text is cut at blank lines; where this gives less than `count` windows, into
    sentences."""
    if not isinstance(document, str):
        if not isinstance(document, Sequence) or not all(isinstance(message, Mapping) for message in document):
            raise InvalidRequest(
                "episodes are found in a text or in messages; token ids have neither", param="episodes"
            )
        return [message["content"] for message in check_messages(cast("Sequence[Message]", document))]
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", document) if part.strip()]
    if len(paragraphs) > (count - 1) * UTTERANCES:
        return paragraphs
    return [part.strip() for part in _SENTENCE.split(document) if part.strip()]


def _episodes(windows: Sequence[str], tokens: Sequence[Sequence[int]], count: int) -> list[Episode]:
    """`count` episodes, ordered by their first windows. tokens: the ids of each window."""
    distinct = len({tuple(sorted(set(ids))) for ids in tokens})
    if distinct < count:
        raise InvalidRequest(
            f"episodes.count is {count}, and the document has {distinct} different windows of {UTTERANCES} utterances; "
            "lower count, or compress the document as a whole",
            param="episodes.count",
        )
    ids, number, share = _shares(tokens)
    channel, sign = _hashed(ids)
    points = np.zeros((len(windows), _CHANNELS))
    np.add.at(points, (number, channel), share * sign)
    return [_episode(windows, members, ids, number, share) for members in kmeans(points, count).members]


def _shares(tokens: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Vectors]:
    """The distinct tokens of each window, one window after the other: their ids, the numbers of their windows, and
    their weights, of length 1 in each window. A window of nothing but common tokens weighs them alike."""
    distinct = [np.unique(np.asarray(window, np.int64)) for window in tokens]
    ids, number = np.concatenate(distinct), np.repeat(np.arange(len(distinct)), list(map(len, distinct)))
    _, place, frequency = np.unique(ids, return_inverse=True, return_counts=True)
    weights = np.log(len(distinct) / frequency)[place]
    weights += 1e-6  # of a token that all windows have
    norms = np.sqrt(np.bincount(number, weights**2, len(distinct)))
    return ids, number, weights / norms[number]


def _hashed(ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Vectors]:
    """The channel and the sign of each token: the finalizer of SplitMix64 (Steele et al., 2014)."""
    bits = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return (bits % np.uint64(_CHANNELS)).astype(np.int64), np.where(bits >> np.uint64(63), 1.0, -1.0)


def _episode(
    windows: Sequence[str],
    members: tuple[int, ...],
    ids: npt.NDArray[np.int64],
    number: npt.NDArray[np.int64],
    share: Vectors,
) -> Episode:
    """Its centroid has exact tokens in place of channels."""
    inside = np.isin(number, members)
    tokens, place = np.unique(ids[inside], return_inverse=True)
    weights = np.bincount(place, share[inside]) / len(members)
    centroid = packed(dict(zip(tokens.tolist(), weights.tolist(), strict=True)))
    return Episode(_text([windows[at] for at in members], members), centroid, members)


def _text(nearest_first: Sequence[str], members: Sequence[int]) -> str:
    """The nearest windows, as many as a probe has room for, in time order; at least the beginning of one."""
    chosen: list[tuple[int, str]] = []
    for at, window in list(zip(members, nearest_first, strict=True))[:WINDOWS]:
        if len("\n\n".join([window, *(text for _, text in chosen)]).encode()) > MAX_PROBE_BYTES:
            break
        chosen.append((at, window))
    if not chosen:
        return nearest_first[0].encode()[:MAX_PROBE_BYTES].decode(errors="ignore")
    return "\n\n".join(text for _, text in sorted(chosen))


@dataclass(frozen=True)
class Clusters:
    """centroids: `[count, channels]` fp64. members: of each cluster its points, the nearest to the centroid first."""

    centroids: Vectors
    members: tuple[tuple[int, ...], ...]


def kmeans(points: Vectors, count: int) -> Clusters:
    """Lloyd's k-means from k-means++ (Arthur and Vassilvitskii 2007), the best of ten starts from a fixed seed.

    points: `[n, channels]`, at least `count`. No cluster is empty.
    """
    rng = np.random.default_rng(_SEED)
    starts = [_lloyd(points, _plus_plus(points, count, rng)) for _ in range(_STARTS)]
    centroids, labels, _ = min(starts, key=lambda start: start[2])  # of equal ones the first
    distances = ((points - centroids[labels]) ** 2).sum(axis=1)
    order = np.argsort(distances, kind="stable")
    members = [tuple(order[labels[order] == label].tolist()) for label in range(count)]
    by_time = sorted(range(count), key=lambda label: min(members[label]))
    return Clusters(centroids[by_time], tuple(members[label] for label in by_time))


def _plus_plus(points: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    """Points as first centroids, each with a chance that grows with its distance from those before."""
    chosen = [int(rng.integers(len(points)))]
    while len(chosen) < count:
        nearest = _distances(points, points[chosen]).min(axis=1)
        nearest[chosen] = 0.0  # whatever rounding left
        if not nearest.any():  # different tokens may share a channel, and their windows a point
            nearest = np.ones(len(points))
            nearest[chosen] = 0.0
        chosen.append(int(rng.choice(len(points), p=nearest / nearest.sum())))
    return points[chosen]


def _lloyd(points: Vectors, centroids: Vectors) -> tuple[Vectors, npt.NDArray[np.intp], float]:
    """Centroids, the label of each point, and the sum of squared distances."""
    labels = np.full(len(points), -1)
    for _ in range(_MOST_STEPS):
        distances = _distances(points, centroids)
        nearest = distances.argmin(axis=1)
        for label in np.setdiff1d(np.arange(len(centroids)), nearest):  # an empty cluster takes the farthest point
            shared = np.bincount(nearest)[nearest] > 1
            nearest[np.where(shared, distances[np.arange(len(points)), nearest], -1).argmax()] = label
        if np.array_equal(nearest, labels):
            break
        labels = nearest
        centroids = np.stack([points[labels == label].mean(axis=0) for label in range(len(centroids))])
    return centroids, labels, float(((points - centroids[labels]) ** 2).sum())


def _distances(points: Vectors, centroids: Vectors) -> Vectors:
    """Squared distances `[points, centroids]`."""
    return np.stack([((points - centroid) ** 2).sum(axis=1) for centroid in centroids], axis=1)
