"""The types that describe a service: its models, policies, limits and readiness."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field, computed_field

from kvshelf.api.strict import LayoutName, ListBody, ResponseBody


class ModelObject(ResponseBody):
    """A model, with the fields of OpenAI's and Anthropic's models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvshelf"
    max_tokens: int = 0
    default_layout: LayoutName | None = None
    parent: str | None = Field(None, description="of an adapter: the model that it is of")
    fingerprint: str | None = None
    tokenizer: str | None = Field(None, description="digest of the tokenizer; empty if the model has none")
    dtype: str | None = None
    device: str | None = None
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    linked: dict[str, float] = Field(
        default_factory=dict,
        description="of models whose caches it answers from, by a link: the agreement, by their fingerprints",
    )

    @property
    def read_fingerprints(self) -> list[str]:
        """Of the models whose caches it answers from."""
        return [*([self.fingerprint] if self.fingerprint else []), *self.linked]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def display_name(self) -> str:
        return self.id

    @computed_field  # type: ignore[prop-decorator]
    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)


class ModelList(ListBody):
    data: list[ModelObject]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class MethodObject(ResponseBody):
    """What policies, selectors and suffix policies have in common."""

    id: str
    object: str
    summary: str
    advice: str = ""
    source: str


class PolicyObject(MethodObject):
    """`parameters` maps a name to its type, default, legal values and help. `measured` holds rows of the quality bench
    on the bundled model: the share of exact answers on tasks that the full cache solves, and the bytes stored."""

    object: Literal["policy"] = "policy"
    phase: str = "during"
    takes_budget: bool = True
    takes_questions: bool = False
    measured: list[dict[str, Any]] = Field(default_factory=list)
    parameters: dict[str, dict[str, Any]]


class PolicyList(ListBody):
    data: list[PolicyObject]


class SelectorObject(MethodObject):
    """`parameters` as of a policy. `measured` holds rows of the quality bench on the bundled model, over a cache with
    all entries under a codec: `share` of a document's tokens that a token of an answer may read, `read_share` that it
    read, and the share of `exact` answers on tasks that the full cache solves."""

    object: Literal["selector"] = "selector"
    measured: list[dict[str, Any]] = Field(default_factory=list)
    parameters: dict[str, dict[str, Any]]


class SelectorList(ListBody):
    data: list[SelectorObject]


class SuffixPolicyObject(MethodObject):
    """`parameters` as of a policy."""

    object: Literal["suffix_policy"] = "suffix_policy"
    parameters: dict[str, dict[str, Any]]


class SuffixPolicyList(ListBody):
    data: list[SuffixPolicyObject]


class Allowance(ResponseBody):
    """A limit of a tenant, its use and what is left. `limit` null: unlimited. `used` null: not counted, or the store is
    not answering."""

    limit: int | None
    used: int | None
    left: int | None


class TenantAllowances(ResponseBody):
    """The caller's tenant: its caches on the shelf and its load on this front end, including this request."""

    caches: Allowance
    bytes: Allowance
    batches: Allowance | None = None
    open_requests: Allowance
    requests_per_minute: Allowance
    tokens_per_minute: Allowance | None = None


class Limits(ResponseBody):
    """The limits of one request, those of the caller's tenant, and the scopes of its key."""

    object: Literal["limits"] = "limits"
    max_body_bytes: int
    max_import_bytes: int = 0
    max_file_bytes: int | None = None
    max_batch_rows: int | None = None
    max_document_tokens: int | None = Field(None, description="length of a document; null: the limit of its model")
    max_prompts: int
    max_queued_requests: int
    upload_deadline_s: float
    request_deadline_s: float
    models: dict[str, int] = Field(description="by model: maximum tokens of document, question and answer together")
    tenant: TenantAllowances | None = None
    scopes: list[str] | None = Field(None, description="what the caller's key allows; without keys, everything")


class ReadyPart(ResponseBody):
    """One part of the service: the store, the workers of a model, or `space`, where there is no room for more."""

    name: str
    ready: bool
    reason: str = ""


class Readiness(ResponseBody):
    status: Literal["ready", "degraded"]
    parts: list[ReadyPart]
