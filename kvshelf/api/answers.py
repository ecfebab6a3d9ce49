"""An answer as a value, whole and in pieces: the engine makes it, a replica adds how it was served, and each dialect of
the API gives it its shape."""

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
    """A piece of the text of an answer, as a stream has it. logprobs: of the tokens whose text ends in it; None where
    nobody asked for them. is_thought: whether it is of the thoughts before the answer."""

    logprobs: list[Logprob] | None
    is_thought: bool

    def __new__(cls, text: str, logprobs: list[Logprob] | None = None, *, is_thought: bool = False) -> Self:
        piece = super().__new__(cls, text)
        piece.logprobs, piece.is_thought = logprobs, is_thought
        return piece


@dataclass(frozen=True)
class Guarded:
    """An answer that was asked again of the full cache. policy: of its cache. group: by the guard's label. below:
    whether the cache is therefore known to be below the floor. drifts: whether the answers of the policy and group
    raise an alarm."""

    policy: str
    group: str
    differs: bool
    kl: float
    below: bool
    drifts: bool


@dataclass(frozen=True)
class Served:
    """How a replica answered from the shelf.

    cache_ids: that were asked, one for each of `Answer.sources`; of those that were read, `read_ids`, one for each of
    `Answer.passages`, the longest is `cache_id`, with its policy and ratio. read_from: "memory", or where the blob was
    read, as `ArrivingCache.place`; of several caches that of the slowest. phases: load, queue, prefill (up to the first
    token), decode. The later ones may begin before the last layer is loaded. memory: what happened in the replica's
    memory for caches since its last answer, as `Residents.take_counts`; guarded: what its guard found since then.
    suffix_bytes: as of a `Ticket`.
    stored_cache_id, not_stored: of a question with `store`. remade: caches of the question that were made again for it.
    linked: to the maker of the cache, where the model that answered is another one.
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
    the question's attention that each document got. passages: of each document a byte for each token, as of
    `ReadShares`, if asked for. likelihood: of the question's tokens behind the documents, as the logarithm of their
    probability, if asked for. logprobs: of each token of the text, if asked for. stop: the stop text that ended it, if
    one did. thought: what the model thought before the text, and tool_calls what it calls behind it, where a replica
    told them apart."""

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
        """False where several documents were read together: none of them saw the others, so the answer is not the one
        that the model has of all as one text. Of one document nothing is said."""
        return False if len(self.served.read_ids or [share for share in self.sources if share]) > 1 else None

    def also(self, **served: Any) -> Self:
        """The same, with these fields of how it was served."""
        return replace(self, served=replace(self.served, **served))
