"""What other processes call of a replica, as types: a call names its method here, so that its arguments and its result
are checked. Known without torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from kvshelf import api
from kvshelf.api.answers import Answer, Piece
from kvshelf.api.caches import ExportDtype, ExportTo
from kvshelf.api.inspect import BuiltPrompt, KeptOf, KeptTokens
from kvshelf.artifact.identity import Boundary, Identity
from kvshelf.workers.replica.attempts import MAX_ATTEMPTS
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.memory.retention import Hint
from kvshelf.workers.replica.results import Created, SearchResult


class ReplicaApi(Protocol):
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
