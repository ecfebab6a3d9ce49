"""Lower bounds of the tokens of texts, without encoding them as a whole: too long texts are refused before any work.

Encoding takes a second and 100 MB for each million characters. So a text that cannot fit into a model is refused by its
bytes, and a text that may fit is counted piece by piece until the answer is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from tokenizers import Tokenizer

from kvshelf.errors import InvalidRequest

PIECE: Final = 16_384
"""Characters that are encoded at once: 4 ms and 2 MB."""

ANY_BYTES: Final = 1024
"""Bytes of one token of a tokenizer whose tokens may stand for texts of any length, such as spaces that it drops or a
word that it does not know."""

_SHARE: Final = 8
"""A cut changes the tokens beside it, so one in so many of those that pieces have does not count."""

_WHOLE: Final = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "Sequence"}
"""Pre-tokenizers that drop no character."""

_COMPOSED: Final = 3
"""How many times shorter NFC may make a text: three jamo of three bytes are one syllable of three."""


@dataclass(frozen=True)
class TokenBound:
    """encode: the tokens of a text. token_bytes: UTF-8 bytes of text that one token stands for at most."""

    encode: Callable[[str], Sequence[int]]
    token_bytes: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, encode: Callable[[str], Sequence[int]]) -> Self:
        return cls(encode, _token_bytes(tokenizer))

    def least_by_bytes(self, texts: Iterable[str]) -> int:
        """A lower bound of the tokens of some texts together, of which none is made."""
        return sum(map(nbytes_of, texts)) // self.token_bytes

    def least(self, texts: Sequence[str], most: int) -> int:
        """A lower bound of the tokens of some texts together. It is above `most` where they exceed that by an eighth;
        then the rest of the texts is not encoded."""
        least = self.least_by_bytes(texts)
        if least > most or sum(map(nbytes_of, texts)) <= most:
            return least
        counted = 0
        for text in texts:
            for start in range(0, len(text), PIECE):
                counted += len(self.encode(text[start : start + PIECE]))
                least = max(least, counted - counted // _SHARE)
                if least > most:
                    return least
        return least


def nbytes_of(text: str) -> int:
    """UTF-8 bytes, without a copy of all of them at once. Raises `InvalidRequest` for what is no text."""
    try:
        return sum(len(text[start : start + PIECE].encode()) for start in range(0, len(text), PIECE))
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidRequest(
            f"a text holds {half!r}, half a surrogate pair, which is no character; replace it"
        ) from None


def _token_bytes(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token, if every byte of a text is in one of its tokens; else at least `ANY_BYTES`."""
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    if not _keeps_all(tokenizer):
        return max(longest, ANY_BYTES)
    return longest * _COMPOSED if _parts(tokenizer.normalizer, "normalizers", "NFC") else longest


def _keeps_all(tokenizer: Tokenizer) -> bool:
    split, normalizer = tokenizer.pre_tokenizer, tokenizer.normalizer
    bytes_are_tokens = _parts(split, "pretokenizers", "ByteLevel") or getattr(tokenizer.model, "byte_fallback", False)
    dropping = [part for part in _parts(split, "pretokenizers") if part["type"] not in _WHOLE]
    dropping += [part for part in _parts(split, "pretokenizers") if part.get("behavior") == "Removed"]
    shortening = [part for part in _parts(normalizer, "normalizers") if not _lengthens(part)]
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
    stripping = [token for token in added if token.lstrip or token.rstrip]
    return bool(bytes_are_tokens) and not dropping and not shortening and not stripping


def _lengthens(normalizer: dict[str, Any]) -> bool:
    """Whether a text has no fewer bytes after a normalizer, or under NFC no fewer than `_COMPOSED` allows."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(replaced.encode()) <= len(normalizer["content"].encode())
    return normalizer["type"] in ("NFC", "Prepend", "ByteLevel")


def _parts(component: Any, sequence: str, kind: str = "") -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, those of one kind if it is given."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    steps = state[sequence] if state["type"] == "Sequence" else [state]
    return [step for step in steps if kind in ("", step["type"])]
