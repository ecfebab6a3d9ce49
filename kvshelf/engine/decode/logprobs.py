"""What the model gave the tokens of an answer, before temperature, top_p and any grammar: as vLLM reports it by
default, so that the figures of an answer in a shape say how the model liked it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from kvshelf.api.answers import Piece
from kvshelf.api.shapes import Logprob, TokenLogprob

_LEAST: Final = -9999.0
"""Stands for less: JSON has no infinity."""


class Logprobs:
    """Of one answer. top: how many of the likeliest tokens are told beside each. bytes_of: of a token's text."""

    def __init__(self, top: int, bytes_of: Callable[[int], bytes]) -> None:
        self._top = top
        self._bytes_of = bytes_of
        self._told: list[Logprob] = []
        self._given = 0

    def take(self, token: int, logprobs: Tensor) -> None:
        """Add a token of the answer. logprobs: of the whole vocabulary, `[vocabulary]` fp32."""
        best, ids = logprobs.topk(self._top)
        likeliest = [self._named(*each) for each in zip(ids.tolist(), best.tolist(), strict=True)]
        own = self._named(token, float(logprobs[token]))
        self._told.append(Logprob(**own.model_dump(), top_logprobs=likeliest))

    def told(self) -> tuple[Logprob, ...]:
        """Of each token so far."""
        return tuple(self._told)

    def beside(self, text: str, tokens: int) -> Piece:
        """The next text of the answer, with which the text of so many tokens is final."""
        first, self._given = self._given, tokens
        return Piece(text, self._told[first:tokens])

    def _named(self, token: int, logprob: float) -> TokenLogprob:
        found = self._bytes_of(token)
        return TokenLogprob(token=found.decode(errors="replace"), logprob=max(logprob, _LEAST), bytes=list(found))
