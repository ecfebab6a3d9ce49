"""What the scheduler tells the workers for one step of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class Load:
    """The entries `first` to `entries` (excluded) of a tenant's cache go to vLLM's pages of a request. pages: all of
    the request, from its first token on. root: the digest of the blob of a cache whose heads have different numbers of
    entries, and a page table each; "" of any other."""

    request_id: str
    cache_id: str
    tenant: str
    first: int
    entries: int
    pages: tuple[int, ...]
    root: str = ""

    @property
    def kept_as(self) -> str:
        """What names its tail in a worker."""
        return self.root or self.cache_id


@dataclass
class ConnectorStep(KVConnectorMetadata):  # type: ignore[misc]
    """What the step's forward pass loads, and which requests fail. ragged: the roots of ragged caches that its requests
    ask, by their first page. unfinished: the roots that any request asks, waiting ones too."""

    loads: list[Load] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    ragged: dict[int, str] = field(default_factory=dict)
    unfinished: frozenset[str] = frozenset()
