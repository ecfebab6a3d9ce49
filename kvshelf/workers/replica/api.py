"""What other processes call of a replica, as types: a call names its method here, so that its arguments and its result
are checked. Known without torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from kvshelf.api import (
    AppendCache,
    Asking,
    CreateCache,
    CreationProgress,
    Estimate,
    EstimateObject,
    Query,
    SearchCaches,
)
from kvshelf.api.inspect import BuiltPrompt, KeptOf, KeptTokens
from kvshelf.artifact.identity import Boundary, Identity
from kvshelf.workers.replica.attempts import MAX_ATTEMPTS
from kvshelf.workers.replica.results import Created, Found, Reply


class ReplicaApi(Protocol):
    """origin: the id under which the caller logs the request, which log lines of the replica carry, too."""

    async def describe(self, *, origin: str = "") -> dict[str, Any]: ...

    async def settle(self, *, origin: str = "") -> None: ...

    async def create(
        self,
        spec: CreateCache,
        *,
        tenant: str,
        deadline_s: float | None = None,
        request_id: str | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        origin: str = "",
    ) -> Created: ...

    def watch(
        self, spec: CreateCache, *, tenant: str, deadline_s: float | None = None, origin: str = ""
    ) -> AsyncIterator[CreationProgress | Created]: ...

    async def append(
        self, cache_id: str, spec: AppendCache, *, tenant: str, deadline_s: float | None = None, origin: str = ""
    ) -> Created: ...

    async def estimate(self, spec: Estimate, *, tenant: str, origin: str = "") -> EstimateObject: ...

    async def query(
        self,
        caches: str | Sequence[str],
        query: Asking,
        *,
        of_batch: bool = False,
        tenant: str,
        deadline_s: float | None = None,
        origin: str = "",
    ) -> Reply: ...

    def stream(
        self,
        caches: str | Sequence[str],
        query: Asking,
        *,
        tenant: str,
        deadline_s: float | None = None,
        origin: str = "",
    ) -> AsyncIterator[str | Reply]: ...

    async def hint(
        self, cache_id: str, next_use_s: float | None, *, tenant: str, origin: str = ""
    ) -> dict[str, int]: ...

    async def count(
        self,
        query: Asking,
        document: str | None,
        boundary: Boundary | None,
        cached: Mapping[str, Any],
        *,
        tenant: str,
        origin: str = "",
    ) -> int: ...

    async def prompt(self, cache_id: str, query: Query, *, tenant: str, origin: str = "") -> BuiltPrompt: ...

    async def search(
        self, spec: SearchCaches, *, tenant: str, deadline_s: float | None = None, origin: str = ""
    ) -> Found: ...

    async def inspect(
        self, cache_id: str, body: KeptOf | None, *, tenant: str, first_layer: int = 0, origin: str = ""
    ) -> KeptTokens: ...

    async def require_source(self, identity: Identity, source: str, *, tenant: str, origin: str = "") -> None: ...
