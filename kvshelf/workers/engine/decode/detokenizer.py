"""Tokens to text, one token at a time."""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_UNFINISHED: Final = 3  # bytes that may still become one character of UTF-8, and so the most tokens
_LONGEST_RUN: Final = 16  # tokens without text; each more is decoded with all of them


class Detokenizer:
    """The text of tokens that come one after the other: whole characters only, and U+FFFD for bytes that are none.

    All pieces together are what `decoder` makes of all tokens, but for bytes that are no text, of which there may be
    more or fewer U+FFFD. A tokenizer that falls back to bytes lets one bad byte spoil the characters beside it; those
    that are out already stay.
    """

    def __init__(self, decoder: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._stream = self._new_stream()
        self._held: list[int] = []
        """Tokens whose text is not out, oldest first. The stream has them too, and does not tell."""

    def push(self, token: int) -> str:
        """Add a token. Returns the text that is final with it: "" within a character."""
        self._held.append(token)
        piece = self._step(token)
        if piece is not None:
            self._held.clear()
            return piece
        return self._let_go() if len(self._held) >= _LONGEST_RUN else ""

    def rest(self) -> str:
        """The text of what is held, after the last token: U+FFFD for a character that is not whole."""
        return self._decode(self._held)

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._decoder, token)
        except Exception:  # tokenizers has no class for it: what was text is none any more beside these bytes
            self._stream = self._new_stream()
            return self._stream.step(self._decoder, self._held)

    def _let_go(self) -> str:
        """No character: the stream would hold it, and all that follows, for ever."""
        ended, last = self._held[:-_UNFINISHED], self._held[-_UNFINISHED:]
        text = self._decode(ended)
        if not text:  # control tokens, say, which are skipped
            return ""
        self._stream, self._held = self._new_stream(), []
        return text + "".join(map(self.push, last))

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(skip_special_tokens=self._skip)

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip)
