"""Centroids of episodes as text, a parameter of policy `epicache`: they send a question to the nearest cache."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final

import numpy as np

from kvshelf.errors import InvalidRequest

MAX_CENTROID: Final = 512
"""Tokens of a centroid."""

_ENTRY: Final = np.dtype([("token", "<u4"), ("weight", "u1")])


def packed(weights: Mapping[int, float]) -> str:
    """A centroid as text: the largest of these positive weights of tokens, each as a byte in proportion to the largest.
    Base64 of pairs of a token id (4 bytes, little-endian) and a weight (1 byte), by ascending id."""
    largest = sorted(weights, key=lambda token: (-weights[token], token))[:MAX_CENTROID]
    scale = 255 / weights[largest[0]]
    entries = [(token, byte) for token in sorted(largest) if (byte := round(weights[token] * scale))]
    return base64.b64encode(np.array(entries, _ENTRY).tobytes()).decode()


def unpacked(centroid: str) -> dict[int, float]:
    """The weights of a text that `packed` wrote, as a vector of length 1. Raises `InvalidRequest` for another text."""
    try:
        entries = np.frombuffer(base64.b64decode(centroid, validate=True), _ENTRY)
    except (binascii.Error, ValueError):
        entries = np.array([], _ENTRY)
    tokens, weights = entries["token"], entries["weight"].astype(np.float64)
    if not 0 < len(entries) <= MAX_CENTROID or not weights.all() or not (tokens[1:] > tokens[:-1]).all():
        raise InvalidRequest(
            f"centroid is no centroid: base64 of 1 to {MAX_CENTROID} token ids (4 bytes) with weights (1 byte) in "
            "ascending order; a creation with `episodes` makes it",
            param="policy_params.centroid",
        )
    return dict(zip(tokens.tolist(), (weights / np.linalg.norm(weights)).tolist(), strict=True))
