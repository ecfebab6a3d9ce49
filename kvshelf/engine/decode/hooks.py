"""Hooks of one row of a batch: they see its passes, and may change what these read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import NamedTuple

from torch import Tensor

from kvshelf.api.answers import Answer
from kvshelf.engine.attention.attachment import Wait
from kvshelf.engine.attention.function import Attended
from kvshelf.engine.decode.suffixes import SuffixRow


class Wants(Flag):
    """What a hook wants of the pass over a row's pending tokens."""

    NOTHING = 0
    QUERIES = auto()
    """Those of each layer before its attention, in `before`. A question has a pass of its own then."""
    EARLY = auto()
    """In their place those that each layer but the first would make of the previous one's input, times the scaling of
    its logits."""
    STATES = auto()
    """The queries, keys and values of each layer."""
    MASSES = auto()
    """How much attention the last token of a question gave to each document. It has a pass of its own."""
    LIKELIHOOD = auto()
    """What the model gives each token of a question. It has a pass of its own."""
    WEIGHTS = auto()
    """What the pending token gave to each entry of the suffix."""


@dataclass(frozen=True)
class Shown:
    """What a pass showed of one row. states: by layer. masses: `[documents]` of each layer. weights: by layer,
    `[q_heads, S]` fp32 over the suffix with the row's tokens. The memory of states and weights is used again by the
    next pass. complete: whether no token is left for a later step. log_probs: `[T]` fp32 of the tokens that follow
    those that ran; one fewer at the end."""

    states: Mapping[int, Attended] = field(default_factory=dict)
    masses: Sequence[Tensor] = ()
    weights: Mapping[int, Tensor] = field(default_factory=dict)
    complete: bool = True
    log_probs: Tensor | None = None


class Copied(NamedTuple):
    """`entries` of the document that come before the entry `place` of a row: each layer that attends, with keys
    `[kv_heads, entries, D]` and values `[kv_heads, entries, Dv]`. A layer is made when it is asked for."""

    place: int
    entries: int
    layers: Iterator[tuple[int, tuple[Tensor, Tensor]]]


NOTHING_SHOWN, NOT_COMPLETE = Shown(), Shown(complete=False)
"""For rows whose hooks want nothing: most of them, at each step."""


class RowHook:
    """What follows one row, as a selection does; by default it wants and does nothing. An error ends the row's answer
    alone. A batch asks only what the hooks of a row want."""

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:  # noqa: ARG002
        """What it wants of the next pass. answering: whether the pending token is one of the answer."""
        return Wants.NOTHING

    def before(self, layer: int, queries: Tensor, position: int, wait: Wait) -> None:
        """Take the queries of the pending tokens at a layer before their attention, `[T, q_heads, D]`. position: of the
        first. `wait` and errors as for `Attachment.prefixes`: an error ends the step."""

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:
        """Take what a pass showed, once its tokens are in the suffix."""

    def took(self, answer: Sequence[int]) -> None:
        """All tokens but the last of the answer so far have run, and this one runs next."""

    def copies(self, row: SuffixRow) -> Copied | None:  # noqa: ARG002
        """Entries of the document that the row has copies of; called once, behind the question, before `reduced`."""
        return None

    def reduced(self, row: SuffixRow) -> int | None:  # noqa: ARG002
        """Drop entries of the suffix, if it is time; after `took`. Returns how many entries need room from now on."""
        return None

    def close(self, answer: Answer) -> Answer:
        """A finished answer, with what the hook knows of it."""
        return answer
