"""What questions see of a document. A module of its own: sizes are computed without torch and msgpack."""

from __future__ import annotations


def tokens_seen(num_tokens: int, window: int | None, chunk: int | None) -> int:
    """How many of a document's tokens, its last ones, queries behind it see: those that a window leaves to the first of
    them, or the document's last chunk if it is not finished."""
    if chunk is not None:
        return num_tokens % chunk
    return num_tokens if window is None else min(num_tokens, window - 1)
