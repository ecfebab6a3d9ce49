"""Episodes of a long conversation: stretches that are about one thing, found by clustering (EpiCache, Kim et al., 2025,
arXiv 2509.17396, section 3.2).

A conversation is cut into windows of four utterances. Windows become vectors, k-means makes clusters of them, and the
windows nearest a cluster's centroid, in time order, are the text of an episode. Policy `epicache` keeps what this text
attends to.

Departures: no embedding model is loaded. The vector of a text is the sum of the model's input embeddings of its
distinct tokens, each weighed by how few windows have it: it finds shared words, not paraphrases.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float64]

UTTERANCES: Final = 4
"""Of a window."""

WINDOWS: Final = 4
"""Of an episode's text."""

_SEED: Final = 42
_STARTS: Final = 10
_MOST_STEPS: Final = 300
_SENTENCE: Final = re.compile(r"(?<=[.?!])\s+|(?<=[。？！])|\n+")  # noqa: RUF001  the full-width ones are meant


@dataclass(frozen=True)
class Clusters:
    """centroids: `[count, channels]` fp64. members: of each cluster its points, the nearest to the centroid first."""

    centroids: Vectors
    members: tuple[tuple[int, ...], ...]


def kmeans(points: Vectors, count: int) -> Clusters:
    """Lloyd's k-means from k-means++ (Arthur and Vassilvitskii 2007), the best of ten starts from a fixed seed.

    points: `[n, channels]`, of which at least `count` differ. No cluster is empty.
    """
    rng = np.random.default_rng(_SEED)
    tried = [_lloyd(points, _plus_plus(points, count, rng)) for _ in range(_STARTS)]
    centroids, labels, _ = min(tried, key=lambda found: found[2])  # of equal ones the first
    distances = ((points - centroids[labels]) ** 2).sum(axis=1)
    order = np.argsort(distances, kind="stable")
    members = tuple(tuple(int(each) for each in order if labels[each] == label) for label in range(count))
    first = sorted(range(count), key=lambda label: min(members[label]))  # in time order
    return Clusters(centroids[first], tuple(members[label] for label in first))


def _plus_plus(points: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    """Points as first centroids, each with a chance that grows with its distance from those before."""
    chosen = [int(rng.integers(len(points)))]
    while len(chosen) < count:
        nearest = _distances(points, points[chosen]).min(axis=1)
        nearest[chosen] = 0.0  # whatever rounding left
        chosen.append(int(rng.choice(len(points), p=nearest / nearest.sum())))
    return points[chosen]


def _lloyd(points: Vectors, centroids: Vectors) -> tuple[Vectors, npt.NDArray[np.intp], float]:
    """Centroids, the label of each point, and the sum of squared distances."""
    labels = np.full(len(points), -1)
    for _ in range(_MOST_STEPS):
        distances = _distances(points, centroids)
        found = distances.argmin(axis=1)
        for label in np.setdiff1d(np.arange(len(centroids)), found):  # an empty cluster takes the farthest point
            farthest = int(np.where(np.bincount(found)[found] > 1, distances[np.arange(len(points)), found], -1).argmax())
            found[farthest] = label
        if np.array_equal(found, labels):
            break
        labels = found
        centroids = np.stack([points[labels == label].mean(axis=0) for label in range(len(centroids))])
    return centroids, labels, float(((points - centroids[labels]) ** 2).sum())


def _distances(points: Vectors, centroids: Vectors) -> Vectors:
    """Squared distances `[points, centroids]`."""
    return np.stack([((points - centroid) ** 2).sum(axis=1) for centroid in centroids], axis=1)
