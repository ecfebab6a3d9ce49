"""What other processes call of a replica, and what it returns beside an `Answer`. Known without torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field

from kvshelf import api
from kvshelf.api.answers import Answer, Phase, Piece
from kvshelf.api.caches import ExportDtype, ExportTo
from kvshelf.api.inspect import BuiltPrompt, KeptOf, KeptTokens
from kvshelf.artifact.identity import Boundary, Identity
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.attempts import MAX_ATTEMPTS
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.memory.retention import Hint


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


class SearchResult(api.SearchList):
    """A search's result as the API reports it, with fields for the service alone. phases: list, read, code and rank.
    prefill_tokens: of the question."""

    prefill_tokens: int = Field(exclude=True)
    phases: tuple[Phase, ...] = Field(exclude=True)


class ReplicaApi(Protocol):
    """The calls of a replica, as types: a call names its method here, so that its arguments and result are checked."""

    async def describe(self, *, caller: Caller) -> dict[str, Any]: ...

    async def settle(self, *, caller: Caller) -> None: ...

    async def create(
        self, spec: api.CreateCache, *, caller: Caller, request_id: str | None = None, max_attempts: int = MAX_ATTEMPTS
    ) -> Created: ...

    def watch(self, spec: api.CreateCache, *, caller: Caller) -> AsyncIterator[api.CreationProgress | Created]: ...

    async def append(self, cache_id: str, spec: api.AppendCache, *, caller: Caller) -> Created: ...

    async def estimate(self, spec: api.Estimate, *, caller: Caller) -> api.EstimateObject: ...

    async def query(
        self, caches: str | Sequence[str], query: api.Asking, *, caller: Caller, of_batch: bool = False
    ) -> Answer: ...

    def stream(
        self, caches: str | Sequence[str], query: api.Asking, *, caller: Caller
    ) -> AsyncIterator[Piece | Answer]: ...

    async def hint(self, hints: Sequence[Hint], *, caller: Caller) -> dict[str, int]: ...

    async def warm(self, keys: Sequence[tuple[str, str]], *, caller: Caller) -> api.WarmedReplica: ...

    async def count(
        self,
        query: api.Asking,
        document: str | None,
        boundary: Boundary | None,
        cached: Mapping[str, Any],
        *,
        caller: Caller,
    ) -> int: ...

    async def prompt(self, cache_id: str, query: api.Query, *, caller: Caller) -> BuiltPrompt: ...

    async def search(self, spec: api.SearchCaches, *, caller: Caller) -> SearchResult: ...

    async def inspect(
        self, cache_id: str, body: KeptOf | None, *, caller: Caller, first_layer: int = 0
    ) -> KeptTokens: ...

    def export(
        self, cache_id: str, to: ExportTo, dtype: ExportDtype | None, engine_model: str | None, *, caller: Caller
    ) -> AsyncIterator[bytes]: ...

    async def require_source(self, identity: Identity, source: str, *, caller: Caller) -> None: ...
