"""What a replica returns beside an `Answer`. A module of its own: callers in other processes need no transformers."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from kvshelf.api import SearchList
from kvshelf.api.answers import Phase
from kvshelf.store.manifest import Manifest


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


class SearchResult(SearchList):
    """A search's result as the API reports it, with fields for the service alone. phases: list, read, code and rank.
    prefill_tokens: of the question."""

    prefill_tokens: int = Field(exclude=True)
    phases: tuple[Phase, ...] = Field(exclude=True)
