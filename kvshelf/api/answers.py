"""An answer as a value, whole and in pieces, from which each dialect of the API makes its own shape."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self

from kvshelf.api.queries import Linked, Remade, Source, Usage
from kvshelf.api.shapes import Logprob
from kvshelf.api.strict import FinishReason
from kvshelf.api.tools import ToolCall


class Phase(NamedTuple):
    """A part of a call: it began `start_s` seconds after the replica took the call up, and took `seconds`.

    Replicas return phases with their results; they expose no metrics endpoint.
    """

    name: str
    start_s: float
    seconds: float


def in_sequence(**seconds: float) -> tuple[Phase, ...]:
    """Phases of these lengths, each beginning where the one before it ended."""
    starts = accumulate(seconds.values(), initial=0.0)
    return tuple(Phase(name, start_s, seconds[name]) for name, start_s in zip(seconds, starts, strict=False))


def rounded(phases: tuple[Phase, ...]) -> dict[str, float]:
    """Seconds of each phase by name, for a log line."""
    return {f"{phase.name}_s": round(phase.seconds, 4) for phase in phases}


class Piece(str):
    """A piece of a streamed answer. logprobs: of the tokens whose text ends in it; None if the question asks for none.
    is_thought: whether it belongs to the thoughts before the answer."""

    logprobs: list[Logprob] | None
    is_thought: bool

    def __new__(cls, text: str, logprobs: list[Logprob] | None = None, *, is_thought: bool = False) -> Self:
        piece = super().__new__(cls, text)
        piece.logprobs, piece.is_thought = logprobs, is_thought
        return piece


@dataclass(frozen=True)
class Guarded:
    """The comparison of an answer with the full cache's. policy: of its cache. group: by the guard's label. below:
    whether the cache is known to be below the floor. drifts: whether the answers of policy and group raise an alarm."""

    policy: str
    group: str
    differs: bool
    kl: float
    below: bool
    drifts: bool


@dataclass(frozen=True)
class Served:
    """How a replica answered from the shelf.

    cache_ids: the caches of the question, one for each of `Answer.sources`. read_ids: those that it read, one for each
    of `Answer.passages`; the longest of them is `cache_id`, with its policy and ratio. read_from: "memory", or
    `ArrivingCache.place` of the slowest cache. phases: load, queue, prefill (up to the first token), decode. The later
    ones may begin before the last layer is loaded. memory: `Residents.take_counts` since the replica's last answer;
    guarded: the comparisons of its guard since then. suffix_bytes: as of a `Ticket`. stored_cache_id, not_stored: of a
    question with `store`. remade: caches that were made again for it. linked: to the maker, if another model answered.
    """

    id: str = ""
    cache_ids: tuple[str, ...] = ()
    read_ids: tuple[str, ...] = ()
    cache_id: str = ""
    policy: str = ""
    compression_ratio: float = 0.0
    load_ms: float = 0.0
    read_from: str = "memory"
    phases: tuple[Phase, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)
    guarded: tuple[Guarded, ...] = ()
    suffix_bytes: int = 0
    stored_cache_id: str | None = None
    not_stored: str | None = None
    remade: tuple[Remade, ...] = ()
    linked: Linked | None = None

    @property
    def first_token_s(self) -> float:
        """Seconds from the question's arrival at the replica to the first token of the answer."""
        return self.phases[-1].start_s


@dataclass(frozen=True)
class Answer:
    """A finished answer. `token_ids` include the end token where there is one; `text` does not. sources: the part of
    the question's attention that each document got. stop: the stop text that ended it, if one did. thought, tool_calls:
    the thoughts before the text and the calls behind it, if a replica told them apart. If the question asks for them:
    passages, a byte for each token of each document, as of `ReadShares`; likelihood, the logarithm of the probability
    of the question's tokens behind the documents; logprobs of each token of the text."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    sources: tuple[float, ...] = (1.0,)
    passages: tuple[bytes, ...] | None = None
    logprobs: tuple[Logprob, ...] | None = None
    stop: str | None = None
    thought: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    likelihood: float | None = None
    served: Served = field(default_factory=Served, repr=False)

    @property
    def shares(self) -> list[Source]:
        """`sources` of the caches that were asked, by their ids."""
        pairs = zip(self.served.cache_ids, self.sources, strict=True)
        return [Source(cache_id=cache_id, share=share) for cache_id, share in pairs]

    @property
    def exact(self) -> Literal[False] | None:
        """False if several documents were read: they did not see each other, so it is no answer of all as one text."""
        return False if len(self.served.read_ids or [share for share in self.sources if share]) > 1 else None

    def also(self, **served: Any) -> Self:
        """The same, with these fields of how it was served."""
        return replace(self, served=replace(self.served, **served))
