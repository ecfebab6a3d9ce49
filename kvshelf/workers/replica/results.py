"""What a replica returns. A module of its own: callers in other processes need no transformers for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from pydantic import Field

from kvshelf.api import Answered, AnswerObject, JointAnswer, SearchList, Source
from kvshelf.api.tools import ToolCall
from kvshelf.store.manifest import Manifest


class Phase(NamedTuple):
    """A part of a call: it began `start_s` seconds after the replica took the call up, and took `seconds`.

    Replicas return phases with their replies; they expose no metrics endpoint.
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


@dataclass(frozen=True)
class Stored:
    """A cache on the shelf. `existing`: it was there before the creation."""

    manifest: Manifest
    existing: bool


@dataclass(frozen=True)
class Created:
    """The caches of a creation: one, or one for each of its levels or of the document's parts, in their order.

    phases: queue, prefill, compress, measure and store, reported in sequence although prefill and compress take turns;
    empty if nothing was compressed. Levels that were tried and not kept count as measuring. worker: the replica that
    worked on it, where the request is recorded in the job table. prefilled_tokens: of the document; several prefills
    count as one.
    """

    caches: tuple[Stored, ...]
    phases: tuple[Phase, ...] = ()
    worker: str = ""
    prefilled_tokens: int = 0

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first cache, the only one unless the creation has levels or parts."""
        return self.caches[0].manifest

    @property
    def existing(self) -> bool:
        """Whether all caches were on the shelf before."""
        return all(cache.existing for cache in self.caches)


class Found(SearchList):
    """A search's result as the API reports it, with fields for the service alone. phases: list, read, code and rank.
    prefill_tokens: of the question."""

    prefill_tokens: int = Field(exclude=True)
    phases: tuple[Phase, ...] = Field(exclude=True)


class Reply(AnswerObject):
    """An answer as the API reports it, with fields for the service alone, which are not serialized.

    token_ids: including the end token, if there is one. read_from: "memory", or where the blob was read, as
    `ArrivingCache.place`; of several caches that of the slowest. phases: load, queue, prefill (up to the first token),
    decode. The later ones may begin before the last layer is loaded. memory: what happened in the replica's memory for
    caches since its last reply, as `Residents.take_counts`. suffix_bytes: as of a `Ticket`. sources: the caches that
    were asked; of several, the longest is `cache_id`, with its `policy` and `compression_ratio`. stop: of an
    `Answer`. tool_calls: of an answer to a `ToolAsking`; `text` is what stands before them.
    """

    token_ids: list[int] = Field(exclude=True)
    read_from: str = Field(exclude=True)
    phases: tuple[Phase, ...] = Field(exclude=True)
    memory: dict[str, int] = Field(default_factory=dict, exclude=True)
    suffix_bytes: int = Field(0, exclude=True)
    sources: tuple[Source, ...] = Field((), exclude=True)
    tool_calls: list[ToolCall] = Field(default_factory=list, exclude=True)
    stop: str | None = Field(None, exclude=True)

    @property
    def joint(self) -> JointAnswer:
        """The answer as that of all its caches together."""
        same = self.model_dump(include=set(Answered.model_fields))
        sources = list(self.sources)
        return JointAnswer(**same, cache_ids=[source.cache_id for source in sources], sources=sources)

    @property
    def first_token_s(self) -> float:
        """Seconds from the question's arrival at the replica to the first token of the answer."""
        return self.phases[-1].start_s
