"""Tokens to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_UNFINISHED: Final = 3  # most bytes, and so most tokens, of an incomplete UTF-8 character
_LONGEST_RUN: Final = 16  # tokens that wait before it gives up: each further one decodes all of them again


class Detokenizer:
    """Turns a stream of tokens into text: whole characters only, and U+FFFD for bytes that form no character.

    The pieces together equal `decoder`'s text of all tokens, but invalid bytes may give more or fewer U+FFFD. With a
    tokenizer that falls back to bytes, one bad byte spoils the characters next to it, except those already returned.
    """

    def __init__(self, decoder: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._stream = self._new_stream()
        self._waiting: list[int] = []
        """Tokens whose text has not been returned, oldest first. The stream holds them too, but hides them."""

    def push(self, token: int) -> str:
        """Add a token. Returns the text that it completes: "" in the middle of a character."""
        self._waiting.append(token)
        piece = self._step(token)
        if piece is not None:
            self._waiting.clear()
            return piece
        return self._give_up() if len(self._waiting) >= _LONGEST_RUN else ""

    def rest(self) -> str:
        """The text of the waiting tokens, to call after the last one: U+FFFD for an incomplete character."""
        return self._decode(self._waiting)

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._decoder, token)
        except Exception:  # tokenizers has no class for this error: the new bytes changed text already decoded
            self._stream = self._new_stream()
            return self._stream.step(self._decoder, self._waiting)

    def _give_up(self) -> str:
        """Stop waiting for a character: the stream would hold these tokens, and all after them, for ever."""
        ended, last = self._waiting[:-_UNFINISHED], self._waiting[-_UNFINISHED:]
        text = self._decode(ended)
        if not text:  # control tokens, say, which are skipped
            return ""
        self._stream, self._waiting = self._new_stream(), []
        return text + "".join(map(self.push, last))

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=self._skip)

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip)


def may_begin(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of a text with which one of these marks may begin."""
    longest = max(map(len, marks), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
