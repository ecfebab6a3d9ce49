"""The types of POST /v1/erasures: what is to go, and the receipt that says what went and what stays."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvshelf.api.strict import CacheName, Labels, RequestBody, ResponseBody, misuse

ErasedKind = Literal["cache", "source", "response", "request", "batch", "file", "lines"]


class CreateErasure(RequestBody):
    """POST /v1/erasures: everything that has all of `labels`, and the `name`, and what is derived from it. `tenant`,
    the caller's own, without labels and name: everything of it."""

    labels: Labels = Field(default_factory=dict, description="what has all of these")
    name: CacheName | None = Field(None, description="what has this name")
    tenant: str | None = Field(None, description="the caller's tenant; alone it means everything that the tenant has")
    dry_run: bool = Field(False, description="say what would go, and leave it")

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if not self.labels and not self.name and self.tenant is None:
            raise misuse("labels", "say what is to be erased: labels, a name, or the tenant for everything of it")
        return self


class ErasedThing(ResponseBody):
    """One thing that went. `digest`: BLAKE3 of its bytes, of a cache the root digest of its blob. `lines`: of a batch's
    journal or of a file, which else stays, so many lines went. `erased_at` null: not yet, or only in a dry run."""

    kind: ErasedKind
    id: str
    digest: str | None = None
    bytes: int = 0
    lines: int = 0
    erased_at: float | None = None


class StayingThing(ResponseBody):
    """What stays, and why."""

    kind: Literal["usage", "tombstone", "request", "batch"]
    id: str
    why: str


class Erasure(ResponseBody):
    """A receipt. `in_progress`: there was not enough time for all; the same request goes on. `digest`: BLAKE3 of the
    canonical JSON of the other fields but `public_key` and `signature`, which is Ed25519 over the 64 digits of it."""

    id: str
    object: Literal["erasure"] = "erasure"
    status: Literal["dry_run", "in_progress", "completed"]
    tenant: str
    labels: dict[str, str] = Field(default_factory=dict)
    name: str | None = None
    created_at: float
    completed_at: float | None = None
    homes: list[str]
    erased: list[ErasedThing]
    stays: list[StayingThing]
    counts: dict[str, int] = Field(default_factory=dict, description="things that went, by kind")
    bytes: int = 0
    digest: str = ""
    public_key: str | None = Field(None, description="Ed25519, 32 bytes in hex")
    signature: str | None = Field(None, description="64 bytes in hex; null where no key is set")
