"""The types of what a service says of itself: its models, policies and limits, and whether it is ready."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvshelf.api.strict import LayoutName, ResponseBody


class ModelObject(ResponseBody):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvshelf"
    max_tokens: int = 0
    default_layout: LayoutName | None = None
    fingerprint: str | None = None
    tokenizer: str | None = Field(None, description="digest of the tokenizer; empty where the model has none")
    dtype: str | None = None
    device: str | None = None


class ModelList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class PolicyObject(ResponseBody):
    """`parameters` maps a name to its type, default, legal values and help. `measured` are rows of the quality bench on
    the bundled model: the share of exact answers where the full cache gives nearly all, and the bytes it took."""

    id: str
    object: Literal["policy"] = "policy"
    summary: str
    advice: str = ""
    source: str
    phase: str = "during"
    takes_budget: bool = True
    takes_questions: bool = False
    measured: list[dict[str, Any]] = Field(default_factory=list)
    parameters: dict[str, dict[str, Any]]


class PolicyList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[PolicyObject]


class Allowance(ResponseBody):
    """How much a tenant may have of something, has, and may have besides. `limit` null: any number. `used` null: not
    counted, or the store does not say at the moment."""

    limit: int | None
    used: int | None
    left: int | None


class TenantAllowances(ResponseBody):
    """Of the caller's tenant: what is on the shelf, and what it asks of this front end, this very request included."""

    caches: Allowance
    bytes: Allowance
    batches: Allowance | None = None
    open_requests: Allowance
    requests_per_minute: Allowance
    tokens_per_minute: Allowance | None = None


class Limits(ResponseBody):
    """What one request may ask of this service, and the caller's tenant of all together."""

    object: Literal["limits"] = "limits"
    max_body_bytes: int
    max_import_bytes: int = 0
    max_file_bytes: int | None = None
    max_batch_rows: int | None = None
    max_document_tokens: int | None = Field(None, description="of a document; null: as many as its model takes")
    max_prompts: int
    max_queued_requests: int
    upload_deadline_s: float
    request_deadline_s: float
    models: dict[str, int] = Field(description="longest document, question and answer together, in tokens, by model")
    tenant: TenantAllowances | None = None


class ReadyPart(ResponseBody):
    """One thing the service needs: the store, or the workers of a model."""

    name: str
    ready: bool
    reason: str = ""


class Readiness(ResponseBody):
    status: Literal["ready", "degraded"]
    parts: list[ReadyPart]
